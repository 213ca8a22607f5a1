"""Deploy profiles: `deploy/profiles/NAME.yaml`, merged with the files that it extends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from glm5_ascend.deploy.profiles.file import ProfileFile, SwitchKeys
from glm5_ascend.engine_lines import LINES, SGLANG, VLLM, EngineLine
from glm5_ascend.errors import ConfigError
from glm5_ascend.files.resources import data_dir, near
from glm5_ascend.files.yaml_file import read_yaml
from glm5_ascend.serve.c8_flags import LI_KEY, SFA_KEY, with_flags

PER_RANK = "per_rank"
#: Keys that a profile or one of the files that it extends must have.
REQUIRED = (
    "name", "title", "line", "status", "source", "models", "hardware", "weights", "roles", "scheduling",
    "on_next", "base", "multi_node",
)  # fmt: skip


@dataclass(frozen=True)
class Role:
    """Command of the machines of one role.

    Attributes:
        nodes: number of machines.
        per_rank: one server per DP rank, on ports from `port` on; else one command per machine.
        env: environment variables; values may contain `{words}` (see `command.WORDS`).
        args: flag of the engine without dashes -> value; True and False are flags without a value.
        engine: `vllm` or `sglang`.
    """

    name: str
    nodes: int
    per_rank: bool
    port: int
    env: dict[str, str]
    args: dict[str, Any]
    engine: str = VLLM

    @property
    def local_ranks(self) -> int:
        """DP ranks per machine. SGLang counts DP ranks inside the tensor parallel group: one server."""
        if self.engine == SGLANG:
            return 1
        if self.per_rank:
            return int(self.args["data-parallel-size"]) // self.nodes
        return int(self.args.get("data-parallel-size-local", self.args.get("data-parallel-size", 1)))

    @property
    def rank_dies(self) -> int:
        """Dies of one DP rank on one machine; with SGLang and pipeline stages a rank may span machines."""
        if self.engine == SGLANG:
            return int(self.args.get("tp-size", 1)) // self.nodes
        dies = int(self.args.get("tensor-parallel-size", 1)) * int(self.args.get("pipeline-parallel-size", 1))
        return dies // int(self.args.get("nnodes", 1))

    @property
    def int8_caches(self) -> str:
        """Which caches are int8, in the planner's words: `none`, `li` (indexer keys) or `li+sfa` (latents, too)."""
        switches = self.args.get("additional-config", {})
        if switches.get(SFA_KEY):
            return "li+sfa"
        return "li" if switches.get(LI_KEY) else "none"

    def for_line(self, line: EngineLine) -> Role:
        """Spell the int8 caches as an engine line reads them."""
        return replace(self, args=with_flags(self.args)) if line.int8_cache_flags else self


@dataclass(frozen=True)
class Profile:
    """See `deploy/README.md` for the meaning of every key."""

    name: str
    title: str
    line: EngineLine
    status: str
    source: str
    models: tuple[str, ...]
    hardware: dict[str, Any]
    weights: dict[str, str]
    memory: dict[str, float]
    roles: dict[str, Role]
    proxy: dict[str, Any]
    scheduling: dict[str, SwitchKeys]
    on_next: tuple[str, ...] = ()

    @property
    def platform(self) -> str:
        """`npu` or `cpu`."""
        return self.line.platform

    @property
    def engine(self) -> str:
        """`vllm` or `sglang`."""
        return self.line.engine

    def role(self, name: str | None) -> Role:
        """The named role, or the only one."""
        if name is None and len(self.roles) == 1:
            return next(iter(self.roles.values()))
        if name not in self.roles:
            problem = "has several roles" if name is None else f"has no role {name!r}"
            raise ConfigError(f"profile {self.name} {problem}", f"choose one with --role: {', '.join(self.roles)}")
        return self.roles[name]


def directory() -> Path:
    return data_dir("data/deploy/profiles")


def names() -> list[str]:
    """All profiles that can be served, without the abstract ones."""
    return sorted(path.stem for path in directory().glob("*.yaml") if not _read(path.stem).get("abstract"))


@cache
def load(name: str) -> Profile:
    """Raises `ConfigError` for a name that is not a profile's."""
    if name not in names():
        raise ConfigError(f"no profile {name!r}", near(name, names(), "profiles"))
    return _profile(name, _inherited(name))


def merge(below: Any, above: Any) -> Any:
    """Merge `above` into `below`: maps by key; None removes a key; every other value replaces."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    merged = {key: merge(below.get(key), value) for key, value in above.items() if value is not None}
    return {key: merged.get(key, value) for key, value in {**below, **merged}.items() if above.get(key, 0) is not None}


@cache
def _read(name: str) -> dict[str, Any]:
    """Keys of one file, with nulls. Callers must not change it."""
    return read_yaml(directory() / f"{name}.yaml", ProfileFile).model_dump(exclude_unset=True)


def _inherited(name: str) -> dict[str, Any]:
    keys = {key: value for key, value in _read(name).items() if key != "extends"}
    below = _read(name).get("extends")
    if below is None:
        return keys
    inherited = {key: value for key, value in _inherited(below).items() if key != "abstract"}
    merged: dict[str, Any] = merge(inherited, keys)
    # A null removes what `base` gives the role, so it must stay until `base` is merged.
    merged["roles"] = _keep_nulls(inherited.get("roles", {}), keys.get("roles", {}))
    return merged


def _keep_nulls(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{key: _keep_nulls(below.get(key), value) for key, value in above.items()}}


def _profile(name: str, data: dict[str, Any]) -> Profile:
    missing = [key for key in REQUIRED if data.get(key) is None]
    if missing:
        raise ConfigError(f"{directory() / name}.yaml: {', '.join(missing)}: key is missing", "see deploy/README.md")
    roles = {role: _role(role, data, keys) for role, keys in data["roles"].items()}
    return Profile(
        name=data["name"], title=data["title"], line=_line(name, data), status=data["status"], source=data["source"],
        models=tuple(data["models"]), hardware=data["hardware"], weights=data["weights"], memory=data.get("memory", {}),
        roles=roles, proxy=data.get("proxy", {}),
        scheduling={key: SwitchKeys(**keys) for key, keys in data["scheduling"].items()},
        on_next=tuple(data["on_next"]),
    )  # fmt: skip


def _line(name: str, data: dict[str, Any]) -> EngineLine:
    if data["line"] not in LINES:
        raise ConfigError(f"{directory() / name}.yaml: line: no {data['line']!r}", near(data["line"], LINES, "lines"))
    return LINES[data["line"]]


def _role(name: str, data: dict[str, Any], keys: dict[str, Any]) -> Role:
    layers = [data["base"]]
    if keys.get("nodes", 1) > 1:
        layers.append(data["multi_node"])
    if "uses" in keys:
        layers.append(data["shared"][keys["uses"]])
    merged: dict[str, Any] = {}
    for layer in (*layers, keys):
        merged = merge(merged, layer)
    return Role(
        name=name, nodes=merged["nodes"], per_rank=merged.get("launch") == PER_RANK, port=merged["port"],
        env={key: str(value) for key, value in merged.get("env", {}).items()}, args=merged["args"],
        engine=_line(name, data).engine,
    )  # fmt: skip
