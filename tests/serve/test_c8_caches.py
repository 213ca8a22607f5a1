"""int8 caches by vllm-ascend's keys: bytes per token, and loss of accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command import ROOT

pytestmark = pytest.mark.server
pytest.importorskip("vllm")

SWITCHES = {"enable_sparse_li_c8": True, "enable_sparse_sfa_c8": True}
#: GLM-5's sizes, which the demo model has: 512 + 64, and 128.
PLAIN, PACKED = {"attn": 2 * 576, "k_cache": 2 * 128}, {"attn": 656, "k_cache": 128 + 2}
LONG = 300  # tokens, of which each sees 64


def run(run_engine: Any, checkpoint: Path, switches: dict[str, bool]) -> dict[str, Any]:
    text = (ROOT / "LICENSE").read_bytes()  # English that stays as it is
    prompts = [list(text[start : start + LONG]) for start in (0, 2000)]
    engine = {"model": str(checkpoint), "additional_config": switches, "max_logprobs": -1}
    report: dict[str, Any] = run_engine(engine=engine, prompts=prompts, new_tokens=4, score=True)
    return report


def test_bytes_and_accuracy(run_engine: Any, trained_checkpoint: Path) -> None:
    """Teacher-forced KL to the bf16 caches, over the whole vocabulary."""
    plain, packed = (run(run_engine, trained_checkpoint, switches) for switches in ({}, SWITCHES))
    for report, sizes in ((plain, PLAIN), (packed, PACKED)):
        assert {name: sizes[name.rsplit(".", 1)[1]] for name in report["cache_bytes"]} == report["cache_bytes"]
        assert len(report["cache_bytes"]) == 10  # two for each of five layers
    expected, actual = (torch.tensor(report["scores"]) for report in (plain, packed))
    kl = (expected.exp() * (expected - actual)).sum(-1)
    print(f"int8 caches: KL {float(kl.mean()):.5f}, 99 % below {float(kl.flatten().quantile(0.99)):.5f}")
    assert 0 < float(kl.mean()) < 0.02
    assert float((expected.argmax(-1) == actual.argmax(-1)).float().mean()) > 0.95
