"""Makes the virtual environment with SGLang 0.5.23 and runs the jobs of `sglang_on_cpu` in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5_ascend.deploy.rehearsal.environment import TORCH, install, new_environment

SGLANG = "sglang==0.5.23"
#: Its own list brings 6 GB of CUDA and another torch: this is what its loader, models and arguments import.
IMPORTED = (
    "transformers==5.19.0", "tokenizers==0.23.2", "openai==2.8.0", "aiohttp", "dill", "distro", "einops", "fastapi",
    "gguf", "ipython", "jsonschema", "loguru", "msgspec", "numpy", "orjson", "partial_json_parser", "pillow",
    "prometheus_client", "psutil", "pybase64", "pydantic", "python-multipart", "pyzmq", "regex", "requests", "scipy",
    "sentencepiece==0.2.1", "setproctitle", "setuptools", "soundfile", "tiktoken", "uvicorn", "uvloop", "watchfiles",
    "zstandard",
)  # fmt: skip
#: Of these the dependencies are not wanted, either: they would bring CUDA, or nothing that is imported.
BY_THEMSELVES = (
    SGLANG, "apache-tvm-ffi==0.1.11", "compressed-tensors==0.18.0", "mistral_common", "torch_memory_saver",
    "torchvision", "triton==3.9.0", "xgrammar==0.2.7",
)  # fmt: skip
RUN_LIMIT = 900  # seconds; all jobs of a file together take about one minute
VARIABLES = {
    "PYTHONPATH": str(Path(__file__).parents[1]),
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # nothing else may be taken for torch_npu
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class SGLang:
    """An environment that holds SGLang, by its interpreter."""

    python: Path

    def run(self, jobs: list[dict[str, Any]], folder: Path) -> None:
        """Run jobs (see `sglang_on_cpu.jobs`); each leaves what it found, or error.txt, in its `out`."""
        (folder / "jobs.json").write_text(json.dumps(jobs, default=str))
        command = [str(self.python), "-m", "sglang_on_cpu.jobs", str(folder / "jobs.json")]
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | VARIABLES, timeout=RUN_LIMIT, check=False,
            cwd=folder,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{command} failed:\n{done.stdout[-3000:]}\n{done.stderr[-8000:]}")


def error_of(out: Path) -> str | None:
    """The traceback of a job that failed."""
    return (out / "error.txt").read_text() if (out / "error.txt").is_file() else None


def require(out: Path) -> Path:
    """The folder of a job that must not have failed."""
    if (error := error_of(out)) is not None:
        raise RuntimeError(f"{out.name}: {error[-4000:]}\n{(out / 'log.txt').read_text()[-2000:]}")
    return out


def make_environment(folder: Path) -> SGLang:
    """Install everything into `folder` from PyPI: two minutes and 2.5 GB, a third of it Triton."""
    python = new_environment(folder)
    install(python, TORCH, *IMPORTED)
    install(python, "--no-deps", *BY_THEMSELVES)
    return SGLang(python)


if __name__ == "__main__":  # for SGLANG_PYTHON=FOLDER/bin/python
    print(make_environment(Path(sys.argv[1]).absolute()).python)
