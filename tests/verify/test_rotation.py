"""The rotation of the MTP layer: what is told without products of matrices is what the products say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint
from glm5_ascend.model.config_file import load_config
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.verify import mtp_rotation
from glm5_ascend.verify.checked import Checked

SEED = 1234
WRONG: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "another gain": lambda rot, q: q.T @ (torch.linspace(0.5, 2, len(q))[:, None] * q),
    "turned": lambda rot, q: rot.roll(1, 0),
    "in the model's basis": lambda rot, q: q @ rot @ q.T,
    "not symmetric": lambda rot, q: rot @ q,
    "noise": lambda rot, q: rot + 0.02 * torch.randn(rot.shape, generator=torch.Generator().manual_seed(0)),
    "a little noise": lambda rot, q: rot + 1e-4 * torch.randn(rot.shape, generator=torch.Generator().manual_seed(0)),
    "zero rows": lambda rot, q: rot * (torch.arange(len(rot)) > 2)[:, None],
}


@pytest.mark.parametrize("kind", ["as written", *WRONG])
def test_products_confirm_what_is_told_without_them(kind: str, tiny_source: Path) -> None:
    config = load_config(tiny_source)
    checked = Checked(LoadedCheckpoint(tiny_source, config, {}), {}, provenance={"seed": SEED})
    rotations = checked.rotations
    assert rotations is not None
    q = rotations.global_rotation()
    gain = 1 + 0.2 * torch.randn(config.hidden_size, generator=torch.Generator().manual_seed(1))
    rot = rotations.mtp_rotation(gain).bfloat16().float()
    if kind != "as written":
        rot = WRONG[kind](rot, q)
    undone = q @ rot @ q.T
    rest = float((undone - torch.diag(undone.diagonal())).norm() / rot.norm())
    confirmed = [
        mtp_rotation._has_this_form(checked, rot, q) for checked.seed_error in (0.0, 1e-5, float("nan"), float("inf"))
    ]
    assert confirmed[1:] == [False] * 3  # an unknown Q: products decide
    assert confirmed[0] == (rest <= mtp_rotation.ROT_TOLERANCE)
    assert (kind in ("as written", "another gain", "a little noise")) == confirmed[0]


def test_a_seeded_rotation_is_orthogonal(tiny_source: Path) -> None:
    """Moved as far as is allowed without a product, it still passes the product."""
    q = Rotations(load_config(tiny_source), SEED).global_rotation()
    assert mtp_rotation._is_orthogonal(q + mtp_rotation._SAME * q.sign())
    assert not mtp_rotation._is_orthogonal(q * 1.01)


@pytest.mark.parametrize("seed", [None, "7", 7.0, True])
def test_no_seed_no_rotations(seed: object, tiny_source: Path) -> None:
    provenance = json.loads(json.dumps({"seed": seed}))
    checked = Checked(LoadedCheckpoint(tiny_source, load_config(tiny_source), {}), {}, provenance=provenance)
    assert checked.rotations is None
