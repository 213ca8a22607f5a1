"""Two ranks of tensor parallel, each a process with its part of the weights, give the answers of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from glm5_ascend.errors import ConfigError
from glm5_ascend.serve.tensor_parallel import require_even_split
from tests.support.tiny_model import tiny_config

DRAFTS = {"method": "mtp", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("ranks", "change", "message"),
    [
        (1, {"moe_intermediate_size": 33}, ""),
        (2, {}, ""),
        (4, {}, "num_attention_heads 2 of config.json does not divide into 4 equal parts"),
        (2, {"intermediate_size": 65}, "intermediate_size 65 of"),
        (2, {"moe_intermediate_size": 34}, "moe_intermediate_size 34 of config.json .* 2 equal parts of an even size"),
    ],
)
def test_what_must_divide(ranks: int, change: dict[str, Any], message: str) -> None:
    config = tiny_config(**change)
    if not message:
        require_even_split(config, ranks)
        return
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {ranks}: {message}"):
        require_even_split(config, ranks)


def kl_of(scores: list[list[list[list[float]]]]) -> torch.Tensor:
    """KL of the second run to the first at each token."""
    one, two = (torch.cat([torch.tensor(prompt) for prompt in run]).double() for run in scores)
    return (one.exp() * (one - two)).sum(-1)


@pytest.mark.server
@pytest.mark.long
@pytest.mark.parametrize(
    ("checkpoint", "engine", "largest"),
    [
        ("quantized_checkpoint", {"dtype": "float32", "quantization": "ascend"}, 0.3),
        ("float_checkpoint", {"dtype": "float32"}, 1e-6),
    ],
)
def test_logits(
    checkpoint: str, engine: dict[str, Any], largest: float, request: pytest.FixtureRequest, run_engine: Any,
    prompts: list[list[int]],
) -> None:  # fmt: skip
    pytest.importorskip("vllm")
    job: dict[str, Any] = {"model": str(request.getfixturevalue(checkpoint)), "max_logprobs": -1, **engine}
    scores = [
        run_engine(engine=job | {"tensor_parallel_size": n}, prompts=prompts[:3], new_tokens=4, score=True)["scores"]
        for n in (1, 2)
    ]
    kl = kl_of(scores)
    print(f"two ranks: KL to one rank {float(kl.mean()):.2g}, at most {float(kl.max()):.2g}")
    assert float(kl.mean()) < largest


@pytest.mark.server
@pytest.mark.long
@pytest.mark.parametrize("drafts", [False, True])
def test_greedy_answers_of_the_trained_model(drafts: bool, run_engine: Any, rotated_checkpoint: Path) -> None:
    pytest.importorskip("vllm")
    from transformers import AutoTokenizer

    from benchmarks.training.evaluate import prompts_of
    from benchmarks.training.held_out import held_out_questions

    tokenizer = AutoTokenizer.from_pretrained(rotated_checkpoint, trust_remote_code=False)
    prompts = prompts_of(tokenizer, held_out_questions(seed=5, n=42))
    engine: dict[str, Any] = {"model": str(rotated_checkpoint), "quantization": "ascend"}
    if drafts:
        engine["speculative_config"] = DRAFTS
    one, two = (
        run_engine(engine=engine | {"tensor_parallel_size": n}, prompts=prompts, new_tokens=64, ends=True)
        for n in (1, 2)
    )
    pairs = list(zip(one["passes"][0], two["passes"][0], strict=True))
    different = [pair for pair in pairs if pair[0]["tokens"] != pair[1]["tokens"]]
    print([(a["tokens"], b["tokens"], a["gaps"]) for a, b in different])
    assert not different
    logprobs = ([p for answer in run["passes"][0] for p in answer["logprobs"]] for run in (one, two))
    before, after = map(torch.tensor, logprobs)
    apart = before - after
    mean, most = float(apart.abs().mean()), float(apart.abs().max())
    print(f"two ranks: log-probabilities differ by {mean:.2g}, at most {most:.2g}")
    assert mean < 0.01
