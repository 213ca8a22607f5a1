"""Compare every weight with its source, one linear at a time in each thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint
from glm5_ascend.checkpoint.checks.report import Report, WeightError
from glm5_ascend.checkpoint.output import PROVENANCE_NAME
from glm5_ascend.checkpoint.schemes import FLOAT, W4A8_DYNAMIC, dequantize
from glm5_ascend.checkpoint.source import Source
from glm5_ascend.checkpoint.types import ROT_NAME
from glm5_ascend.checkpoint.workers import Workers, cores
from glm5_ascend.errors import CheckpointError
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.config_file import flat_keys, served_config
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.model.spec import Linear, Parameter, Subgraph, Weight
from glm5_ascend.verify.checked import Checked
from glm5_ascend.verify.derived_tensors import read_linear
from glm5_ascend.verify.expected_weight import (
    NO_ROTATION,
    Basis,
    ExpectedWeights,
    find_basis,
    moved_scale,
    silent_scale,
)
from glm5_ascend.verify.tolerances import LIMITS, WeightComparison

#: Keys that libraries rewrite when they save a config.
_FREE_KEYS = {"transformers_version", "dtype", "torch_dtype", "_name_or_path", "quantization_config"}
#: Prefix of the names, weights, and pairs between which a scale may have moved.
_Unit = tuple[str, tuple[Weight, ...], tuple[Subgraph, ...]]


def compare_source(checked: Checked, source: Source, report: Report) -> None:
    """Fill `report.errors_by_tensor` and report every weight that is not its source's."""
    report.errors_by_tensor = []
    if not _check_config(checked.checkpoint, source, report):
        return
    basis = find_basis(checked, report)
    if basis is None:
        report.warning(
            "against.skipped",
            "rotated, but neither provenance nor global_rotation says how: nothing was compared",
            file="optional/quarot.safetensors",
            fix="copy the whole output directory",
        )
        return
    expected = ExpectedWeights(source, checked.checkpoint, basis)

    def compare(unit: _Unit) -> _UnitComparison:
        prefix, weights, subgraphs = unit
        comparison = _UnitComparison(checked, expected, prefix, subgraphs, report)
        for weight in weights:
            comparison.compare(weight)
        return comparison

    skipped: list[str] = []
    with Workers(cores()) as workers:
        for comparison in workers.map(compare, _units(source.config)):
            report.findings += comparison.report.findings
            report.errors_by_tensor += comparison.errors
            skipped += comparison.skipped
    if skipped:
        report.warning(
            "against.skipped",
            f"{len(skipped)} linears could not be compared, their rotation is not stored (no provenance): "
            f"{', '.join(skipped[:3])}, ...",
            file=PROVENANCE_NAME,
            fix="only checkpoints written by glm5-ascend carry the seed of all rotations",
        )
    if checked.global_rotation is not None and basis is not NO_ROTATION and ROT_NAME in checked.checkpoint.entries:
        _check_rot(checked, source, basis, report)


def _units(config: ModelConfig) -> Iterator[_Unit]:
    """Weights that no scale leaves: what is in no layer, a layer without its routed experts, or one of these."""
    yield "", config.global_weights, ()
    for layer in range(config.num_layers_with_mtp):
        prefix = config.spec.layer_prefix(layer)
        yield prefix, config.backbone(layer), config.subgraphs(layer)
        for expert in range(config.n_routed_experts if config.is_moe(layer) else 0):
            yield prefix, config.spec.expert_linears(expert), config.spec.expert_subgraphs(expert)


def _check_config(checkpoint: LoadedCheckpoint, source: Source, report: Report) -> bool:
    """Compare config.json; return False if the sizes differ: then weights cannot be compared."""
    theirs = flat_keys(served_config(source.raw))
    ours, missing = checkpoint.raw, object()
    changed = sorted(
        k for k in (theirs.keys() | ours.keys()) - _FREE_KEYS if theirs.get(k, missing) != ours.get(k, missing)
    )
    if changed:
        why, fix = (
            f"differs from the source's in {', '.join(changed[:8])}",
            "copy the source's, without quantization_config",
        )
        report.error("against.config", why, file="config.json", fix=fix)
    ours_as_theirs = replace(
        checkpoint.config, path=source.config.path, quantization_config=source.config.quantization_config
    )
    return ours_as_theirs == source.config


def _check_rot(checked: Checked, source: Source, basis: Basis, report: Report) -> None:
    checkpoint, rotation = checked.checkpoint, checked.global_rotation
    assert rotation is not None
    stored = checkpoint.read(ROT_NAME).float()
    if stored.shape != rotation.shape:
        return  # reported by check_mtp
    gain = source.read(f"{source.config.spec.final_norm}.weight")
    # Where all signs are known it is much faster than products of matrices.
    expected = basis.mtp_rotation(gain) if isinstance(basis, Rotations) else rotation.T @ (gain[:, None] * rotation)
    error = float((stored - expected).norm() / expected.norm())
    if not error <= LIMITS[FLOAT]:
        why = f"is not Q^T diag(g) Q of the source's final norm: relative error {error:.3f}"
        report.error("against.mismatch", why, tensor=ROT_NAME, fix="quantize again")


