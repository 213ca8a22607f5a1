"""GLM-5.3-Flash in the engine: its answers are those of the layer-by-layer forward, whichever way its states go.

In every way greedy tokens and their log-probabilities are compared with one forward of the whole text, without a cache:
prompts cut anywhere, prefixes of other requests, drafts that are taken and refused at every place, preemption, abort.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5_ascend.errors import CheckFailedError
from glm5_ascend.fidelity.evaluation.stored_model import StoredModel
from glm5_ascend.model.config_file import load_config
from glm5_ascend.serve.client import Client
from glm5_ascend.serve.memory import cache_blocks
from tests.serve.support.tiny_checkpoints import write_flash
from tests.support.command import glm5_ascend, worked
from tests.support.server_process import started_server

pytestmark = pytest.mark.server

BLOCK, NEW_TOKENS = 64, 12
#: fp32 in another order of sums; a wrong state changes log-probabilities by 0.01 and more.
TOLERANCE = 2e-5
TEXT = [4 + 7 * i * i % 251 for i in range(300)]
#: Cold prompts around pools of 4, the convolution's 4 tokens and a block; then 1 to 12 tokens behind shared blocks, and
#: prompts that end around them; then the first again, from the cache.
COLD = [TEXT[:n] for n in (1, 2, 3, 4, 5, 17, 63, 64, 65, 130)]
BEHIND = [TEXT[: 2 * BLOCK] + [9 + n] * n for n in range(1, 13)]
AROUND = [TEXT[:n] for n in (126, 127, 128, 129, 131, 132, 191, 192, 193, 197)]
BATCHES = [COLD, BEHIND, AROUND, COLD]
DRAFTS = {"method": "mtp", "num_speculative_tokens": 3}
NO_CACHE = {"enable_prefix_caching": False}


@pytest.fixture(scope="session")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_flash(tmp_path_factory.mktemp("flash") / "model")


def serve(run_engine: Any, model: Path, **engine: Any) -> dict[str, Any]:
    settings = {"model": str(model), "dtype": "float32", "block_size": BLOCK, "max_model_len": 512, "max_num_seqs": 4}
    settings |= {"kv_cache_memory_bytes": 2**28} | engine
    job = {"engine": settings, "batches": BATCHES, "new_tokens": NEW_TOKENS, "aborted": TEXT[:100]}
    report: dict[str, Any] = run_engine(**job)
    return report


def differences(model: Path, report: dict[str, Any]) -> tuple[int, float]:
    """Tokens that are not the forward's choice, and the largest difference of a log-probability."""
    answers = [
        (prompt, output)
        for batch, outputs in zip(BATCHES, report["batches"], strict=True)
        for prompt, output in zip(batch, outputs, strict=True)
    ]
    whole = [torch.tensor(prompt + output["tokens"][:-1]) for prompt, output in answers]
    others, largest = 0, 0.0
    for (prompt, output), logits in zip(answers, StoredModel(model).logits(whole), strict=True):
        expected = logits.log_softmax(-1)[len(prompt) - 1 :]
        tokens = torch.tensor(output["tokens"])
        others += int((expected.argmax(-1) != tokens).sum())
        chosen = expected.gather(1, tokens[:, None])[:, 0]
        largest = max(largest, float((chosen - torch.tensor(output["logprobs"])).abs().max()))
    return others, largest


def cached(report: dict[str, Any]) -> list[list[int]]:
    return [[output["cached"] for output in batch] for batch in report["batches"]]


def test_drafts_and_shared_prefixes(flash: Path, run_engine: Any) -> None:
    report = serve(run_engine, flash, speculative_config=DRAFTS)
    assert differences(flash, report) < (1, TOLERANCE)
    accepted = report["counters"]["spec_decode_num_accepted_tokens_per_pos"]
    rejected = [before - after for before, after in itertools.pairwise(accepted)]
    assert len(accepted) == 3 and min(*accepted, *rejected) > 0
    assert min(cached(report)[1]) == BLOCK  # a block less: its last token's hidden state drafts
    assert not report["async_scheduling"]  # vLLM has it for GPUs only


