"""Checks of values that hold for every model: finite, positive scales, offsets, and the derived tensors.

The derived ones (scale_bias, quant_bias, deq_scale) are recomputed from the integers: a wrong nibble order, packing
axis, or a scale of another module cannot agree with them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint
from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.schemes import (
    FLOAT,
    W4A8_DYNAMIC,
    W8A8,
    scale_bias,
    scale_bias_of,
    stored_tensors,
    unpack_int4,
)
from glm5_ascend.verify.checked import Checked
from glm5_ascend.verify.integer_rows import IntegerRows
from glm5_ascend.verify.plausible import Doubts

#: msModelSlim multiplies in bf16: deq_scale may be off by one bf16 rounding, and once more for the factors.
DEQ_SCALE_TOLERANCE = 2.0**-8
#: scale_bias, relative to the sum of magnitudes: room for fp32 sums in any order, but one integer off by one shows
#: (at 6144 columns it is 2^-15). msModelSlim's values agree exactly (measured).
SCALE_BIAS_TOLERANCE = 2.0**-17
#: quant_bias: an integer; msModelSlim computes it in fp32, which is exact only up to 2^24.
QUANT_BIAS_TOLERANCE = 2.0**-22
_AGAIN = "quantize again: the engine would compute wrong values silently"


def check_linear(
    checkpoint: LoadedCheckpoint, module: str, scheme: str, rows: IntegerRows, report: Report, doubts: Doubts
) -> None:
    """Check one quantized linear whose tensors all exist with the right dtypes and shapes.

    Values that are possible but not plausible are added to `doubts`.
    """
    tensors = read_linear(checkpoint, module, scheme, weight=False)
    check = _QuantizedLinear(checkpoint, module, tensors, report)
    if not check.scales(scheme) or not check.fits_32_bits():
        return
    doubts.linear(module, scheme, rows, tensors)
    if not bool(rows.high.any() | rows.low.any()):
        report.warning(
            "value.all_zero",
            "every integer is zero: a dead module, or a shard that was never filled",
            tensor=f"{module}.weight",
            fix="compare with the source: --against",
        )
    if scheme == W4A8_DYNAMIC:
        check.scale_bias(rows.sums)
    if scheme == W8A8:
        check.static_input(rows.sums)


def read_linear(checkpoint: LoadedCheckpoint, module: str, scheme: str, weight: bool = True) -> dict[str, torch.Tensor]:
    """Read the stored tensors of a linear by suffix; deq_scale as fp32 for any stored dtype."""
    suffixes = ["weight"] if scheme == FLOAT else [stored.suffix for stored in stored_tensors(scheme, (8, 16), module)]
    names = {suffix: f"{module}.{suffix}" for suffix in suffixes if weight or suffix != "weight"}
    tensors = {suffix: checkpoint.read(name) for suffix, name in names.items() if name in checkpoint.entries}
    deq = tensors.get("deq_scale")
    if deq is not None and deq.dtype is torch.int64:
        tensors["deq_scale"] = deq.to(torch.int32).view(torch.float32)
    return tensors


class _QuantizedLinear:
    """The stored tensors of one quantized linear, by suffix, and the checks of their values."""

    def __init__(
        self, checkpoint: LoadedCheckpoint, module: str, tensors: Mapping[str, torch.Tensor], report: Report
    ) -> None:
        self.checkpoint, self.module, self.tensors, self.report = checkpoint, module, tensors, report

    def _error(self, id: str, suffix: str, message: str) -> None:
        self.report.error(id, message, tensor=f"{self.module}.{suffix}", fix=_AGAIN)

    def scales(self, scheme: str) -> bool:
        """Check scales (positive; already bf16 where the engine rounds them) and weight_offset (zero).

        Returns False if the scales cannot be computed with.
        """
        sound = True
        for suffix in ("weight_scale", "input_scale", "deq_scale"):
            scale = self.tensors.get(suffix)
            if scale is None:
                continue
            if bool((scale <= 0).any()):
                sound = False
                self._error("value.scale", suffix, f"{_first(scale <= 0, scale)}: scales must be > 0")
            elif not bool(scale.isfinite().all()):  # stored as int64, which is not among the float tensors
                sound = False
                self._error("value.scale", suffix, f"{_first(~scale.isfinite(), scale)}: scales must be finite")
            rounded_at_load = suffix != "deq_scale" and scheme != W4A8_DYNAMIC
            off = scale.to(torch.bfloat16).float() != scale
            if rounded_at_load and bool(off.any()):
                self.report.warning(
                    "value.not_bf16",
                    f"{int(off.sum())} of {scale.numel()} values are not bf16-representable, the engine rounds them",
                    tensor=f"{self.module}.{suffix}",
                    fix="compute the integers from a scale already rounded to bf16",
                )
        offset = self.tensors.get("weight_offset")
        if offset is not None and bool((offset != 0).any()):
            why = f"{_first(offset != 0, offset)}: the format is symmetric, all must be 0"
            self._error("value.offset", "weight_offset", why)
        return sound

    def fits_32_bits(self) -> bool:
        """Check that an int64 deq_scale holds the bits of an fp32 number: an engine in float16 reads it so."""
        name = f"{self.module}.deq_scale"
        if "deq_scale" not in self.tensors or self.checkpoint.entries[name].dtype is not torch.int64:
            return True
        if not bool((self.checkpoint.read(name) >> 32).any()):
            return True
        self._error("value.scale", "deq_scale", "holds more than the 32 bits of a number in fp32")
        return False

    def scale_bias(self, sums: torch.Tensor) -> None:
        """Check scale_bias = 8 * sum(w) of its row and chunk; sums: int64 [N, chunks]."""
        scale, stored = self.tensors["weight_scale"], self.tensors["scale_bias"]
        expected = scale_bias_of(sums, scale)
        difference = (stored - expected).abs()
        if bool((difference <= SCALE_BIAS_TOLERANCE * expected.abs()).all()):
            return  # and the sum of magnitudes is no smaller
        integers = unpack_int4(self.checkpoint.read(f"{self.module}.weight"))
        off = difference > SCALE_BIAS_TOLERANCE * scale_bias(integers.abs(), scale.abs(), sums.shape[1])
        if bool(off.any()):
            rows = int(off.any(dim=1).sum())
            row, column = (int(i) for i in off.nonzero()[0])
            self._error(
                "value.scale_bias",
                "scale_bias",
                f"{rows} of {len(sums)} rows differ from 8 * sum(w), first row {row} column {column}: "
                f"{stored[row, column]:.6g}, expected {expected[row, column]:.6g} "
                "(wrong nibble order, packing axis, or scale of another module?)",
            )

    def static_input(self, sums: torch.Tensor) -> None:
        """Check quant_bias and deq_scale against the input range and the sums of the rows, int64 [N, 1]."""
        input_scale, offset = self.tensors["input_scale"], self.tensors["input_offset"]
        if bool((offset != offset.round()).any() | (offset < -128).any() | (offset > 127).any()):
            self._error("value.input_offset", "input_offset", f"{float(offset[0])}: must be an integer in [-128, 127]")
            return
        expected = -int(offset[0]) * sums.flatten()
        stored = self.tensors["quant_bias"].to(torch.int64)
        off = (stored - expected).abs() > (expected.abs() * QUANT_BIAS_TOLERANCE).clamp_min(1)
        if bool(off.any()):
            row = int(off.nonzero()[0])
            self._error(
                "value.quant_bias",
                "quant_bias",
                f"{int(off.sum())} of {len(sums)} rows differ from -input_offset * sum(q), first row {row}: "
                f"{int(stored[row])}, expected {int(expected[row])}",
            )
        if "weight_scale" in self.tensors:  # msModelSlim stores only the product
            product = input_scale * self.tensors["weight_scale"].flatten()
            deq = self.tensors["deq_scale"]
            off = (deq - product).abs() > DEQ_SCALE_TOLERANCE * product.abs()
            if bool(off.any()):
                row = int(off.nonzero()[0])
                self._error(
                    "value.deq_scale",
                    "deq_scale",
                    f"{int(off.sum())} of {len(sums)} rows differ from input_scale * weight_scale, "
                    f"first row {row}: {float(deq[row]):.6g}, expected {float(product[row]):.6g}",
                )


def check_shared_input(checked: Checked, report: Report) -> None:
    """q_a_proj and kv_a_proj_with_mqa become one module with one input scale: their values must be equal."""
    checkpoint = checked.checkpoint
    for layer in range(checkpoint.config.num_layers_with_mtp):
        first, second = (
            checkpoint.config.spec.layer_prefix(layer) + name for name in checkpoint.config.spec.down_projections
        )
        if not {first, second} <= checked.complete or {checked.schemes[first], checked.schemes[second]} != {W8A8}:
            continue
        for suffix in ("input_scale", "input_offset"):
            a, b = checkpoint.read(f"{first}.{suffix}"), checkpoint.read(f"{second}.{suffix}")
            if not bool((a == b).all()):
                report.error(
                    "value.shared_input",
                    f"{float(b[0]):.6g}, but {first} has {float(a[0]):.6g}: the engine keeps only one of them",
                    tensor=f"{second}.{suffix}",
                    fix="both read the same input: quantize again with one range for both",
                )


def _first(where: torch.Tensor, values: torch.Tensor) -> str:
    row = int(where.flatten().nonzero()[0])
    return f"{int(where.sum())} of {values.numel()} values, first at {row}: {float(values.flatten()[row]):.6g}"