class _UnitComparison:
    """Walks the weights of a unit in order: a moved scale is measured at its source linear and used at its targets."""

    def __init__(
        self,
        checked: Checked,
        expected: ExpectedWeights,
        prefix: str,
        subgraphs: tuple[Subgraph, ...],
        report: Report,
    ) -> None:
        self.checked, self.checkpoint, self.expected = checked, checked.checkpoint, expected
        self.report = Report(report.directory, report.against, file_of=report.file_of)
        self.errors: list[WeightError] = []
        self.skipped: list[str] = []
        self.prefix = prefix
        # The scale of norm-linear is in the stored norm.
        moved = [subgraph for subgraph in subgraphs if subgraph.kind != "norm-linear"]
        self._pairs = {self.prefix + subgraph.source: subgraph for subgraph in moved}
        #: By target module; None: its source could not be compared.
        self._scales: dict[str, torch.Tensor | None] = {
            self.prefix + target: None for subgraph in moved for target in subgraph.targets
        }
        self._silent: dict[str, torch.Tensor] = {}  # by target module: bool [K], columns whose input is always zero

    def compare(self, weight: Weight) -> None:
        """Compare one weight; an unreadable one is a finding."""
        module, name = self.prefix + weight.name, self.prefix + weight.tensor_name
        try:
            if isinstance(weight, Linear):
                self._linear(weight, module)
            elif isinstance(weight, Parameter):
                self._same_values(name)
            elif weight.role != "norm":  # norms are part of the linears that read them
                self.unchanged(name)
        except CheckpointError as error:
            self.report.error("shard.damaged", error.message, tensor=module, fix=error.tip)

    def unchanged(self, name: str) -> None:
        """Compare a tensor that rotation and smoothing do not change."""
        if name in self.checked.complete:
            comparison, tensor = WeightComparison(), self.checkpoint.read(name).float()
            comparison.add(torch.atleast_2d(tensor), torch.atleast_2d(self.expected.source.read(name)))
            self._record(name, FLOAT, comparison)

    def _same_values(self, name: str) -> None:
        """Compare a tensor that is carried over: every value, in any dtype that holds it."""
        if name not in self.checked.complete:
            return
        expected = self.expected.source.read(name).to(self.expected.source.dtype(name))
        if not torch.equal(self.checkpoint.read(name).float(), expected.float()):
            why = f"does not match {self.report.against}: it is carried over, so every value must be the source's"
            self.report.error("against.mismatch", why, tensor=name, fix="copy the checkpoint again, or quantize again")

    def _linear(self, linear: Linear, module: str) -> None:
        needed = {module, *(f"{self.prefix}{norm}.weight" for norm in linear.norm)}
        scale = self._scales.get(module, torch.ones(1))
        if not needed <= self.checked.complete:
            return  # already reported
        if scale is None or not self.expected.knows(linear):
            self.skipped.append(module)
            return
        scheme, pair, silent = self.checked.schemes[module], self._pairs.get(module), self._silent.get(module)
        selected = None if pair is None else self.checkpoint.config.source_rows(pair)
        tensors = read_linear(self.checkpoint, module, scheme, weight=False)
        comparison, moved = WeightComparison(), []
        for first, last, reference in self.expected.rows(self.prefix, linear, bool(selected) or silent is not None):
            weight, bound = self._stored_rows(module, scheme, tensors, first, last)
            if pair is not None:
                moved_rows = slice(None) if selected is None else torch.tensor(selected)
                moved.append(_undo(reference, weight, moved_rows))
                if bound is not None:
                    bound[moved_rows] *= moved[-1][0].abs()
            reference.mul_(scale)
            if silent is not None:
                reference[:, silent] *= silent_scale(reference[:, silent], weight[:, silent])
            comparison.add(weight, reference, bound)
        self._record(module, scheme, comparison)
        if pair is not None:
            scales, silences = (torch.cat(rows) for rows in zip(*moved, strict=True))
            self._scales |= {self.prefix + target: scales for target in pair.targets}
            if bool(silences.any()):
                self._silent |= {self.prefix + target: silences for target in pair.targets}

    def _stored_rows(
        self, module: str, scheme: str, tensors: dict[str, torch.Tensor], first: int, last: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Dequantized rows, fp32, and from which magnitude INT4 clips them; `tensors`: all but the weight."""
        packed = 2 if scheme == W4A8_DYNAMIC else 1
        rows = {suffix: tensor[first:last] if len(tensor) > 1 else tensor for suffix, tensor in tensors.items()}
        rows["weight"] = self.checkpoint.read_rows(f"{module}.weight", first // packed, last // packed)
        bound = 7 * rows["weight_scale"][:, 0].abs() if scheme == W4A8_DYNAMIC else None
        return dequantize(scheme, rows), bound

    def _record(self, module: str, scheme: str, comparison: WeightComparison) -> None:
        verdict = comparison.judge(scheme)
        self.errors.append(WeightError(module, scheme, verdict.whole, verdict.row_error, verdict.whole_limit))
        if not verdict.ok:
            name = f"{module}.weight" if f"{module}.weight" in self.checkpoint.entries else module
            fix = "scales, nibble order, rotation or the weight itself are wrong: quantize again"
            self.report.error(
                "against.mismatch", f"does not match {self.report.against}: {verdict}", tensor=name, fix=fix
            )


def _undo(
    reference: torch.Tensor, weight: torch.Tensor, rows: slice | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply `rows` of `weight` by the scale that was moved out of them, as the targets' references will be.

    `reference` is not divided by it: an unimportant channel can have a scale so small that its row would dominate every
    column. Returns the scale, and which rows are all zero.
    """
    scale, silent = moved_scale(reference[rows], weight[rows]), ~weight[rows].any(1)
    weight[rows] *= scale[:, None]
    return scale, silent
