"""Shared by all tests: a fixed seed, the order of a run, and what is made once.

That is the tiny model with its quantized outputs, the trained one with its own, and a server of it.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import order
from tests.support.command import environment, glm5_ascend, worked
from tests.support.fork_server import ForkServer
from tests.support.once import made_once, run_folder
from tests.support.server_process import ENGINE_ENVIRONMENT

Copy, Quantized = Callable[[Path], Path], Callable[..., Path]  # types of `editable` and `tiny_quantized`


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order.longest_first(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("server"):
        pytest.importorskip("vllm")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return order.scheduler(config, log)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """Of all processes of this run, for `made_once`."""
    return run_folder(tmp_path_factory, pytestconfig)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    random.seed(0)
    if "torch" in sys.modules:  # tests of files and messages do not pay for the import
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bf16 source, two shards, dense + MoE + MTP layers. Read only."""
    from tests.support.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "source", shards=2)


@pytest.fixture(scope="session")
def tiny_flash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bf16 GLM-5.3-Flash, two shards: linear and sparse attention, dense, MoE, MTP, vision tower. Read only."""
    from tests.support.tiny_flash import write_tiny_flash

    return write_tiny_flash(tmp_path_factory.mktemp("flash") / "source", shards=2)


@pytest.fixture(scope="session")
def tiny_quantized(tmp_path_factory: pytest.TempPathFactory, tiny_source: Path) -> Quantized:
    """`tiny_quantized(recipe, source=...)` -> output directory, made once per pair. Read only."""
    from tests.support.tiny_model import quantize_tiny

    outputs: dict[tuple[str, Path], Path] = {}

    def quantized(recipe: str, source: Path = tiny_source) -> Path:
        key = (recipe, source)
        if key not in outputs:
            outputs[key] = quantize_tiny(source, tmp_path_factory.mktemp("quantized") / Path(recipe).stem, recipe)
        return outputs[key]

    return quantized


@pytest.fixture(scope="session")
def tiny_w4a8(tiny_quantized: Quantized) -> Path:
    return tiny_quantized("w4a8")


@pytest.fixture(scope="session")
def tiny_w8a8(tiny_quantized: Quantized) -> Path:
    return tiny_quantized("w8a8")


@pytest.fixture
def editable(tmp_path: Path) -> Copy:
    """A private copy of a checkpoint, to be damaged."""

    def copy(directory: Path) -> Path:
        return Path(shutil.copytree(directory, tmp_path / "copy"))

    return copy


@pytest.fixture(scope="session")
def trained_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped demo model."""
    from glm5_ascend.demo_model.resources import write_demo_model

    return write_demo_model(tmp_path_factory.mktemp("trained") / "demo")


@pytest.fixture(scope="session")
def rotated_checkpoint(trained_checkpoint: Path, shared_folder: Path) -> Path:
    """`glm5-ascend quantize --recipe w4a8` of the trained model: rotated, with rot.weight."""
    return made_once(shared_folder, "w4a8", lambda out: quantize_by_command(trained_checkpoint, out, "w4a8"))


@pytest.fixture(scope="session")
def rotated_w8a8_checkpoint(trained_checkpoint: Path, shared_folder: Path) -> Path:
    """The same with `--recipe w8a8`: static attention."""
    return made_once(shared_folder, "w8a8", lambda out: quantize_by_command(trained_checkpoint, out, "w8a8"))


def quantize_by_command(source: Path, out: Path, recipe: str) -> None:
    worked(glm5_ascend("quantize", source, out, "--recipe", recipe, "--quiet"))


@pytest.fixture(scope="session")
def server(rotated_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`glm5-ascend serve` on the trained model, quantized to W4A8, with MTP; yields the base URL."""
    from tests.serve.support.chat import API_KEY
    from tests.support.server_process import started_server

    flags = ["--api-key", API_KEY, "--enable-prompt-tokens-details"]
    flags += ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}']
    yield from started_server(rotated_checkpoint, tmp_path_factory.mktemp("server"), flags)


@pytest.fixture(scope="session")
def vllm_forks() -> ForkServer:
    """A process that has imported vLLM with our plugin; forks of it run engines, probes and vLLM's parser."""
    modules = ("vllm.entrypoints.llm", "tests.serve.support.engine", "tests.serve.support.layer_check")
    return ForkServer(modules, environment(**ENGINE_ENVIRONMENT))
