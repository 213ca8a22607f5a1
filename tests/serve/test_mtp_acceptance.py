"""Acceptance of the draft model of a rotated checkpoint, which `rot` preserves."""

from __future__ import annotations

import json
import shutil
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


def folded(source: Path, target: Path, *, is_rot_used: bool, has_rot: bool) -> Path:
    """A checkpoint rotated with I: norms are folded into the heads, `rot` = diag(g), all tensors FLOAT."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    g = tensors["model.norm.weight"].clone()
    tensors["lm_head.weight"] *= g
    for name in list(tensors):
        if name == "model.norm.weight":
            tensors[name] = torch.ones_like(g)
        elif name.endswith("shared_head.norm.weight"):
            tensors[name.replace("norm", "head")] *= tensors[name]
            tensors[name] = torch.ones_like(g)
    description = {"version": "1.0.0", "group_size": 0, "is_rot_used": is_rot_used} | dict.fromkeys(tensors, "FLOAT")
    if has_rot:
        tensors["rot.weight"] = torch.diag(g)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "quant_model_description.json").write_text(json.dumps(description))
    return target


@pytest.mark.parametrize(("is_rot_used", "has_rot"), [(True, False), pytest.param(False, True, marks=pytest.mark.long)])
def test_rot_and_description_must_agree(
    run_engine: Any, float_checkpoint: Path, prompts: list[list[int]], tmp_path: Path, is_rot_used: bool, has_rot: bool
) -> None:
    """Without this error the draft model would use random or missing weights."""
    broken = folded(float_checkpoint, tmp_path / "broken", is_rot_used=is_rot_used, has_rot=has_rot)
    with pytest.raises(AssertionError, match=f"is_rot_used is {str(is_rot_used).lower()} in"):
        drafts_of(run_engine, broken, prompts, quantization="ascend")
