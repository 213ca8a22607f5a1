"""Streamed forced tool calls: vLLM misses those written letter by letter (serve/plugin/tools.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serve.support import tiny_checkpoints
from tests.support.command import environment
from tests.support.fork_server import ForkServer
from tests.support.server_process import ENGINE_ENVIRONMENT

pytestmark = pytest.mark.server
pytest.importorskip("vllm")

EXPECTED = {"content": "", "calls": [["get_weather", '{"city": "Oslo"}']]}
FORCED, SIZES = ("required", "named"), ("1", "3", "all")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes and GLM's special tokens."""
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny_checkpoints.write_tokenizer(directory)
    return directory


def probe(folder: Path, whose: str, vllm_forks: ForkServer) -> dict[str, Any]:
    """`stock` is vLLM without our general plugin, which an engine loads: only the import has happened."""
    variables = environment(**ENGINE_ENVIRONMENT, VLLM_PLUGINS="")
    done = vllm_forks.run("tests.serve.support.tool_stream_probe:main", [str(folder), whose], variables)
    assert done.returncode == 0, done.stderr[-2000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.fixture(scope="module")
def stock(folder: Path, vllm_forks: ForkServer) -> dict[str, Any]:
    return probe(folder, "stock", vllm_forks)


def test_the_grammar_lets_a_call_begin_with_a_letter(stock: dict[str, Any]) -> None:
    assert set(stock["allowed first"]) == {"<", "<tool_call>"}


def test_the_stock_parser_finds_such_a_call_in_a_whole_answer(stock: dict[str, Any]) -> None:
    """And special tokens in a stream: the harness is sound."""
    for choice in FORCED:
        assert stock[f"{choice} whole"] == EXPECTED
        assert all(stock[f"{choice} special {size}"] == EXPECTED for size in SIZES)


@pytest.mark.xfail(strict=True, reason="vLLM 0.32.0: the stream parser looks for the special token alone")
def test_the_stock_parser_finds_it_in_a_stream(stock: dict[str, Any]) -> None:
    """When this passes, upstream is fixed: remove serve/plugin/tools.py."""
    assert all(stock[f"{choice} letters {size}"] == EXPECTED for choice in FORCED for size in SIZES)


def test_ours_finds_it_and_leaves_the_rest(stock: dict[str, Any], folder: Path, vllm_forks: ForkServer) -> None:
    ours = probe(folder, "plugin", vllm_forks)
    for choice in FORCED:
        for cut in ("special", "letters"):
            for size in SIZES:
                assert ours[f"{choice} {cut} {size}"] == EXPECTED, (choice, cut, size)
    assert {key: value for key, value in ours.items() if key.startswith("auto")} == {
        key: value for key, value in stock.items() if key.startswith("auto")
    }
