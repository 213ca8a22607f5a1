"""Builds the library of the CPU kernels with CMake; without a C++ compiler the package is pure Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCE = Path(__file__).parent / "kernels" / "csrc"
LIBRARY = "glm5_kernels.libglm5_kernels"


class BuildLibrary(build_ext):
    """Runs CMake; a failure leaves the package without the library, and says so in one line."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name)).absolute().parent
        ninja, target = shutil.which("ninja"), Path(os.environ.get("CMAKE_TOOLCHAIN_FILE", "native")).stem
        # Kept: the next build compiles what has changed. cmake --fresh would remove the objects.
        build = SOURCE.parents[1] / "build" / f"csrc-{target}-{'ninja' if ninja else 'make'}"
        # pip has a new folder of cmake and ninja each time
        generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
        try:
            subprocess.run(["cmake", "-S", SOURCE, "-B", build, f"-DOUTPUT={output}", *generator], check=True)
            subprocess.run(["cmake", "--build", build, "--parallel"], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            self.extensions.remove(ext)
            print(f"glm5-ascend: no kernels, ops run in plain torch; they need g++ 12 ({error})", file=sys.stderr)


class Wheel(bdist_wheel):
    """The library needs no Python: one wheel per platform, or one for all without it."""

    def get_tag(self) -> tuple[str, str, str]:
        library = Path(self.bdist_dir) / (LIBRARY.replace(".", "/") + ".so")
        return "py3", "none", super().get_tag()[2] if library.exists() else "any"


setup(ext_modules=[Extension(LIBRARY, sources=[])], cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel})
