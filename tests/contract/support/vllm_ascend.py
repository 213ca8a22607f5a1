"""Makes virtual environments with vllm-ascend and runs the scripts of `vllm_ascend_on_cpu` in it."""

from __future__ import annotations

import os
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from glm5_ascend.deploy.rehearsal.environment import BUILD, RehearsalEnvironment, prepare
from glm5_ascend.deploy.rehearsal.run import PACKAGES

RUN_LIMIT = 1800  # seconds, to end what hangs; a script takes 20 to 200
SCRIPTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class VllmAscend:
    """An environment that holds vllm-ascend, by its interpreter."""

    python: Path

    @property
    def version(self) -> Version:
        """Version of the installed vllm-ascend."""
        version = RehearsalEnvironment(self.python).version
        assert version is not None, f"{self.python}: no vllm-ascend"
        return version

    @property
    def fuses_dynamic(self) -> bool:
        """PROLOG_V3 fuses dynamic W8A8 attention, and indexers have their own caches."""
        return RehearsalEnvironment(self.python).line.copies.prolog

    def sources(self, folder: Path) -> Path:
        """Unpack the C++ sources from the release on PyPI; wheels do not have them."""
        flags = ["--quiet", "--no-deps", "--no-build-isolation", "--no-binary", "vllm-ascend", "--dest", str(folder)]
        command = [str(self.python), "-m", "pip", "download", *flags, f"vllm-ascend=={self.version}"]
        subprocess.run(command, check=True, env=os.environ | BUILD)
        (archive,) = folder.glob("vllm_ascend-*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        return folder / archive.name.removesuffix(".tar.gz") / "csrc"

    def run(self, script: str, *arguments: object) -> None:
        """Run `vllm_ascend_on_cpu.<script>` in the environment; arguments are absolute paths."""
        environment = RehearsalEnvironment(self.python)
        if not environment.stubs.is_dir():
            raise RuntimeError(f"{self.python}: no {environment.stubs}; make the environment with make_environment")
        command = [str(self.python), "-m", f"vllm_ascend_on_cpu.{script}", *map(str, arguments)]
        with tempfile.TemporaryDirectory() as folder:
            for name, files in PACKAGES.items():
                Path(folder, name).symlink_to(files)
            variables = environment.variables(SCRIPTS) | {"PYTHONPATH": f"{SCRIPTS}{os.pathsep}{folder}"}
            # In a checkout of this repository Python would also find our plugins for vLLM.
            done = subprocess.run(
                command, capture_output=True, text=True, env=os.environ | variables, timeout=RUN_LIMIT, check=False,
                cwd=environment.folder,
            )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{script} failed:\n{done.stdout[-3000:]}\n{done.stderr[-8000:]}")


def make_environment(folder: Path, line: str) -> VllmAscend:
    """The one that `glm5-ascend rehearse --prepare` makes: two or three minutes and 4 GB."""
    return VllmAscend(prepare(folder, line=line).python)
