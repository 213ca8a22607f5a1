"""SGLang 0.5.23's own model computes what the float model does, from our checkpoints, and drafts with the rotation.

Whole sequences through `GlmMoeDsaForCausalLM` and its MTP class on their NPU branches; the operators and the attention
over the cache are plain torch (sglang_on_cpu). Judge: transformers in fp32 on the source.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.contract.support.sglang import SGLang, require
from tests.serve.support.oracle import hf_model
from tests.support.tiny_model import quantize_with_rot_in_shard

pytestmark = pytest.mark.contract
PROMPTS = ("What is 47 + 38?", "Sort these words: pear, apple, plum.", "What is the weather in Oslo?")
NEW_TOKENS = 32
#: KL per token to the source: what the quantizations cost on these prompts lies below half of it.
LIMIT = 0.02
Logits = list[torch.Tensor]


@pytest.fixture(scope="module")
def sequences(trained_checkpoint: Path) -> list[list[int]]:
    """Prompts with the source's own greedy answers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(trained_checkpoint, trust_remote_code=False)
    model, outputs = hf_model(trained_checkpoint), []
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        answer = model.generate(torch.tensor([list(ids)]), do_sample=False, max_new_tokens=NEW_TOKENS)
        outputs.append(answer[0].tolist())
    return outputs


@pytest.fixture(scope="module")
def expected(trained_checkpoint: Path, sequences: list[list[int]]) -> Logits:
    model = hf_model(trained_checkpoint)
    with torch.no_grad():
        return [model(torch.tensor([tokens])).logits[0] for tokens in sequences]


@pytest.fixture(scope="module")
def computed(
    sglang: SGLang, trained_checkpoint: Path, rotated_checkpoint: Path, rotated_w8a8_checkpoint: Path,
    sequences: list[list[int]], tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, dict[str, torch.Tensor]]:  # fmt: skip
    folder = tmp_path_factory.mktemp("sglang-forward")
    before = quantize_with_rot_in_shard(trained_checkpoint, folder / "before")
    jobs: list[dict[str, Any]] = [
        {"do": "forward", "checkpoint": path, "out": folder / name, "sequences": sequences, "scale_bias": factors,
         "draft": name != "w8a8"}
        for name, path, factors in (
            ("w4a8", rotated_checkpoint, [1, 0, 2]), ("w8a8", rotated_w8a8_checkpoint, [1]), ("shard", before, []),
        )
    ]  # fmt: skip
    sglang.run(jobs, folder)
    return {job["out"].name: load_file(require(job["out"]) / "logits.safetensors") for job in jobs}


def divergence(computed: dict[str, torch.Tensor], expected: Logits, factor: int) -> float:
    """KL(source || SGLang) in nats, mean over all positions."""
    item = []
    for number, source in enumerate(expected):
        p, q = source.log_softmax(-1), computed[f"target.{factor}.{number}"].log_softmax(-1)
        item.append((p.exp() * (p - q)).sum(-1))
    return float(torch.cat(item).mean())


@pytest.mark.parametrize("recipe", ["w4a8", "w8a8"])
def test_it_computes_what_the_source_does(
    recipe: str, computed: dict[str, dict[str, torch.Tensor]], expected: Logits
) -> None:
    outputs = divergence(computed[recipe], expected, 1)
    same = [computed[recipe][f"target.1.{i}"].argmax(-1) == source.argmax(-1) for i, source in enumerate(expected)]
    agree = torch.cat(same).float()
    print(f"{recipe}: KL per token {outputs:.4f}, same argmax {int(agree.sum())} of {len(agree)}")
    assert outputs < LIMIT / 2 and agree.mean() > 0.9


@pytest.mark.parametrize(("factor", "word"), [(0, "dropped"), (2, "doubled")])
def test_a_wrong_scale_bias_would_be_seen(
    factor: int, word: str, computed: dict[str, dict[str, torch.Tensor]], expected: Logits
) -> None:
    """The control: equal answers prove little, the divergence must be able to fail."""
    outputs, right = divergence(computed["w4a8"], expected, factor), divergence(computed["w4a8"], expected, 1)
    print(f"scale_bias {word}: KL per token {outputs:.4f} instead of {right:.4f}")
    assert outputs > 4 * right


def acceptance(drafts: dict[str, torch.Tensor], target: dict[str, torch.Tensor], count: int) -> float:
    """Chance that the first draft token is accepted at temperature 1: sum of min(p, q), mean over all positions."""
    outputs = []
    for number in range(count):
        p, q = target[f"target.1.{number}"][1:].softmax(-1), drafts[f"draft.{number}"][:-1].softmax(-1)
        outputs.append(torch.minimum(p, q).sum(-1))
    return float(torch.cat(outputs).mean())


def test_drafts_need_the_rotation_in_its_file(computed: dict[str, dict[str, torch.Tensor]], expected: Logits) -> None:
    """Without `rot.safetensors` everything starts, and drafts are guessed worse."""
    with_it = acceptance(computed["w4a8"], computed["w4a8"], len(expected))
    without = acceptance(computed["shard"], computed["w4a8"], len(expected))
    print(f"first draft token accepted: {with_it:.4f} with the file, {without:.4f} with the tensor in a shard")
    assert with_it > without + 0.01
