"""Float tensors: finite, and no norm, router, embedding or head that is degenerate."""

from __future__ import annotations

import math

import torch

from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.nonsense import MATRIX_BODY, VECTOR_BODY, times_typical
from glm5_ascend.checkpoint.shards import TensorEntry
from glm5_ascend.model.spec import Linear, Vector
from glm5_ascend.verify.checked import Checked
from glm5_ascend.verify.integer_rows import checksum
from glm5_ascend.verify.plausible import Doubts

#: Share of a norm's gains that may be negative. They start at 1, and few cross zero in training; with random signs and
#: 16 gains and more, three quarters are negative once in 100.
_NEGATIVE = 0.75
#: A rotated residual stream has no gain behind its last norm (rotation and gain do not commute): it is folded into the
#: head, and what is stored is 1, exactly so in good outputs.
_FOLDED = 0.01
#: Rows of the embedding that are compared with the MTP layer's copy; above the first cosine they are copies, below the
#: second one they are not.
_ROWS, _SIMILAR, _DIFFERENT = 64, 0.9, 0.5
_COPY = "copy the file again, or quantize again"
#: Of a tensor's largest value over its typical one: what is so large leaves nothing of any sum it is part of in bf16.
_OUT_OF_LINE = 2.0**16


class FloatSums:
    """Largest and mean square value of a float tensor, and the checksum of a matrix, from pieces of its rows."""

    def __init__(self, entry: TensorEntry) -> None:
        self.entry, self.is_weight = entry, entry.name.endswith(".weight") and len(entry.shape) == 2
        self._body = MATRIX_BODY if self.is_weight else VECTOR_BODY
        self._finite, self._largest, self._times, self._squares, self._checksum = True, 0.0, 0.0, 0.0, 0

    def add(self, piece: torch.Tensor) -> None:
        """Add rows [n, ...]."""
        low, high = (float(bound) for bound in piece.aminmax())
        largest = max(high, -low)
        if not math.isfinite(low + high) and not bool(piece.isfinite().all()):
            self._finite = False
        elif largest > _OUT_OF_LINE * self._body:
            self._times = max(self._times, times_typical(piece, largest, self._body))
        self._largest = max(self._largest, largest)
        if self.is_weight:
            self._squares += float(torch.linalg.vector_norm(piece, 2, dtype=torch.float32)) ** 2
            self._checksum = checksum(piece, self._checksum)

    def finish(self, report: Report, doubts: Doubts) -> None:
        """Report a tensor that is not finite; the size and checksum of a weight go into `doubts`."""
        name = self.entry.name
        if not self._finite:
            report.error("value.not_finite", "holds NaN or infinity", tensor=name, fix=_COPY)
            return
        if self._times > _OUT_OF_LINE:
            doubts.doubt(
                "value.too_large",
                name,
                f"its largest value is {self._largest:.3g}, {self._times:.1g} times its typical one",
            )
        if self.is_weight and self._largest == 0:
            doubts.empty_floats.add(name)
        elif self.is_weight:
            doubts.size(name, (self._squares / math.prod(self.entry.shape)) ** 0.5)
            doubts.copy_of(name.removesuffix(".weight"), self.entry.shape, self._checksum)


def check_vectors_and_floats(checked: Checked, doubts: Doubts) -> None:
    """Check norms, and FLOAT linears that are all zero; only complete tensors."""
    config = checked.checkpoint.config
    chooses = config.num_experts_per_tok < config.n_routed_experts  # otherwise a router may give all experts one weight
    for prefix, weight in config.all_weights():
        name = prefix + weight.tensor_name
        if isinstance(weight, Vector):
            if weight.role in ("norm", "layernorm") and name in checked.complete:
                _check_norm(checked, weight, name, doubts)
        elif prefix + weight.name in checked.complete and name in doubts.empty_floats:
            if isinstance(weight, Linear) and weight.out == "experts" and not chooses:
                continue
            dead = config.spec.is_routed(name)  # experts that were never chosen exist
            why = "every weight is zero: " + ("a dead expert?" if dead else "the module computes nothing")
            doubts.doubt("value.all_zero", name, why, "warning" if dead else "error")
    _check_embeddings(checked, doubts)


def _check_norm(checked: Checked, weight: Vector, name: str, doubts: Doubts) -> None:
    gain = checked.checkpoint.read(name).float()
    negative = float((gain < 0).float().mean())
    if not bool(gain.any()):
        doubts.doubt("value.norm", name, "every gain is zero: what follows gets nothing")
    elif weight.role == "norm" and negative > _NEGATIVE:
        doubts.doubt("value.norm", name, f"{negative:.0%} of the gains are negative")
    elif name == f"{checked.checkpoint.config.spec.final_norm}.weight" and checked.global_rotation is not None:
        off = float((gain - 1).abs().max())
        if off > _FOLDED:
            why = f"gains differ from 1 by up to {off:.3g}: in a rotated model they are folded into lm_head"
            doubts.doubt("value.norm", name, why)


def _check_embeddings(checked: Checked, doubts: Doubts) -> None:
    """Check that embedding and head, of one shape, are not swapped: the MTP layer has a copy of the embedding."""
    checkpoint, config = checked.checkpoint, checked.checkpoint.config
    if not config.num_nextn_predict_layers:
        return
    spec, prefix = config.spec, config.spec.layer_prefix(config.num_hidden_layers)
    copy = next(prefix + name for name, original in spec.mtp_copies.items() if original == spec.embedding)
    if not {copy, spec.embedding, spec.head} <= checked.complete:
        return
    rows = torch.linspace(0, config.vocab_size - 1, _ROWS).long().tolist()
    table, head, mtp = (
        torch.cat([checkpoint.read_rows(f"{module}.weight", row, row + 1).float() for row in rows])
        for module in (spec.embedding, spec.head, copy)
    )
    if _similarity(mtp, head) > _SIMILAR and _similarity(mtp, table) < _DIFFERENT:
        why = "differs from the MTP layer's copy of the embedding, lm_head equals it: the two are swapped"
        doubts.doubt("value.swapped", f"{spec.embedding}.weight", why)


def _similarity(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=1).mean())
