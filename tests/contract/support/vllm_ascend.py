"""Makes the virtual environment with vllm-ascend 0.23.0 and runs the scripts of `vllm_ascend_on_cpu` in it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from glm5_ascend.deploy.rehearsal.environment import BUILD, VLLM_ASCEND, RehearsalEnvironment, prepare

RUN_LIMIT = 300  # seconds; a script takes some 20
PACKAGES = Path(__file__).parents[1]


@dataclass(frozen=True)
class VllmAscend:
    """An environment that holds vllm-ascend, by its interpreter."""

    python: Path

    @property
    def stubs(self) -> Path:
        return RehearsalEnvironment(self.python).stubs

    def sources(self, folder: Path) -> Path:
        """Its C++ sources, which no wheel holds, unpacked from the release on PyPI."""
        flags = ["--quiet", "--no-deps", "--no-build-isolation", "--no-binary", "vllm-ascend", "--dest", str(folder)]
        command = [str(self.python), "-m", "pip", "download", *flags, VLLM_ASCEND]
        subprocess.run(command, check=True, env=os.environ | BUILD)
        (archive,) = folder.glob("vllm_ascend-*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        return folder / archive.name.removesuffix(".tar.gz") / "csrc"

    def run(self, script: str, *arguments: object) -> None:
        """Run `vllm_ascend_on_cpu.<script>` in the environment, with absolute paths; it is silent unless it fails."""
        if not self.stubs.is_dir():
            raise RuntimeError(f"{self.python}: no {self.stubs}; make the environment with {__name__}.make_environment")
        command = [str(self.python), "-m", f"vllm_ascend_on_cpu.{script}", *map(str, arguments)]
        variables = RehearsalEnvironment(self.python).variables(PACKAGES)
        # Not in the repository's folder: there python would find our own plugins for vLLM, too.
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | variables, timeout=RUN_LIMIT, check=False,
            cwd=self.python.parents[1],
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{script} failed:\n{done.stdout[-3000:]}\n{done.stderr[-8000:]}")


def make_environment(folder: Path, line: str = "0.23") -> VllmAscend:
    """The one that `glm5-ascend rehearse --prepare` makes: two or three minutes and 4 GB."""
    return VllmAscend(prepare(folder, line=line).python)


if __name__ == "__main__":  # for VLLM_ASCEND_PYTHON=FOLDER/bin/python
    print(make_environment(Path(sys.argv[1]).absolute()).python)
