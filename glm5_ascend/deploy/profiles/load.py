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
from glm5_ascend.serve.flags import LI_KEY, SFA_KEY, with_flags


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
        return self.line.platform

    @property
    def engine(self) -> str:
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
    """Merge `above` into `below`: maps by key; every other value, also None, replaces."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{key: merge(below.get(key), value) for key, value in above.items()}}


def without_nulls(value: Any) -> Any:
    """A null removes a key of a file below; it must stay until all layers are merged."""
    if not isinstance(value, dict):
        return value
    return {key: without_nulls(item) for key, item in value.items() if item is not None}


@cache
def _read(name: str) -> dict[str, Any]:
    """Keys of one file, with nulls. Callers must not change it."""
    return read_yaml(directory() / f"{name}.yaml", ProfileFile).model_dump(exclude_unset=True)


def _inherited(name: str) -> dict[str, Any]:
    keys = {key: value for key, value in _read(name).items() if key not in ("extends", "abstract")}
    below = _read(name).get("extends")
    merged: dict[str, Any] = keys if below is None else merge(_inherited(below), keys)
    return merged


def _profile(name: str, keys: dict[str, Any]) -> Profile:
    data = without_nulls(keys)
    try:
        line = LINES[data["line"]]
        return Profile(
            name=data["name"], title=data["title"], line=line, status=data["status"], source=data["source"],
            models=tuple(data["models"]), hardware=data["hardware"], weights=data["weights"],
            memory=data.get("memory", {}), proxy=data.get("proxy", {}), on_next=tuple(data["on_next"]),
            roles={role: _role(role, keys, line) for role in data["roles"]},
            scheduling={switch: SwitchKeys(**values) for switch, values in data["scheduling"].items()},
        )  # fmt: skip
    except KeyError as missing:
        problem = f"{directory() / name}.yaml: {missing}: key is missing, or no line of engine_lines.py"
        raise ConfigError(problem, "see deploy/README.md") from None


def _role(name: str, data: dict[str, Any], line: EngineLine) -> Role:
    keys, merged = data["roles"][name], data["base"]
    if keys.get("nodes", 1) > 1:
        merged = merge(merged, data["multi_node"])
    if "uses" in keys:
        merged = merge(merged, data["shared"][keys["uses"]])
    merged = without_nulls(merge(merged, keys))
    return Role(
        name=name, nodes=merged["nodes"], per_rank=merged.get("launch") == "per_rank", port=merged["port"],
        env={key: str(value) for key, value in merged.get("env", {}).items()}, args=merged["args"], engine=line.engine,
    )  # fmt: skip
