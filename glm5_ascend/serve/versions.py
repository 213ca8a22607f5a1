"""Installed versions against the engine lines: packages of an Atlas belong together as one set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from glm5_ascend.engine_lines import STABLE, VLLM_ASCEND_LINES, EngineLine
from glm5_ascend.serve.environment import version_of

#: Facts about software that the rules know, and their distributions.
SOFTWARE = {"transformers": "transformers", "vllm_ascend": "vllm-ascend", "triton": "triton-ascend"}
Installed = Callable[[str], str | None]


def expected_packages(vllm_ascend: str) -> tuple[str, dict[str, str]]:
    """Name of the set that an installed vllm-ascend belongs to, and the versions of the set's other packages.

    Of a pre-release between two lines only its vLLM is known, by vllm-ascend's versioning policy. Of a build from
    source nothing is known. Releases before the first line are compared with that line.
    """
    release = Version(vllm_ascend)
    for line in VLLM_ASCEND_LINES:
        if line.covers(release):
            others = {name: version for name, version in line.packages.items() if name != line.distribution}
            return line.name, {**others, "cann": line.cann}
    if release.release[:2] < STABLE.release:
        return STABLE.name, {**STABLE.packages, "cann": STABLE.cann}
    vllm = {"vllm": release.base_version} if release.is_prerelease and not release.is_devrelease else {}
    return f"vllm-ascend {release}", vllm


def differences(expected: Mapping[str, str], installed: Installed, cann: str | None) -> list[tuple[str, str, str]]:
    """(package, installed, expected) of every package that is installed in another version than the set's."""
    mixed = []
    for package, version in expected.items():
        have = cann if package == "cann" else installed(package)
        if have is not None and not same(have, version):
            mixed.append((package, have, version))
    return mixed


def same(have: str, expected: str) -> bool:
    """True for the expected version, and for later candidates, the final and post releases of the same release."""
    try:
        left, right = Version(Version(have).public), Version(Version(expected).public)
    except InvalidVersion:
        return have == expected
    return left.release == right.release and left >= right


def facts(line: EngineLine, installed: Installed = version_of) -> tuple[dict[str, Any], bool]:
    """Versions as facts for the rules, and whether they are assumed as the line's: its engine is not installed here."""
    assumed = installed(line.distribution) is None
    versions: dict[str, Any] = {"wanted_triton": line.packages.get("triton-ascend", STABLE.packages["triton-ascend"])}
    for fact, package in SOFTWARE.items():
        version = line.packages.get(package) if assumed else installed(package)
        if fact == "triton":
            versions[fact] = version is not None
        elif version is not None:
            versions[fact] = Version(version)
    if assumed and line.cann:
        versions["cann"] = Version(line.cann)
    return versions, assumed
