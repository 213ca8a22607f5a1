"""Values that are possible, but that no quantization of a trained model has: doubts, without a source to compare.

A doubt is an error, because an engine would serve garbage silently; a tensor that matches its source
loses its doubts (`add_doubts`). Every limit states its reason. "Good outputs" are all stock recipes on the tiny
and the demo model (bf16, float16, float32 and FP8 sources, GLM-5.2's layers), and msModelSlim's W4A8 and W8A8.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint
from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.schemes import W4A8_DYNAMIC
from glm5_ascend.verify.integer_rows import IntegerRows

#: Largest magnitude a scheme's integers have in a tensor, and the least that a row's largest one may have. A scale is
#: max|row| / 127 (or 7), found anew or fitted: good outputs reach 127 and 7 in every tensor, and no row of them stays
#: below 126 and 6. A row below the second number leaves out a third and more of its range: its integers or its scale
#: are not the ones that were computed.
_LARGEST = {True: (7, 4), False: (127, 100)}
#: A tensor of fewer rows may miss its largest integer by chance (msModelSlim's bf16 scales: 126 in every tenth row).
_ENOUGH_ROWS = 16
#: Share of rows that may hold -128: msModelSlim's bf16 scales and error-compensated rounding leave up to 0.21.
_LOWEST_ROWS = 0.5
#: Share of one row's integers that may be -128 (good outputs: a single one): above it, the row is saturated.
_LOWEST_IN_ROW = 1 / 16
#: Ratio of a row's scale to its tensor's median, or of a tensor's size to its kind's. Good outputs: 6; a weight of 100
#: times its row's size: 75. What is 2^16 times its neighbours has no place beside them in float16, and in bf16 (8 bits)
#: leaves nothing of any sum they are part of.
_OUT_OF_LINE = 2.0**16
#: A row of zeros has scale 1 (this tool) or a tiny one; a scale within this factor of its neighbours' had weights.
_LIKE_NEIGHBOURS = 64.0
#: Members that a kind needs before one of them can be out of line: of three, the median is none that is.
_ENOUGH_MEMBERS = 3
_SOURCE = "compare with the source: --against; then copy the checkpoint again, or quantize again"
#: Elements; smaller tensors can be equal without an error (a few rows of zeros and ones).
_LEAST = 256


@dataclass
class Doubts:
    """Collects doubts about the tensors of one checkpoint, from several threads.

    `finish` puts them in order, and adds those that need all tensors.

    Attributes:
        report: the doubts, separate from certain findings.
        empty_floats: names of float weights that are all zero.
    """

    checkpoint: LoadedCheckpoint
    report: Report = field(default_factory=lambda: Report(Path()))
    empty_floats: set[str] = field(default_factory=set)
    _weights: list[tuple[str, tuple[int, ...], int]] = field(default_factory=list)  # module, shape, checksum
    _sizes: list[tuple[str, str, str, float]] = field(default_factory=list)  # module, kind, tensor, size
    _empty: list[tuple[str, str, int, float]] = field(default_factory=list)  # module, kind, rows, their scale

    def doubt(self, id: str, name: str, message: str, level: str = "error") -> None:
        say = self.report.error if level == "error" else self.report.warning
        say(id, message, tensor=name, fix=_SOURCE)

    def linear(self, module: str, scheme: str, rows: IntegerRows, tensors: Mapping[str, torch.Tensor]) -> None:
        """Check a quantized linear: its integers, and its stored tensors but the weight, by suffix."""
        name, high, low = f"{module}.weight", rows.high, rows.low
        top = torch.maximum(high, -low)
        self._rows(name, scheme, high, low, top)
        self._lowest(name, rows, low)
        group, filled = _kind(module) + scheme, top > 0
        scale = tensors.get("weight_scale")
        scales = tensors["deq_scale"] / tensors["input_scale"] if scale is None else scale.flatten()
        stored = f"{module}.{'deq_scale' if scale is None else 'weight_scale'}"
        if bool(filled.any()):
            middle, largest = float(scales[filled].median()), float(scales[filled].max())
            self._sizes.append((module, group, stored, middle))
            if largest > _OUT_OF_LINE * middle > 0:
                row = int(torch.where(filled, scales, 0).argmax())
                self.doubt(
                    "value.scale_range", stored, f"row {row} has scale {largest:.4g}, the median is {middle:.4g}"
                )
            self.copy_of(module, self.checkpoint.entries[name].shape, rows.checksum)
        if not bool(filled.all()):
            empty = scales[~filled & (scales != 1)]
            if len(empty):
                self._empty.append((module, group, len(empty), float(empty.median())))

    def _rows(self, name: str, scheme: str, high: torch.Tensor, low: torch.Tensor, top: torch.Tensor) -> None:
        """Report constant rows, and rows that use a small part of the range; high, low, top: int16 [N]."""
        largest, least = _LARGEST[scheme == W4A8_DYNAMIC]
        constant = (high == low) & (top > 0)
        if bool(constant.any()):
            row = int(constant.nonzero()[0])
            self.doubt(
                "value.constant_row",
                name,
                f"{int(constant.sum())} of {len(top)} rows hold one value only, first row {row}: {int(high[row])} "
                "(infinity or NaN in the source?)",
            )
        short = (top > 0) & (top < least) & ~constant
        if bool(short.any()):
            row = int(short.nonzero()[0])
            self.doubt(
                "value.range",
                name,
                f"{int(short.sum())} of {len(top)} rows reach no integer of {least}, first row {row}: {int(top[row])} "
                f"of {largest}",
            )
        elif int((top > 0).sum()) >= _ENOUGH_ROWS and int(top.max()) < largest:
            self.doubt("value.range", name, f"no integer of {largest} in any row: the largest is {int(top.max())}")

    def _lowest(self, name: str, rows: IntegerRows, low: torch.Tensor) -> None:
        """Report too many -128 (clipped twice); low: int16 [N]."""
        count, worst = int((low == -128).sum()), rows.most_lowest
        if worst > max(_LOWEST_IN_ROW * rows.columns, 2) or (
            len(low) >= _ENOUGH_ROWS and count > _LOWEST_ROWS * len(low)
        ):
            self.doubt(
                "value.range", name, f"-128 in {count} of {len(low)} rows, up to {worst} times in one: saturated"
            )

    def size(self, name: str, mean: float) -> None:
        """Record the mean magnitude of a FLOAT weight, to compare it with the same module of other layers."""
        self._sizes.append((name.removesuffix(".weight"), _kind(name), name, mean))

    def copy_of(self, module: str, shape: tuple[int, ...], check: int) -> None:
        """Record a weight by its checksum; not of an MTP layer, which is made from others."""
        config = self.checkpoint.config
        layer = config.spec.layer_of(module)
        if (layer is None or not config.is_mtp(layer)) and math.prod(shape) >= _LEAST:
            self._weights.append((module, tuple(shape), check))

    def finish(self) -> None:
        """Report what needs all tensors: outliers among the same modules, emptied rows, copies."""
        position = {name: index for index, name in enumerate(self.checkpoint.entries)}
        self.report.findings.sort(key=lambda finding: position[finding.tensor or ""])
        self._weights.sort(key=lambda fact: position[f"{fact[0]}.weight"])
        self._sizes.sort(key=lambda fact: position[f"{fact[0]}.weight"])
        self._empty.sort(key=lambda fact: position[f"{fact[0]}.weight"])
        middles = {}
        kinds: dict[str, list[tuple[str, float]]] = defaultdict(list)
        for _, group, name, value in self._sizes:
            kinds[group].append((name, value))
        for group, members in kinds.items():
            middle = middles[group] = median(value for _, value in members)
            for name, value in members if len(members) >= _ENOUGH_MEMBERS else ():
                if not middle / _OUT_OF_LINE <= value <= middle * _OUT_OF_LINE:
                    self.doubt(
                        "value.out_of_line",
                        name,
                        f"its size is {value:.4g}, that of {len(members)} tensors of its kind {middle:.4g}",
                        "warning",
                    )
        for module, group, rows, scale in self._empty:
            usual = middles.get(group)
            if usual and usual / _LIKE_NEIGHBOURS <= scale <= usual * _LIKE_NEIGHBOURS:
                self.doubt(
                    "value.emptied",
                    f"{module}.weight",
                    f"{rows} rows are all zero, but have the scale {scale:.4g} of weights",
                )
        for first, second in self._copies():
            layer_of = self.checkpoint.config.spec.layer_of
            same_layer = layer_of(first) is not None and layer_of(first) == layer_of(second)
            level = "error" if same_layer else "warning"  # models are grown by repeating layers, not experts
            self.doubt("value.copy", f"{second}.weight", f"byte for byte that of {first}", level)

    def _copies(self) -> Iterator[tuple[str, str]]:
        """Find (module, its copy) by shape and checksum, then by bytes."""
        same: dict[tuple[tuple[int, ...], int], list[str]] = defaultdict(list)
        for module, shape, check in self._weights:
            same[shape, check].append(module)
        for first, *others in same.values():
            for other in others:
                pieces = (self.checkpoint.pieces(f"{module}.weight") for module in (first, other))
                if all(torch.equal(a, b) for a, b in zip(*pieces, strict=True)):
                    yield first, other


def _kind(name: str) -> str:
    return re.sub(r"\.\d+\.", ".N.", name)


def add_doubts(doubts: Report, report: Report) -> None:
    """Add the doubts to `report`, except those about tensors that match their source."""
    bad = {finding.tensor for finding in report.findings if finding.id == "against.mismatch"}
    rows = report.errors_by_tensor or ()
    proven = {row.module for row in rows if row.module not in bad and f"{row.module}.weight" not in bad}
    for finding in doubts.findings:
        module = (finding.tensor or "").rpartition(".")[0]
        if module not in proven and finding.tensor not in proven:
            report.findings.append(finding)
