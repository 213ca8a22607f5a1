"""Acceptance of MTP drafts: against the whole model run step by step, and what a missing `rot` would do to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glm5_ascend.fidelity.evaluation.compare import compare
from glm5_ascend.fidelity.evaluation.drafts import draft_tokens
from glm5_ascend.fidelity.evaluation.metrics import metrics
from glm5_ascend.fidelity.evaluation.stored_model import StoredModel, Walk
from tests.support.decoder_layer import main_logits, mtp_logits
from tests.support.tiny_model import rotate_tiny, write_tiny_model

WINDOWS = list(torch.randint(7, 263, (4, 40), generator=torch.Generator().manual_seed(2)))


def plain(directory: Path) -> torch.Tensor:
    """Whether each draft is accepted, [windows, length - 2], by whole logits of one unrotated model."""
    model, accepted = StoredModel(directory), []
    config, mtp = model.config, model.config.num_hidden_layers
    for window in WINDOWS:
        normed, main = main_logits(config, model.files.read, model.weights, window)
        table = model.files.read(f"model.layers.{mtp}.embed_tokens.weight").float()
        drafted = mtp_logits(config, model.weights(mtp), table[window[1:]], normed[:-1])
        draft = drafted.argmax(-1)[:-1]  # for tokens 2 .. length - 1
        accepted.append(main[1:-1].argmax(-1) == draft)
    return torch.stack(accepted)


def test_drafts_are_those_of_the_plain_forward(tiny_source: Path) -> None:
    comparison, expected = compare(tiny_source, tiny_source, WINDOWS, drafts=True), plain(tiny_source)
    assert expected.any()
    for accepted in (comparison.drafts_reference, comparison.drafts_quantized):
        assert accepted is not None and torch.equal(accepted, expected)
    some = comparison.select(torch.tensor([1, 3])).drafts_quantized
    assert some is not None and torch.equal(some, expected[[1, 3]])


def drafts(directory: Path) -> torch.Tensor:
    """The drafts themselves, [windows, length - 1]."""
    model = StoredModel(directory)
    walk = Walk.from_tokens(model, WINDOWS)
    for layer in range(model.config.num_hidden_layers):
        walk.step(layer)
    hidden = walk.hidden.view(len(WINDOWS), -1, walk.hidden.shape[1])[:, :-1].flatten(0, 1)
    return draft_tokens(model, model.final_norm(hidden), WINDOWS)


def test_a_rotated_model_drafts_the_same_only_with_its_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny_model(tmp_path / "source", dtype="float32", mtp_copies=False)
    out = rotate_tiny(source, tmp_path / "out")
    expected = drafts(source)
    assert float((drafts(out) == expected).double().mean()) > 0.98  # fp32 sums in another order
    monkeypatch.setattr(StoredModel, "mtp_rotation", lambda self: None)
    # The other half of what the layer reads, the embedding, is right: many of the random model's drafts stay.
    assert float((drafts(out) == expected).double().mean()) < 0.9


def test_steps_get_shorter_as_drafts_are_refused(tiny_source: Path) -> None:
    comparison = compare(tiny_source, tiny_source, WINDOWS, drafts=True)
    assert comparison.drafts_reference is not None and comparison.drafts_quantized is not None
    comparison.drafts_reference[:], comparison.drafts_quantized[:] = True, True
    comparison.drafts_quantized[:, ::2] = False  # 19 of 38: 1.5 instead of 2 tokens a step
    rows = {row.name: row for row in metrics(comparison)}
    assert (rows["draft_source"].value, rows["draft_quantized"].value) == (1, 0.5)
    assert rows["draft_step_change"].value == pytest.approx(-0.25)
    assert rows["draft_step_change"].interval == pytest.approx((-0.25, -0.25))


def test_no_mtp_layer_no_drafts(tmp_path: Path, tiny_source: Path) -> None:
    bare = write_tiny_model(tmp_path / "bare", num_nextn_predict_layers=0)
    assert compare(bare, bare, WINDOWS, drafts=True).drafts_reference is None
    short = [window[:2] for window in WINDOWS]
    assert compare(tiny_source, tiny_source, short, drafts=True).drafts_reference is None
    assert compare(tiny_source, tiny_source, WINDOWS).drafts_reference is None
