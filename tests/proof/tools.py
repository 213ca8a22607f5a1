"""What level 2 needs, put into a folder without touching the system: `python -m tests.proof.tools FOLDER`.

triton-ascend (from PyPI) has a package named `triton`, as upstream has: it must never share an environment with that
one, so it gets a folder that only the processes of `levels` see.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

#: The compiler's stages are called by their private names: the version is part of the proof.
PACKAGES = ("triton-ascend==3.2.0", "pybind11")


@dataclass(frozen=True)
class Tools:
    """Folders of triton-ascend and of the device's compiler, which fills its own when it is used."""

    triton_ascend: Path
    device_compilers: Path


def make_tools(folder: Path) -> Tools:
    """Install into `folder` what is not there yet."""
    tools = Tools(folder / "triton-ascend", folder / "device-compilers")
    done = folder / "done"
    if not done.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--target", str(tools.triton_ascend), *PACKAGES], check=True)
        done.touch()
    return tools


if __name__ == "__main__":
    print(make_tools(Path(sys.argv[1])))
