"""QuaRot's matrices are orthogonal, and the fused, rotated model computes what the source computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from glm5_ascend.checkpoint.source import Source, open_source
from glm5_ascend.errors import RecipeError
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.glm5 import HEADS_NOPE_V, HEADS_V, KV_LORA, KV_LORA_ROPE, Q_LORA
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.model.spec import FIXED, HIDDEN, HIDDEN_PAIR, Linear, Vector
from glm5_ascend.quantize.methods.transforms import Tensors, fuse_and_rotate_inputs, move_scale
from tests.support.decoder_layer import Weights, main_logits, mtp_logits
from tests.support.tiny_model import SHARED_INDEXER, write_tiny_model

Change = Callable[[ModelConfig, Tensors, tuple[Linear | Vector, ...], int], None]


def test_size_without_a_matrix_names_the_config(tmp_path: Path) -> None:
    config = open_source(write_tiny_model(tmp_path, v_head_dim=6)).config
    with pytest.raises(RecipeError, match=r"config\.json: quarot: no Hadamard matrix of size 6"):
        Rotations(config, 1)
    ragged = open_source(write_tiny_model(tmp_path, q_lora_rank=48)).config
    with pytest.raises(RecipeError, match="quarot needs q_lora to be a multiple of 32"):
        Rotations(ragged, 1)


def test_every_basis_is_orthogonal(tiny_source: Path) -> None:
    config = open_source(tiny_source).config
    rotations, c = Rotations(config, 1), config
    for basis, size in (
        (HIDDEN, c.hidden_size), (HIDDEN_PAIR, 2 * c.hidden_size),
        (Q_LORA, c.q_lora_rank),
        (KV_LORA, c.kv_lora_rank), (KV_LORA_ROPE, c.kv_lora_rank + c.qk_rope_head_dim),
        (HEADS_V, c.num_attention_heads * c.v_head_dim),
        (HEADS_NOPE_V, c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim)), (FIXED, 7),
    ):  # fmt: skip
        matrix = rotations.rotate(torch.eye(size), basis)
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), atol=5e-6, rtol=0)


def test_seed_matters_and_repeats(tiny_source: Path) -> None:
    """torch's CPU generator looks at the low 32 bits of a seed: shifting ours out of them would make all runs alike."""
    config = open_source(tiny_source).config
    one, again, other = (Rotations(config, seed).global_rotation() for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def parts_of(source: Source, prefix: str, parts: tuple[Linear | Vector, ...]) -> Tensors:
    return {part.tensor_name: source.read(prefix + part.tensor_name).clone() for part in parts}


def logits(source: Source, change: Change, rot: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the main model and of the MTP layer on one sequence, weights changed layer by layer."""
    config = source.config
    ids = torch.randint(0, config.vocab_size, (40,), generator=torch.Generator().manual_seed(2))
    top = parts_of(source, "", source.config.spec.global_weights)
    change(config, top, source.config.spec.global_weights, -1)
    final, main = main_logits(config, top.__getitem__, partial(changed_layer, source, change), ids)
    weights = changed_layer(source, change, config.num_hidden_layers)
    stream = final if rot is None else final @ rot.T
    return main, mtp_logits(config, weights, weights.vector("embed_tokens.weight")[ids], stream)


def changed_layer(source: Source, change: Change, layer: int) -> Weights:
    parts = tuple(source.config.layer_weights(layer))
    tensors = parts_of(source, source.config.spec.layer_prefix(layer), parts)
    change(source.config, tensors, parts, layer)
    return Weights(tensors.__getitem__)


def keep(config: ModelConfig, tensors: Tensors, parts: tuple[Linear | Vector, ...], layer: int) -> None:
    pass


@pytest.mark.parametrize("overrides", [{}, SHARED_INDEXER], ids=["glm5", "glm52"])
def test_fused_and_rotated_model_computes_the_same(tmp_path: Path, overrides: dict[str, object]) -> None:
    source = open_source(write_tiny_model(tmp_path, dtype="float32", **overrides))
    rotations = Rotations(source.config, 7)

    def rotated(config: ModelConfig, tensors: Tensors, parts: tuple[Linear | Vector, ...], layer: int) -> None:
        gains = {part.name: tensors[part.tensor_name].clone() for part in parts if isinstance(part, Vector)}
        for part in parts:
            fuse_and_rotate_inputs(tensors[part.tensor_name], part, gains, rotations)
            if isinstance(part, Linear):
                rotations.rotate_outputs(tensors[part.tensor_name], part.basis_out)

    main, draft = logits(source, keep)
    rot = rotations.mtp_rotation(source.read("model.norm.weight"))
    for output, expected in zip(logits(source, rotated, rot), (main, draft), strict=True):
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
    without_rot = logits(source, rotated)[1]
    assert float((without_rot - draft).abs().max()) > 0.01  # the test would notice a missing rot


def test_fusing_alone_and_moving_scales_compute_the_same(tmp_path: Path) -> None:
    source = open_source(write_tiny_model(tmp_path, dtype="float32"))

    def smoothed(config: ModelConfig, tensors: Tensors, parts: tuple[Linear | Vector, ...], layer: int) -> None:
        if layer < 0:
            return
        generator = torch.Generator().manual_seed(layer)
        experts = range(config.n_routed_experts) if config.is_moe(layer) else ()
        for subgraph in (
            *config.subgraphs(layer),
            *(pair for e in experts for pair in source.config.spec.expert_subgraphs(e)),
        ):
            channels = tensors[f"{subgraph.targets[0]}.weight"].shape[1]
            move_scale(tensors, config, subgraph, torch.rand(channels, generator=generator) * 4 + 0.25)

    for output, expected in zip(logits(source, smoothed), logits(source, keep), strict=True):
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