@pytest.mark.long
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param({}, id="prefix cache"),
        pytest.param({"max_num_batched_tokens": 70, "max_num_seqs": 3}, id="prefix cache, prompts in blocks"),
        pytest.param(NO_CACHE | {"max_num_batched_tokens": 7, "max_num_seqs": 3}, id="prompts cut every 7 tokens"),
        pytest.param(NO_CACHE | {"max_num_batched_tokens": 5, "max_num_seqs": 1}, id="prompts cut every 5 tokens"),
        *(
            pytest.param({"speculative_config": DRAFTS | {"num_speculative_tokens": n}}, id=f"prefix cache, {n} drafts")
            for n in (1, 2, 4, 5)
        ),
        pytest.param(
            NO_CACHE | {"speculative_config": DRAFTS, "max_num_batched_tokens": 23}, id="drafts, prompts cut anywhere"
        ),
        pytest.param({"speculative_config": DRAFTS, "async_scheduling": True}, id="asynchronous scheduling"),
    ],
)
def test_every_way(engine: dict[str, Any], flash: Path, run_engine: Any) -> None:
    report = serve(run_engine, flash, **engine)
    assert differences(flash, report) < (1, TOLERANCE)
    if "speculative_config" not in engine:
        hits = [0] * len(BEHIND) if "enable_prefix_caching" in engine else [2 * BLOCK] * len(BEHIND)
        assert cached(report)[1][1:] == hits[1:]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_are_as_large_as_the_memory_line_takes_them(ranks: int, flash: Path, run_engine: Any) -> None:
    report = serve(run_engine, flash, block_size=None, speculative_config=DRAFTS, tensor_parallel_size=ranks)
    assert differences(flash, report) < (1, TOLERANCE)
    flags = ["--speculative-config", json.dumps(DRAFTS), "--tensor-parallel-size", str(ranks)]
    assert report["block_size"] == cache_blocks(load_config(flash), 4, flags).tokens > BLOCK


@pytest.mark.long
def test_an_image_is_refused(flash: Path, tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for url in started_server(flash, tmp_path, ["--api-key", "key"]):
        with pytest.raises(CheckFailedError, match=r"HTTP 400.*not a multimodal model"):
            Client(url, "glm-5", key="key").chat([{"role": "user", "content": [image]}])


@pytest.mark.long
def test_smoke_passes_the_shipped_model(tmp_path: Path) -> None:
    """On two ranks; its sums are wrong, which is a warning for a small vocabulary."""
    for words in (
        ("demo-model", tmp_path / "source", "glm-5.3-flash"),
        ("quantize", tmp_path / "source", tmp_path / "w4a8", "--recipe", "flash-w4a8", "--quiet"),
    ):
        worked(glm5_ascend(*words))
    for url in started_server(tmp_path / "w4a8", tmp_path, ["--tensor-parallel-size", "2", "--api-key", "key"]):
        done = glm5_ascend("smoke", url, "--json", OPENAI_API_KEY="key")
        statuses = {check["check"]: check["status"] for check in json.loads(done.stdout)["checks"]}
        assert (done.returncode, "failed" in statuses.values()) == (0, False), done.stdout
        assert statuses["own answers"] == statuses["tool call"] == "ok"


@pytest.mark.long
@pytest.mark.parametrize("drafts", [None, DRAFTS], ids=["alone", "drafts"])
def test_preempted_requests_go_on(drafts: dict[str, Any] | None, flash: Path, run_engine: Any) -> None:
    report = serve(run_engine, flash, num_gpu_blocks_override=33, speculative_config=drafts)
    assert report["counters"]["num_preemptions"] > 0
    assert differences(flash, report) < (1, TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["flash-w4a8", "flash-w8a8"])
def test_integers(recipe: str, flash: Path, run_engine: Any, tmp_path: Path) -> None:
    """Compared with the integer forward of the same files; a rounding may go the other way."""
    out = tmp_path / "out"
    worked(glm5_ascend("quantize", flash, out, "--recipe", recipe, "--quiet"))
    report = serve(run_engine, out, quantization="ascend", speculative_config=DRAFTS)
    others, _ = differences(out, report)
    assert others <= NEW_TOKENS * sum(map(len, BATCHES)) // 10
