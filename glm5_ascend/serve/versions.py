"""Installed versions against deploy/versions.yaml: packages of an Atlas belong together as one set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Field

from glm5_ascend.files.resources import data_dir, read_yaml
from glm5_ascend.serve.environment import version_of

#: Facts about software that the rules know, and their distributions.
SOFTWARE = {"transformers": "transformers", "vllm_ascend": "vllm-ascend", "triton": "triton-ascend"}
Installed = Callable[[str], str | None]


class _VersionKeys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class VersionSet(_VersionKeys):
    """Packages that belong together, by distribution."""

    name: str
    source: str
    cann: str
    python: str
    packages: dict[str, str]


class OlderVersions(_VersionKeys):
    """One earlier row of vllm-ascend's compatibility matrix."""

    vllm_ascend: str = Field(alias="vllm-ascend")
    vllm: str
    cann: str
    torch: str
    torch_npu: str = Field(alias="torch-npu")
    triton_ascend: str = Field(alias="triton-ascend")


class VersionFile(_VersionKeys):
    """deploy/versions.yaml."""

    sets: list[VersionSet]
    older: list[OlderVersions]


@cache
def _file() -> VersionFile:
    return read_yaml(data_dir("data/deploy") / "versions.yaml", VersionFile)


def version_set(name: str) -> dict[str, str] | None:
    """Packages and CANN of a set, by distribution; None for a name that is no set."""
    for entry in _file().sets:
        if entry.name == name:
            return {**entry.packages, "cann": entry.cann}
    return None


def meant_by(vllm_ascend: str) -> tuple[str, dict[str, str]]:
    """The set that an installed vllm-ascend belongs to: its name, and the versions of the others.

    Of a pre-release between two lines that has no row the vLLM is known, by vllm-ascend's versioning policy. Nothing is
    known of builds from source. The name is the release's then.
    """
    release = Version(vllm_ascend)
    for row in _file().older:
        if Version(row.vllm_ascend) == release:
            return f"vllm-ascend {release}", row.model_dump(by_alias=True)
    lines = [
        entry.name
        for entry in _file().sets
        if not release.is_devrelease  # the number of a build from source says little
        and entry.packages.get("vllm-ascend")
        and Version(entry.packages["vllm-ascend"]).release[:2] == release.release[:2]
    ]
    name = lines[0] if lines else f"vllm-ascend {release}" if release.release > (0, 23) else "vllm-ascend-0.23.0"
    own = {"vllm": release.base_version} if release.is_prerelease and not release.is_devrelease else {}
    return name, version_set(name) or own


def differences(wanted: Mapping[str, str], installed: Installed, cann: str | None) -> list[tuple[str, str, str]]:
    """(package, installed, wanted) of everything that is installed in another version than the set's."""
    found = []
    for package, version in wanted.items():
        have = cann if package == "cann" else installed(package)
        if have is not None and not same(have, version):
            found.append((package, have, version))
    return found


def same(have: str, wanted: str) -> bool:
    """Equal but for local parts and post releases the set does not name (0.23.0.post1 is 0.23.0)."""
    try:
        left, right = Version(have), Version(wanted)
    except InvalidVersion:
        return have == wanted
    if right.is_postrelease or right.is_prerelease or right.local:
        return left == right or left.public == right.public
    return left.release == right.release and not left.is_prerelease


def facts(profile_set: str, installed: Installed = version_of) -> tuple[dict[str, Any], bool]:
    """Versions as facts; and whether they are assumed, because this machine has no vllm-ascend: then the profile's."""
    wanted = version_set(profile_set) or {}
    assumed = installed("vllm-ascend") is None
    found: dict[str, Any] = {"wanted_triton": wanted.get("triton-ascend", "3.2.2")}
    for fact, package in SOFTWARE.items():
        version = wanted.get(package) if assumed else installed(package)
        if fact == "triton":
            found[fact] = version is not None
        elif version is not None:
            found[fact] = Version(version)
    if assumed and "cann" in wanted:
        found["cann"] = Version(wanted["cann"])
    return found, assumed
