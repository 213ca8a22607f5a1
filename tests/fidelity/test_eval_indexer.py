"""Selections of the indexer: long sequences in blocks, equal scores, and INT8 caches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glm5_ascend.fidelity.evaluation.stored_model import StoredModel, Walk
from glm5_ascend.model import layers
from glm5_kernels import ops


def selections(model: StoredModel, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The selection of every main layer, bool [S, S]."""
    walk, results = Walk.from_tokens(model, [tokens]), []
    for layer in range(model.config.num_hidden_layers):
        walk.step(layer)
        results += walk.selections
    return results  # type: ignore[return-value]


@pytest.mark.parametrize("scores", [96 * 7, 96 * 40])
def test_blocks_of_queries_change_nothing(scores: int, tiny_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = StoredModel(tiny_source), torch.randint(7, 263, (96,), generator=torch.Generator().manual_seed(4))
    whole, expected = model.logits([tokens])[0], selections(model, tokens)
    monkeypatch.setattr(layers, "SCORES", scores)
    assert all(map(torch.equal, expected, selections(model, tokens)))
    torch.testing.assert_close(model.logits([tokens])[0], whole, rtol=1e-4, atol=1e-5)


def test_of_equal_scores_the_first_keys_are_kept() -> None:
    score = torch.tensor([[1.0, 2.0, 2.0, 2.0, 2.0], [3.0, 1.0, 3.0, 1.0, 9.0]])
    best = layers._best(score, torch.tensor([4, 5]), 3)
    assert best.tolist() == [[False, True, True, True, False], [True, False, True, False, True]]
    assert layers._best(torch.zeros(2, 2), torch.tensor([1, 2]), 1).tolist() == [[True, False], [True, False]]


def test_int8_keys_are_those_of_the_op(tiny_source: Path) -> None:
    """`select_topk(int8_keys=True)` against the op that serves C8, on the same operands."""
    model, tokens = StoredModel(tiny_source), torch.randint(7, 263, (64,), generator=torch.Generator().manual_seed(5))
    config, weights = model.config, model.weights(1)
    x = layers.attention_input(config, weights, model.embed(tokens))
    latent = layers.query_latent(config, weights, x)
    got = layers.select_topk(config, weights, x, latent, int8_keys=True)
    q, k = layers._index_operands(config, weights, x, latent)
    (q8, q_scale), (k8, k_scale) = ops.quantize_indexer(q), ops.quantize_indexer(k)
    pages, scales = k8.view(4, 16, -1), k_scale.view(4, 16)
    batch = ops.PagedBatch(torch.tensor([0, 64]), torch.tensor([64]), torch.arange(4)[None])
    head = weights.linear("self_attn.indexer.weights_proj", x)
    best = ops.lightning_indexer_quant(q8, pages, head, q_scale, scales, batch, config.index_topk)
    expected = torch.zeros(64, 64, dtype=torch.bool)
    for row, positions in enumerate(best.tolist()):
        expected[row, [position for position in positions if position >= 0]] = True
    # fp32 sums in another order: a key at the edge may fall either way.
    assert int((got != expected).sum()) <= 4
    assert not torch.equal(got, layers.select_topk(config, weights, x, latent))


def test_marked_layers_are_evaluated_with_int8_keys(tiny_quantized: object) -> None:
    c8, plain = StoredModel(tiny_quantized("w4a8c8")), StoredModel(tiny_quantized("w4a8"))  # type: ignore[operator]
    assert [c8.int8_keys(layer) for layer in range(4)] == [False, True, True, False]
    assert not any(plain.int8_keys(layer) for layer in range(4))
    tokens = [torch.randint(7, 263, (200,), generator=torch.Generator().manual_seed(6))]
    assert not torch.equal(c8.logits(tokens)[0], plain.logits(tokens)[0])  # the weights are the same bytes
