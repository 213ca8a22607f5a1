"""A prompt of 32k tokens through the server: memory grows with its length T, not with T times T."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glm5_ascend.serve.client import Client
from glm5_ascend.serve.local_server import free_port
from tests.serve.support import tiny_checkpoints
from tests.support.server_process import peak_bytes, running

pytestmark = [pytest.mark.server, pytest.mark.long]

SHORT, LONG, NEW_TOKENS = 1024, 32768, 8
CONTEXT = 33280
#: Bytes of one fp32 matrix of scores of the long prompt. Without DSA's own kernels each head of a layer needs one.
SCORES = LONG * LONG * 4
TEXT = [15 + byte for byte in Path(tiny_checkpoints.__file__).read_bytes() * 6]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fp32, room for 33k tokens, one indexer for all three layers: the test is about memory, not time."""
    return tiny_checkpoints.write_float_checkpoint(tmp_path_factory.mktemp("long"), indexers="FSS", context=CONTEXT)


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """A server whose steps take the whole prompt at once, the hardest case; its URL and process."""
    port = free_port()
    command = [sys.executable, "-m", "glm5_ascend", "serve", str(checkpoint), "--port", str(port), "--"]
    command += ["--dtype", "float32", "--max-model-len", str(CONTEXT), "--max-num-batched-tokens", str(CONTEXT)]
    command += ["--max-num-seqs", "2", "--no-enable-prefix-caching"]
    path = tmp_path_factory.mktemp("server") / "server.log"
    with running(command, port, path) as process:
        yield f"http://127.0.0.1:{port}", process.pid


def completion(url: str, tokens: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities."""
    more = {"logprobs": 0, "return_token_ids": True, "ignore_eos": True}
    choice = Client(url, "glm-5", timeout=900).complete(tokens, max_tokens=NEW_TOKENS, **more)
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_32k_tokens_in_one_step(whole: tuple[str, int], checkpoint: Path, run_engine: Any) -> None:
    """Over a prompt of 1k: less than a third of one score matrix more, and less than three times what 16k take more (a
    matrix would make it four times). The answer is that of steps of 1024 tokens."""
    url, server = whole
    completion(url, TEXT[:SHORT])
    before = peak_bytes(server)
    completion(url, TEXT[: LONG // 2])
    half = peak_bytes(server) - before
    tokens, logprobs = completion(url, TEXT[:LONG])
    grown = peak_bytes(server) - before
    print(
        f"more than for {SHORT} tokens: {half / 1e6:.0f} MB for {LONG // 2}, {grown / 1e6:.0f} MB for {LONG}; ", end=""
    )
    print(f"a score matrix has {SCORES / 1e6:.0f} MB")
    assert grown < SCORES / 3
    assert grown < 3 * half
    engine = {
        "model": str(checkpoint), "dtype": "float32", "max_model_len": CONTEXT, "max_num_batched_tokens": 1024,
        "max_num_seqs": 2, "enable_prefix_caching": False,
    }  # fmt: skip
    (chunked,) = run_engine(engine=engine, batches=[[TEXT[:LONG]]], new_tokens=NEW_TOKENS)["batches"][0]
    assert tokens == chunked["tokens"]
    assert logprobs == pytest.approx(chunked["logprobs"], abs=1e-3)
