"""What levels 2 to 5 need, put into a folder without touching the system: `python -m tests.proof.tools FOLDER`.

triton-ascend (from PyPI) has a package named `triton`, as upstream has: it must never share an environment with that
one, so it gets a folder that only the processes of `levels` see. MLIR and LLVM 19 are Debian's packages, unpacked.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

#: The compiler's stages are called by their private names: the version is part of the proof.
PACKAGES = ("triton-ascend==3.2.0", "pybind11")
DEBIAN = ("mlir-19-tools", "libmlir-19", "libllvm19", "llvm-19")


@dataclass(frozen=True)
class Tools:
    """Folders of triton-ascend, of the unpacked Debian packages and of the device's compilers (filled when used)."""

    triton_ascend: Path
    llvm: Path
    device_compilers: Path


def obstacle() -> str | None:
    """Why the tools cannot be had on this machine at all; None where a failure to get them is an error."""
    for program in ("apt-get", "dpkg", "gcc"):
        if shutil.which(program) is None:
            return f"{program} is missing: levels 2 and 3 need Debian's MLIR 19 and gcc"
    packages = subprocess.run(["apt-cache", "policy", *DEBIAN], capture_output=True, text=True, check=False).stdout
    if packages.count("Candidate: 1:19.") < len(DEBIAN):
        return f"this system's package list has no {', '.join(DEBIAN)} of version 19 (apt-get update?)"
    return None


def make_tools(folder: Path) -> Tools:
    """Download and unpack into `folder` (0.75 GB, half a minute) what is not there yet."""
    tools = Tools(folder / "triton-ascend", folder / "llvm", folder / "device-compilers")
    done = folder / "done"
    if not done.exists():
        pip = sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"
        _run(*pip, "--target", tools.triton_ascend, *PACKAGES)
        packages = folder / "packages"
        packages.mkdir(parents=True, exist_ok=True)
        _run("apt-get", "download", *DEBIAN, cwd=packages)
        for package in sorted(packages.glob("*.deb")):
            _run("dpkg", "-x", package, tools.llvm)
        shutil.rmtree(packages)
        done.touch()
    return tools


def _run(*command: object, cwd: Path | None = None) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, cwd=cwd)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command[:4]))} ...: {(done.stderr or done.stdout)[-1500:]}")


if __name__ == "__main__":
    print(make_tools(Path(sys.argv[1])))
