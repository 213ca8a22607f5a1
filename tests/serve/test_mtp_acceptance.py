"""Acceptance of the draft model of a rotated checkpoint, which `rot` preserves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.server
pytest.importorskip("vllm")


def drafts_of(run_engine: Any, directory: Path, prompts: list[list[int]], **engine: Any) -> tuple[Any, float]:
    """The tokens of a greedy run with one draft token per step, and the accepted share."""
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    report = run_engine(
        engine={"model": str(directory), "speculative_config": drafts, **engine}, prompts=prompts, new_tokens=32
    )
    metrics = report["spec_decode"]
    rate = metrics["vllm:spec_decode_num_accepted_tokens"] / metrics["vllm:spec_decode_num_draft_tokens"]
    return [output["tokens"] for output in report["passes"][0]], rate


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
    _, before = drafts_of(run_engine, trained_checkpoint, prompts)
    _, after = drafts_of(run_engine, rotated_checkpoint, prompts, quantization="ascend")
    assert before > 0.4, "the MTP layer was trained"
    assert after >= 0.9 * before, f"acceptance {before:.3f} fell to {after:.3f}"
