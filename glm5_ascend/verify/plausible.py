"""Numbers that are possible, but that no quantization of a trained model leaves: doubts, where no source can tell.

A doubt is an error, for an engine would serve garbage without a word; a comparison with the source that a tensor
passes takes its doubts back (`settle`). Every limit states its reason. "Good outputs" are all stock recipes on the tiny
and the demo model (bf16, float16, float32 and FP8 sources, GLM-5.2's layers), and msModelSlim's W4A8 and W8A8.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint
from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.schemes import W4A8_DYNAMIC
from glm5_ascend.verify.copies import Copies, checksum

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


@dataclass
class Doubts:
    """Collects doubts over the tensors of one checkpoint; `finish` adds those that need all of them.

    Attributes:
        report: the doubts themselves, apart from what is certain.
        empty_floats: names of float weights that are all zero.
    """

    checkpoint: LoadedCheckpoint
    report: Report = field(default_factory=lambda: Report(Path()))
    empty_floats: set[str] = field(default_factory=set)
    _copies: Copies = field(default_factory=Copies)
    _sizes: dict[str, list[tuple[str, float]]] = field(default_factory=lambda: defaultdict(list))  # by kind
    _empty: list[tuple[str, str, int, float]] = field(default_factory=list)  # tensor, kind, rows, their scale

    def doubt(self, id: str, name: str, message: str, level: str = "error") -> None:
        """Report something about the tensor `name`."""
        say = self.report.error if level == "error" else self.report.warning
        say(id, message, tensor=name, file=self.checkpoint.file_of.get(name), fix=_SOURCE)

    def linear(self, module: str, scheme: str, integers: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """One quantized linear: integers int8 [N, K], and its stored tensors by suffix, finite, of the right shapes."""
        name, high, low = f"{module}.weight", integers.amax(1).short(), integers.amin(1).short()
        top = torch.maximum(high, -low)
        self._rows(name, scheme, high, low, top)
        self._lowest(name, integers, low)
        kind, filled = _kind(module) + scheme, top > 0
        scale = tensors.get("weight_scale")
        held = tensors["deq_scale"] / tensors["input_scale"] if scale is None else scale.flatten()
        stored = f"{module}.{'deq_scale' if scale is None else 'weight_scale'}"
        if bool(filled.any()):
            middle, largest = float(held[filled].median()), float(held[filled].max())
            self._sizes[kind].append((stored, middle))
            if largest > _OUT_OF_LINE * middle > 0:
                row = int(torch.where(filled, held, 0).argmax())
                self.doubt(
                    "value.scale_range", stored, f"row {row} has scale {largest:.4g}, the median is {middle:.4g}"
                )
            self.copy_of(module, tensors["weight"].shape, checksum(tensors["weight"]))
        if not bool(filled.all()):
            empty = held[~filled & (held != 1)]
            if len(empty):
                self._empty.append((name, kind, len(empty), float(empty.median())))

    def _rows(self, name: str, scheme: str, high: torch.Tensor, low: torch.Tensor, top: torch.Tensor) -> None:
        """Constant rows, and rows that leave out most of the range; high, low, top: int16 [N]."""
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

    def _lowest(self, name: str, integers: torch.Tensor, low: torch.Tensor) -> None:
        """Too many -128: clipped twice, or a pattern; low: int16 [N]."""
        rows = low == -128
        count = int(rows.sum())
        if not count:
            return
        worst = float((integers[rows] == -128).sum(1).max())
        if worst > max(_LOWEST_IN_ROW * integers.shape[1], 2) or (
            len(low) >= _ENOUGH_ROWS and count > _LOWEST_ROWS * len(low)
        ):
            self.doubt(
                "value.range", name, f"-128 in {count} of {len(low)} rows, up to {int(worst)} times in one: saturated"
            )

    def size(self, name: str, mean: float) -> None:
        """The mean magnitude of a FLOAT weight, to be compared with others of its kind."""
        self._sizes[_kind(name)].append((name, mean))

    def copy_of(self, module: str, shape: tuple[int, ...], check: int) -> None:
        """Remember a weight by its checksum; an MTP layer is made from others, and shares their embedding and head."""
        if not any(module.startswith(self.checkpoint.config.spec.layer_prefix(layer)) for layer in self._mtp):
            self._copies.add(module, shape, check)

    @property
    def _mtp(self) -> range:
        config = self.checkpoint.config
        return range(config.num_hidden_layers, config.num_layers_with_mtp)

    def finish(self) -> None:
        """What only shows when all tensors are known: tensors out of line, emptied rows, copies."""
        middles = {}
        for kind, members in self._sizes.items():
            middle = middles[kind] = median(value for _, value in members)
            for name, value in members if len(members) >= _ENOUGH_MEMBERS else ():
                if not middle / _OUT_OF_LINE <= value <= middle * _OUT_OF_LINE:
                    self.doubt(
                        "value.out_of_line",
                        name,
                        f"its size is {value:.4g}, that of {len(members)} tensors of its kind {middle:.4g}",
                        "warning",
                    )
        for name, kind, rows, scale in self._empty:
            usual = middles.get(kind)
            if usual and usual / _LIKE_NEIGHBOURS <= scale <= usual * _LIKE_NEIGHBOURS:
                self.doubt(
                    "value.emptied", name, f"{rows} rows are all zero, but have the scale {scale:.4g} of weights"
                )
        for first, second in self._copies.found(self.checkpoint):
            same_layer = first.split(".")[:3] == second.split(".")[:3]
            level = "error" if same_layer else "warning"  # models are grown by repeating layers, not experts
            self.doubt("value.copy", f"{second}.weight", f"byte for byte that of {first}", level)


def _kind(name: str) -> str:
    """A name without its numbers: the same module of other layers and experts."""
    return re.sub(r"\.\d+\.", ".N.", name)


def settle(doubts: Report, report: Report) -> None:
    """Add the doubts to `report`; of tensors that match their source only what no comparison covers."""
    bad = {finding.tensor for finding in report.findings if finding.id == "against.mismatch"}
    rows = report.errors_by_tensor or ()
    proven = {row.module for row in rows if row.module not in bad and f"{row.module}.weight" not in bad}
    for finding in doubts.findings:
        module = (finding.tensor or "").rpartition(".")[0]
        if module not in proven and finding.tensor not in proven:
            report.findings.append(finding)
