"""Acceptance of the draft model of a rotated checkpoint, which `rot` preserves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.serve.support import tiny_checkpoints

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


@pytest.fixture(scope="module")
def guessable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random model made easy to draft, if and only if the draft sees diag(g) times the normalised hidden state.

    Layers matter little, so the next token follows from the last one; eh_proj passes the embedding on and adds some
    diag(1/g) times the hidden state: little noise after diag(g), a lot without it.
    """
    import torch
    from safetensors.torch import load_file, save_file

    target = tiny_checkpoints.write_float_checkpoint(tmp_path_factory.mktemp("guessable"))
    tensors = load_file(target / "model.safetensors")
    g = torch.randn(tensors["model.norm.weight"].shape, generator=torch.Generator().manual_seed(1)).exp()
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.02
        if name == "model.norm.weight" or name.endswith("shared_head.norm.weight"):
            tensor.copy_(g)
        if name.endswith("eh_proj.weight"):
            tensor.copy_(torch.cat([torch.eye(len(g)), 0.2 * torch.diag(1 / g)], dim=1))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


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


@pytest.mark.long
def test_acceptance_depends_on_rot(run_engine: Any, guessable: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    with_rot = folded(guessable, tmp_path / "with", is_rot_used=True, has_rot=True)
    without = folded(guessable, tmp_path / "without", is_rot_used=False, has_rot=False)
    fp32 = {"dtype": "float32"}
    tokens, plain = drafts_of(run_engine, guessable, prompts, **fp32)
    tokens_rot, rate_rot = drafts_of(run_engine, with_rot, prompts, quantization="ascend", **fp32)
    tokens_without, rate_without = drafts_of(run_engine, without, prompts, quantization="ascend", **fp32)
    assert tokens == tokens_rot == tokens_without
    assert plain > 0.5
    assert abs(rate_rot - plain) < 0.02
    assert rate_without < plain - 0.1


@pytest.mark.parametrize(("is_rot_used", "has_rot"), [(True, False), pytest.param(False, True, marks=pytest.mark.long)])
def test_rot_and_description_must_agree(
    run_engine: Any, float_checkpoint: Path, prompts: list[list[int]], tmp_path: Path, is_rot_used: bool, has_rot: bool
) -> None:
    """Without this error the draft model would use random or missing weights."""
    broken = folded(float_checkpoint, tmp_path / "broken", is_rot_used=is_rot_used, has_rot=has_rot)
    with pytest.raises(AssertionError, match=f"is_rot_used is {str(is_rot_used).lower()} in"):
        drafts_of(run_engine, broken, prompts, quantization="ascend")
