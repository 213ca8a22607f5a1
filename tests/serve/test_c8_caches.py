"""int8 caches by vllm-ascend's keys: bytes per token, and loss of accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from glm5_ascend.fidelity.evaluation.stored_model import StoredModel
from tests.support.command import ROOT

pytestmark = pytest.mark.server

SWITCHES = {"enable_sparse_li_c8": True, "enable_sparse_sfa_c8": True}
#: Bytes per token at GLM-5's sizes, which the demo model has: 512 int8 latents, 64 bf16 and 4 scales; 128 int8 keys.
PACKED = {"attn": 656, "k_cache": 128 + 2}
LONG = 300  # tokens, of which each sees 64


def test_bytes_and_accuracy(run_engine: Any, trained_checkpoint: Path) -> None:
    """Teacher-forced KL to the model in fp32, over the whole vocabulary."""
    prompt = list((ROOT / "LICENSE").read_bytes()[:LONG])  # English that stays as it is
    engine = {"model": str(trained_checkpoint), "additional_config": SWITCHES, "max_logprobs": -1}
    report = run_engine(engine=engine, score=[prompt])
    assert {name: PACKED[name.rsplit(".", 1)[1]] for name in report["cache_bytes"]} == report["cache_bytes"]
    assert len(report["cache_bytes"]) == 10  # two for each of five layers
    expected = StoredModel(trained_checkpoint).logits([torch.tensor(prompt)])[0][:-1].log_softmax(-1)
    actual = torch.tensor(report["scores"][0])
    kl = (expected.exp() * (expected - actual)).sum(-1)
    print(f"int8 caches: KL {float(kl.mean()):.5f}, 99 % below {float(kl.quantile(0.99)):.5f}")
    assert float(kl.mean()) < 0.02
    assert float((expected.argmax(-1) == actual.argmax(-1)).float().mean()) > 0.95
