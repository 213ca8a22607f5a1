"""A Python for aarch64 on an x86-64 machine: Debian's arm64 packages and PyPI's aarch64 wheels under qemu-user.

    python -m tests.aarch64.support.emulated FOLDER

makes FOLDER once (1.2 GB), and prints the command that runs this checkout there. Nothing is installed on the machine.
The kernels are those of this checkout, by Debian's cross compiler (g++-aarch64-linux-gnu).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.command import ROOT

#: What Debian 12's Python 3.11 and the wheels' libraries load.
PACKAGES = (
    "libc6", "libgcc-s1", "libstdc++6", "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib",
    "python3.11", "zlib1g", "libexpat1", "libffi8", "libssl3", "libbz2-1.0", "liblzma5", "libsqlite3-0", "libuuid1",
    "libncursesw6", "libtinfo6", "libreadline8", "libdb5.3", "libcrypt1", "libgomp1", "libnsl2", "libtirpc3",
)  # fmt: skip
PROGRAMS = "apt-get", "dpkg", "dpkg-deb", "cmake", "aarch64-linux-gnu-g++"
#: The last torch whose aarch64 wheel on PyPI is a CPU build; the Atlas images pin it, too.
TORCH = "2.10.0"
_PLATFORMS = [f"--platform=manylinux_2_{glibc}_aarch64" for glibc in (28, 27, 17)] + [
    "--platform=manylinux2014_aarch64"
]
_SOURCES = "deb http://deb.debian.org/debian bookworm main\ndeb http://deb.debian.org/debian bookworm-updates main\n"


@dataclass(frozen=True)
class Emulated:
    """folder: where everything lies. isa: the instruction set of the kernels; dotprod is Kunpeng 920's."""

    folder: Path
    isa: str = "dotprod"

    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"], "HOME": str(self.folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": f"{self.folder / 'site'}:{ROOT}:{self.folder / 'kernels'}", "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHOME": str(self.folder / "root" / "usr"),
            "GLM5_KERNELS_ISA": self.isa,
        }  # fmt: skip

    def command(self) -> list[str]:
        """A script that starts the emulator, so that what Python calls sys.executable can be started by it, too."""
        python, root = self.folder / "python", self.folder / "root"
        parts = [self.folder / "qemu-aarch64", "-cpu", "max", "-L", root, "-0", python, root / "usr/bin/python3.11"]
        python.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, parts))} "$@"\n')
        python.chmod(0o755)
        return [str(python)]

    def run(
        self, arguments: Sequence[str], limit_s: float = 3 * 3600, more: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """`python3.11 ARGUMENTS` there, from the root of this checkout."""
        return subprocess.run(
            [*self.command(), *arguments], env=self.environment() | dict(more or {}), cwd=ROOT, capture_output=True,
            text=True, check=False, timeout=limit_s,
        )  # fmt: skip


def obstacle() -> str | None:
    """Why the folder cannot be made here; None where it can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"{missing[0]} is missing: it brings or builds what the emulator runs" if missing else None


def make(folder: Path) -> Emulated:
    """Download and unpack what is not there yet; build the kernels again if their sources have changed."""
    marker = folder / "made"
    if not marker.exists():
        _system(folder)
        _wheels(folder)
        marker.touch()
    _kernels(folder)
    return Emulated(folder)


def _kernels(folder: Path) -> None:
    package, source = folder / "kernels" / "glm5_kernels", ROOT / "kernels" / "csrc"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "kernels" / "glm5_kernels", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    toolchain = f"-DCMAKE_TOOLCHAIN_FILE={source / 'aarch64.cmake'}"
    _said(["cmake", "-S", str(source), "-B", str(folder / "csrc"), toolchain, f"-DOUTPUT={package}"])
    _said(["cmake", "--build", str(folder / "csrc"), "--parallel"])


def _system(folder: Path) -> None:
    """The emulator, and a root folder with Python. apt works on lists of its own: this machine's stay as they are."""
    downloads, root, state = folder / "debs", folder / "root", folder / "apt"
    for directory in (downloads, root, state / "lists" / "partial", state / "archives" / "partial"):
        directory.mkdir(parents=True, exist_ok=True)
    (state / "sources.list").write_text(_SOURCES)
    native = _said(["dpkg", "--print-architecture"]).strip()
    apt = [
        "apt-get", "-qq", "-o", f"Dir::Etc::SourceList={state / 'sources.list'}", "-o", "Dir::Etc::SourceParts=-",
        "-o", f"Dir::State::Lists={state / 'lists'}", "-o", f"Dir::Cache={state}", "-o", f"APT::Architecture={native}",
        "-o", f"APT::Architectures::={native}", "-o", "APT::Architectures::=arm64", "-o", "APT::Sandbox::User=root",
    ]  # fmt: skip
    _said([*apt, "update"])
    _said([*apt, "download", "qemu-user-static", *(f"{name}:arm64" for name in PACKAGES)], downloads)
    for package in sorted(downloads.glob("*.deb")):
        if package.name.startswith("qemu"):
            _said(["dpkg-deb", "--extract", str(package), str(folder / "host")])
        else:
            _said(["dpkg-deb", "--extract", str(package), str(root)])
    shutil.copy(folder / "host/usr/bin/qemu-aarch64-static", folder / "qemu-aarch64")
    for directory in (downloads, state, folder / "host"):
        shutil.rmtree(directory)


def _wheels(folder: Path) -> None:
    """The base package's dependencies, in the versions of deploy/constraints.txt but for torch; and pytest."""
    wheels, site = folder / "wheels", folder / "site"
    pins = [line for line in (ROOT / "deploy" / "constraints.txt").read_text().splitlines() if "==" in line]
    left_out = ("torch", "triton", "vllm", "nvidia")
    pinned = [line for line in pins if not line.startswith(left_out)]
    (folder / "constraints.txt").write_text("\n".join(pinned) + "\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    target = ["--only-binary=:all:", "--python-version=3.11", *_PLATFORMS, "--dest", str(wheels)]
    # pip reads the markers of dependencies as this machine's: torch's would bring 4 GB of CUDA.
    _said([*pip, *target, "--no-deps", f"torch=={TORCH}"])
    of_torch = ["sympy", "networkx", "jinja2", "fsspec", "filelock", "typing-extensions"]
    requirements = [*_dependencies(), *of_torch, "pytest", "pytest-timeout", "hypothesis"]
    _said([*pip, *target, "--constraint", str(folder / "constraints.txt"), *requirements])
    for wheel in sorted(wheels.glob("*.whl")):
        _said([sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)])
    shutil.rmtree(wheels)


def _dependencies() -> list[str]:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [line for line in project["dependencies"] if Requirement(line).name != "torch"]


def _said(command: Sequence[str], folder: Path | None = None) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:6])}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    return done.stdout


if __name__ == "__main__":
    emulator = make(Path(sys.argv[1]).resolve())
    variables = [f"{name}={value}" for name, value in emulator.environment().items() if name != "PATH"]
    print(" ".join(["env", *variables, *emulator.command()]))
