"""Acceptance of MTP drafts: against the whole model run step by step, and what a missing `rot` would do to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glm5_ascend.fidelity.evaluation.compare import compare
from glm5_ascend.fidelity.evaluation.metrics import metrics
from glm5_ascend.fidelity.evaluation.stored_model import StoredModel
from glm5_ascend.model import layers
from glm5_ascend.quantize.job import prepare
from glm5_ascend.quantize.options import QuantizeOptions
from glm5_ascend.quantize.pipeline import quantize
from glm5_ascend.quantize.progress import silent
from tests.support.decoder_layer import decoder_layer
from tests.support.tiny_model import write_tiny_model

WINDOWS = list(torch.randint(7, 263, (4, 40), generator=torch.Generator().manual_seed(2)))


def plain(directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """(greedy, sampled) of every draft, [windows, length - 2], by whole logits of one unrotated model."""
    model, greedy, sampled = StoredModel(directory), [], []
    config, mtp = model.config, model.config.num_hidden_layers
    for window in WINDOWS:
        hidden, selected = model.files.read("model.embed_tokens.weight").float()[window], None
        for layer in range(mtp):
            hidden, selected = decoder_layer(config, layer, model.weights(layer), hidden, selected)
        normed = layers.rms_norm(hidden, model.files.read("model.norm.weight").float(), config.rms_norm_eps)
        main = (normed @ model.files.read("lm_head.weight").float().T).log_softmax(-1)
        weights = model.weights(mtp)
        table = model.files.read(f"model.layers.{mtp}.embed_tokens.weight").float()
        stream = layers.mtp_input(config, weights, table[window[1:]], normed[:-1])
        stream, _ = decoder_layer(config, mtp, weights, stream)
        stream = layers.rms_norm(stream, weights.vector("shared_head.norm.weight"), config.rms_norm_eps)
        draft = weights.linear("shared_head.head", stream).argmax(-1)[:-1]  # for tokens 2 .. length - 1
        greedy.append(main[1:-1].argmax(-1) == draft)
        sampled.append(main[1:-1].gather(1, draft[:, None])[:, 0].exp())
    return torch.stack(greedy), torch.stack(sampled)


def test_drafts_are_those_of_the_plain_forward(tiny_source: Path) -> None:
    comparison = compare(tiny_source, tiny_source, WINDOWS, drafts=True).drafts
    greedy, sampled = plain(tiny_source)
    assert comparison is not None
    assert torch.equal(comparison.greedy_reference, greedy) and torch.equal(comparison.greedy_quantized, greedy)
    torch.testing.assert_close(comparison.sampled_reference, sampled.double(), rtol=1e-3, atol=1e-6)
    assert (
        comparison.select(torch.tensor([1, 3])).sampled_quantized.tolist()
        == comparison.sampled_quantized[[1, 3]].tolist()
    )


def test_a_rotated_model_drafts_the_same_only_with_its_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny_model(tmp_path / "source", dtype="float32", mtp_copies=False)
    recipe = tmp_path / "rotate.yaml"
    recipe.write_text(
        "apiversion: glm5_ascend_v1\nmetadata: {config_id: rotate}\nspec:\n  process:\n    - {type: quarot}\n"
    )
    out = tmp_path / "out"
    quantize(prepare(QuantizeOptions(source, out, str(recipe))), silent)
    comparison = compare(out, source, WINDOWS, drafts=True).drafts
    assert comparison is not None
    torch.testing.assert_close(comparison.sampled_quantized, comparison.sampled_reference, rtol=1e-3, atol=1e-6)
    monkeypatch.setattr(StoredModel, "to_mtp_basis", lambda self, normed: normed)
    wrong = compare(out, source, WINDOWS, drafts=True).drafts
    assert wrong is not None
    # The other half of what the layer reads, the embedding, is right: many of the random model's drafts stay.
    assert float(((wrong.sampled_quantized - comparison.sampled_reference).abs() > 1e-5).double().mean()) > 0.2


def test_steps_get_shorter_as_drafts_are_refused(tiny_source: Path) -> None:
    comparison = compare(tiny_source, tiny_source, WINDOWS, drafts=True)
    assert comparison.drafts is not None
    comparison.drafts.greedy_reference[:], comparison.drafts.greedy_quantized[:] = True, True
    comparison.drafts.greedy_quantized[:, ::2] = False  # 19 of 38: 1.5 instead of 2 tokens a step
    rows = {row.name: row for row in metrics(comparison)}
    assert (rows["draft_source"].value, rows["draft_quantized"].value) == (1, 0.5)
    assert rows["draft_step_change"].value == pytest.approx(-0.25)
    assert rows["draft_step_change"].interval == pytest.approx((-0.25, -0.25))


def test_no_mtp_layer_no_drafts(tmp_path: Path, tiny_source: Path) -> None:
    bare = write_tiny_model(tmp_path / "bare", num_nextn_predict_layers=0)
    assert compare(bare, bare, WINDOWS, drafts=True).drafts is None
    assert compare(tiny_source, tiny_source, [window[:2] for window in WINDOWS], drafts=True).drafts is None
    assert compare(tiny_source, tiny_source, WINDOWS).drafts is None
