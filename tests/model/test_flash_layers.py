"""GLM-5.3-Flash's layers against transformers' own code, layer by layer in fp32, on random models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5_ascend.fidelity.evaluation.stored_model import StoredModel, Walk
from glm5_ascend.model.linear_attention import delta_rule

LAYERS = ["linear_attention", "indexed_attention", "linear_attention", "linear_attention", "indexed_attention"]
#: Around the ends of pools (4), chunks (16 here, 64 in transformers) and the budget of the indexer (32 tokens).
LENGTHS = [1, 3, 4, 5, 15, 16, 17, 31, 32, 33, 34, 35, 36, 63, 64, 65, 67, 129]
#: Largest error of a layer, relative to its largest value. With fewer heads in the indexer, scores of 0 would tie.
TOLERANCE = 2e-5


def random_model(directory: Path, **text: Any) -> Any:
    """A transformers model in fp32 whose every parameter is random, saved to `directory`."""
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextForConditionalGeneration

    sizes = {
        "vocab_size": 99, "hidden_size": 48, "intermediate_size": 56, "moe_intermediate_size": 24,
        "num_hidden_layers": len(LAYERS), "num_attention_heads": 3, "num_key_value_heads": 3, "n_routed_experts": 6,
        "num_experts_per_tok": 2, "kv_lora_rank": 20, "q_lora_rank": 28, "qk_nope_head_dim": 12, "v_head_dim": 10,
        "index_topk": 32, "index_head_dim": 10, "index_n_heads": 24, "index_kpool": 4, "linear_head_dim": 18,
        "linear_num_heads": 3, "swiglu_limit": 0.3, "hc_sinkhorn_iters": 20, "max_position_embeddings": 512,
        "layer_types": LAYERS, "mlp_layer_types": ["dense"] + ["sparse"] * 4, "pad_token_id": 0, "eos_token_id": [1],
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 48,
              "projection_intermediate_size": 16, "image_size": 28}  # fmt: skip
    names = ("image", "video", "image_start", "image_end", "video_start", "video_end")
    tokens = {f"{name}_token_id": 90 + number for number, name in enumerate(names)}
    config = Glm5NextConfig(text_config=sizes | text, vision_config=vision, **tokens)
    model = Glm5NextForConditionalGeneration._from_config(config, attn_implementation="eager").eval().float()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                noise *= parameter[0].numel() ** -0.5
            parameter.copy_(1 + 0.3 * noise if "norm" in name and name.endswith("weight") else noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(directory)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, StoredModel]]:
    cache: dict[str, tuple[Any, StoredModel]] = {}

    def model(**text: Any) -> tuple[Any, StoredModel]:
        if (key := repr(text)) not in cache:
            folder = tmp_path_factory.mktemp("flash")
            cache[key] = random_model(folder, **text), StoredModel(folder)
        return cache[key]

    return model


def assert_layers_equal(theirs: Any, ours: StoredModel, lengths: list[int]) -> None:
    sequences = [torch.randint(2, 99, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths]
    outputs: list[list[torch.Tensor]] = []
    for sequence in sequences:
        states: list[torch.Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda _, __, output: states.append(output[0][0].flatten(1)))  # noqa: B023
            for layer in theirs.model.language_model.layers
        ]
        with torch.no_grad():
            logits = theirs(input_ids=sequence[None], use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
        outputs.append([*states, logits])
    with torch.no_grad():
        walk = Walk.from_tokens(ours, sequences)
        for layer in range(len(LAYERS)):
            walk.step(layer)
            for span, expected in zip(walk.spans, outputs, strict=True):
                error = (walk.hidden[span] - expected[layer]).abs().max() / expected[layer].abs().max()
                assert error < TOLERANCE, (layer, span, float(error))
        for mine, expected in zip(ours.logits(sequences), outputs, strict=True):
            assert torch.allclose(mine, expected[-1], rtol=1e-4, atol=1e-4 * float(expected[-1].abs().max()))


def test_every_layer_is_transformers(models: Callable[..., tuple[Any, StoredModel]]) -> None:
    assert_layers_equal(*models(), LENGTHS)


@pytest.mark.parametrize(
    "text",
    [
        {"index_kpool": 1, "index_topk": 16},
        {"index_kpool": 8, "index_topk": 16},
        {"hc_mult": 2, "hc_sinkhorn_iters": 1},
        {"linear_lower_bound": -0.5},
        {"swiglu_limit": 1e9, "norm_topk_prob": False},
    ],
    ids=str,
)
def test_other_sizes(text: dict[str, Any], models: Callable[..., tuple[Any, StoredModel]]) -> None:
    assert_layers_equal(*models(**text), [1, 7, 18, 33, 65])


def test_delta_rule_is_its_recurrence() -> None:
    """One token at a time in fp64, with decays that leave nothing of the state."""
    length, heads, dim = 70, 2, 5
    q, k, v = (torch.randn(length, heads, dim) for _ in range(3))
    g, beta = -5 * torch.rand(length, heads, dim), torch.rand(length, heads)
    g[30:50] = -5.0
    state, expected = torch.zeros(heads, dim, dim, dtype=torch.float64), []
    for t in range(length):
        state = state * g[t].double().exp()[..., None]
        stored = (state * k[t].double()[..., None]).sum(1)
        change = beta[t].double()[:, None] * (v[t].double() - stored)
        state = state + k[t].double()[..., None] * change[:, None]
        expected.append((state * q[t].double()[..., None]).sum(1))
    assert torch.allclose(delta_rule(q, k, v, g, beta, -5.0).double(), torch.stack(expected), rtol=1e-4, atol=1e-5)
