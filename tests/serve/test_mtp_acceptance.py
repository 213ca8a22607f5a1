"""Acceptance of the draft model of a rotated checkpoint, which `rot` preserves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.server


def acceptance(run_engine: Any, directory: Path, prompts: list[list[int]], **engine: Any) -> float:
    """The accepted share of a greedy run with one draft token per step."""
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    report = run_engine(
        engine={"model": str(directory), "speculative_config": drafts, **engine}, batches=[prompts], new_tokens=32
    )
    counters = report["counters"]
    return float(counters["spec_decode_num_accepted_tokens"] / counters["spec_decode_num_draft_tokens"])


@pytest.mark.long
def test_rotated_checkpoint_keeps_its_acceptance(
    run_engine: Any, trained_checkpoint: Path, rotated_checkpoint: Path
) -> None:
    """On held-out chats."""
    from transformers import AutoTokenizer

    from benchmarks.training.evaluate import prompts_of
    from benchmarks.training.held_out import held_out_questions

    tokenizer = AutoTokenizer.from_pretrained(trained_checkpoint, trust_remote_code=False)
    prompts = prompts_of(tokenizer, held_out_questions(seed=5, n=42))
    before = acceptance(run_engine, trained_checkpoint, prompts)
    after = acceptance(run_engine, rotated_checkpoint, prompts, quantization="ascend")
    assert before > 0.4, "the MTP layer was trained"
    assert after >= 0.9 * before, f"acceptance {before:.3f} fell to {after:.3f}"
