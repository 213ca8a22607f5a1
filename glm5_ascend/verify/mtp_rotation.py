"""Checks of the rotations of a rotated model: `rot.weight` for the MTP layer, `optional/quarot.safetensors`.

rot = Q^T diag(g) Q, g the source's final norm gain: symmetric, and diagonal once Q is undone (vllm-ascend
`models/deepseek_mtp.py`).
"""

from __future__ import annotations

from pathlib import Path

import torch

from glm5_ascend.checkpoint.checks.loaded_checkpoint import FLOATS, LoadedCheckpoint, inside
from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.schemes import DESCRIPTION_NAME
from glm5_ascend.checkpoint.shards import Shard, dtype_name
from glm5_ascend.checkpoint.types import ROT_FILE, ROT_NAME
from glm5_ascend.errors import CheckpointError
from glm5_ascend.verify.checked import Checked

#: Q Q^T may differ from a multiple of the identity by this much per element.
ORTHOGONAL_TOLERANCE = 1e-3
#: That multiple from 1: msModelSlim rounds the entries of its Hadamard matrix, all of one size, to bf16 (2^-9, squared
#: in the product: 0.0027 for 192 columns, 0.0002 for GLM-5's 6144).
LENGTH_TOLERANCE = 2.0**-8
#: rot is stored in bf16: an error of 2^-9 of each element, with room for the arithmetic behind it.
ROT_TOLERANCE = 2.0**-7
#: A Q that differs by this much per element from one that is orthogonal by construction passes both checks of that.
_SAME = 1e-6
_AGAIN = "quantize again, or copy the file again"


def check_mtp(checked: Checked, deep: bool, report: Report) -> torch.Tensor | None:
    """Check both rotations; return Q, fp32 [hidden, hidden], if it is usable and `deep` allows reading it."""
    checkpoint = checked.checkpoint
    description = checkpoint.description or {}
    used, here = description.get("is_rot_used") is True, ROT_NAME in checkpoint.entries
    if used and not here and ROT_NAME not in checkpoint.unreadable:
        why = "is_rot_used is true but no loaded shard holds it: drafts would be random"
        fix = "copy rot.safetensors and list it in the index, or quantize again"
        report.error("mtp.rot_missing", why, tensor=ROT_NAME, file=DESCRIPTION_NAME, fix=fix)
    if not used and (here or "optional" in description):
        report.error(
            "mtp.rot_unused",
            "the model is rotated but is_rot_used is not true: drafts lose the final norm's gain",
            tensor=ROT_NAME if here else None,
            file=DESCRIPTION_NAME,
            fix="set is_rot_used to true",
        )
    if here and checkpoint.config.num_layers_with_mtp > checkpoint.config.num_hidden_layers:
        _check_home(checkpoint, report)
    rotation = _global_rotation(checked, deep, report) if "optional" in description else None
    if here and _shape_ok(checkpoint, report) and deep and ROT_NAME not in checked.non_finite:
        _check_rot(checked, rotation, report)
    return rotation


def _check_home(checkpoint: LoadedCheckpoint, report: Report) -> None:
    """Check the file: vLLM finds the tensor by the index, SGLang by file name (models/deepseek_nextn.py:106-111)."""
    home = checkpoint.file_of[ROT_NAME]
    if home != ROT_FILE:
        why = f"not in {ROT_FILE}, the only file where SGLang looks for it: it would draft without the rotation"
        report.error("mtp.rot_file", why, tensor=ROT_NAME, file=home, fix="quantize again")


def _shape_ok(checkpoint: LoadedCheckpoint, report: Report) -> bool:
    entry, hidden = checkpoint.entries[ROT_NAME], checkpoint.config.hidden_size
    if entry.shape == (hidden, hidden) and entry.dtype in FLOATS:
        return True
    why = f"{dtype_name(entry.dtype)} {list(entry.shape)}, expected float [{hidden}, {hidden}]"
    report.error("mtp.rot_shape", why, tensor=ROT_NAME, fix=_AGAIN)
    return False


def _check_rot(checked: Checked, rotation: torch.Tensor | None, report: Report) -> None:
    rot = checked.checkpoint.read(ROT_NAME).float()
    size = float(rot.norm())
    problem = None
    if size == 0:
        problem = "all zero"
    elif float((rot - rot.T).norm()) > ROT_TOLERANCE * size:
        problem = "not symmetric: it cannot be Q^T diag(g) Q"
    elif rotation is not None and not _has_this_form(checked, rot, rotation):
        undone = rotation @ rot @ rotation.T
        rest = float((undone - torch.diag(undone.diagonal())).norm()) / size
        if rest > ROT_TOLERANCE:
            problem = f"does not belong to the global rotation: off the diagonal of Q rot Q^T is {rest:.3f}"
    if problem:
        report.error("mtp.rot_wrong", problem, tensor=ROT_NAME, fix=_AGAIN)


def _has_this_form(checked: Checked, rot: torch.Tensor, rotation: torch.Tensor) -> bool:
    """Tell if rot is known to be Q^T diag(g) Q without a product of matrices, which takes seconds at GLM-5's width.

    Such a g is Q rot Q^T 1. Of all diagonals, that of Q rot Q^T comes closest: what this one passes, it passes.
    """
    if checked.rotations is None or not checked.seed_error <= _SAME:
        return False
    gain = rotation @ (rot @ rotation.sum(0))
    return float((rot - checked.rotations.mtp_rotation(gain)).norm()) <= ROT_TOLERANCE * float(rot.norm())


def _global_rotation(checked: Checked, deep: bool, report: Report) -> torch.Tensor | None:
    checkpoint = checked.checkpoint
    name = _mapped_file(checkpoint)
    path = checkpoint.directory / (name or "")
    if name is None or not path.is_file() or not inside(path, checkpoint.directory):
        why = f"the description's `optional` names {name!r}, which is not a file of this checkpoint"
        fix = "copy optional/quarot.safetensors"
        report.error("mtp.global_rotation", why, tensor="global_rotation", file=DESCRIPTION_NAME, fix=fix)
        return None
    try:
        shard, hidden = Shard(path), checkpoint.config.hidden_size
        entry = shard.entries.get("global_rotation")
        if entry is None or entry.shape != (hidden, hidden) or entry.dtype is not torch.float32:
            raise CheckpointError(f"global_rotation must be float32 [{hidden}, {hidden}]", _AGAIN)
        if not deep:
            return None
        rotation = shard.read("global_rotation")
        if checked.rotations is not None:
            checked.seed_error = float((checked.rotations.global_rotation() - rotation).abs().max())
        if not checked.seed_error <= _SAME and not _is_orthogonal(rotation):  # NaN is not
            raise CheckpointError("global_rotation is not orthogonal", _AGAIN)
    except CheckpointError as error:
        report.error("mtp.global_rotation", error.message, tensor="global_rotation", file=name, fix=error.tip)
        return None
    return rotation


def _is_orthogonal(rotation: torch.Tensor) -> bool:
    product = rotation @ rotation.T
    length = product.diagonal().mean()
    off = float((product - length * torch.eye(len(rotation))).abs().max())
    return off <= ORTHOGONAL_TOLERANCE and float(abs(length - 1)) <= LENGTH_TOLERANCE  # false for NaN, too


def _mapped_file(checkpoint: LoadedCheckpoint) -> str | None:
    value: object = (checkpoint.description or {}).get("optional")
    for key in ("quarot", "rotation_map", "global_rotation"):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) and not Path(value).is_absolute() else None
