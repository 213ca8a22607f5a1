"""Every weight against its source, one linear at a time."""

from __future__ import annotations

from dataclasses import replace

import torch

from glm5_ascend.checkpoint.output import PROVENANCE_NAME
from glm5_ascend.checkpoint.schemes import FLOAT, W4A8_DYNAMIC, dequantize, integer_weight
from glm5_ascend.checkpoint.source import SourceCheckpoint
from glm5_ascend.errors import CheckpointError
from glm5_ascend.model import structure
from glm5_ascend.model.json_file import read_json_object
from glm5_ascend.model.structure import Linear, Subgraph, Vector, source_rows
from glm5_ascend.verify.derived_tensors import read_linear
from glm5_ascend.verify.description import ROT_NAME
from glm5_ascend.verify.expected_weight import Reference, Unrotated, find_basis, moved_scale, silent_scale
from glm5_ascend.verify.loaded_checkpoint import Contents
from glm5_ascend.verify.report import Report, WeightError
from glm5_ascend.verify.tolerances import LIMITS, Comparison

#: Keys that libraries rewrite when they save a config.
_FREE_KEYS = {"transformers_version", "dtype", "torch_dtype", "_name_or_path", "quantization_config"}


def compare(
    contents: Contents,
    source: SourceCheckpoint,
    types: dict[str, str],
    complete: set[str],
    record: dict[str, object],
    q: torch.Tensor | None,
    report: Report,
) -> None:
    """Fill `report.errors_by_tensor` and report what does not match."""
    report.errors_by_tensor = []
    if not _check_config(contents, source, report):
        return
    basis = find_basis(contents, record, q, report)
    if basis is None:
        report.warning(
            "against.skipped",
            "rotated, but neither provenance nor global_rotation says how: nothing was compared",
            file="optional/quarot.safetensors",
            fix="copy the whole output directory",
        )
        return
    compare_weights(contents, Reference(source, contents, basis), types, complete, report)
    if q is not None and ROT_NAME in contents.entries and not isinstance(basis, Unrotated):
        _check_rot(contents, source, q, report)


def compare_weights(
    contents: Contents, reference: Reference, types: dict[str, str], complete: set[str], report: Report
) -> None:
    """Every weight, as far as its tensors are `complete`, with its reference."""
    report.errors_by_tensor = []
    walk = _Walk(contents, reference, types, complete, report)
    for part in structure.GLOBAL:
        walk.part("", part)
    for layer in range(contents.config.num_layers_with_mtp):
        walk.layer(layer)
    if {ROT_NAME} <= contents.entries.keys() & reference.source.files.entries.keys():  # a source has none
        walk.as_it_is(ROT_NAME)
    walk.close()


def _check_config(contents: Contents, source: SourceCheckpoint, report: Report) -> bool:
    """False if the sizes differ: then nothing can be compared."""
    theirs = read_json_object(source.directory / "config.json")
    ours, missing = contents.raw, object()
    changed = sorted(
        k for k in (theirs.keys() | ours.keys()) - _FREE_KEYS if theirs.get(k, missing) != ours.get(k, missing)
    )
    if changed:
        report.error(
            "against.config",
            f"differs from the source's in {', '.join(changed[:8])}",
            file="config.json",
            fix="copy the source's config.json, without quantization_config",
        )
    ours_as_theirs = replace(
        contents.config, path=source.config.path, quantization_config=source.config.quantization_config
    )
    return ours_as_theirs == source.config


def _check_rot(contents: Contents, source: SourceCheckpoint, q: torch.Tensor, report: Report) -> None:
    stored = contents.read(ROT_NAME).float()
    if stored.shape != q.shape:
        return  # reported by check_mtp
    wanted = q.T @ (source.read("model.norm.weight")[:, None] * q)
    error = float((stored - wanted).norm() / wanted.norm())
    if not error <= LIMITS[FLOAT]:
        report.error(
            "against.mismatch",
            f"is not Q^T diag(g) Q of the source's final norm: relative error {error:.3f}",
            tensor=ROT_NAME,
            file=contents.file_of[ROT_NAME],
            fix="quantize again",
        )


class _Walk:
    def __init__(
        self, contents: Contents, reference: Reference, types: dict[str, str], complete: set[str], report: Report
    ) -> None:
        self.contents, self.reference, self.types = contents, reference, types
        self.complete, self.report = complete, report
        self.skipped: list[str] = []
        self._pairs: dict[str, Subgraph] = {}  # by source module, of the layer at hand
        self._scales: dict[str, torch.Tensor | None] = {}  # by target module; None: its source could not be compared
        self._silent: dict[str, torch.Tensor] = {}  # by target module: bool [K], columns whose input is always zero

    def layer(self, layer: int) -> None:
        config, prefix = self.contents.config, structure.layer_prefix(layer)
        self._start(prefix, structure.subgraphs(config, layer))
        for part in structure.backbone(config, layer):
            self.part(prefix, part)
        for expert in range(config.n_routed_experts if config.is_moe(layer) else 0):
            self._start(prefix, (structure.expert_subgraph(expert),))
            for part in structure.expert_linears(expert):
                self.part(prefix, part)

    def _start(self, prefix: str, subgraphs: tuple[Subgraph, ...]) -> None:
        moved = [subgraph for subgraph in subgraphs if subgraph.kind != "norm-linear"]
        self._pairs = {prefix + subgraph.source: subgraph for subgraph in moved}
        self._scales = {prefix + target: None for subgraph in moved for target in subgraph.targets}
        self._silent = {}

    def part(self, prefix: str, part: Linear | Vector) -> None:
        module = prefix + part.name
        try:
            if isinstance(part, Linear):
                self._linear(prefix, part, module)
            elif part.role != "norm":  # norms take part in the linears that read them
                self.as_it_is(prefix + structure.tensor_name(part))
        except CheckpointError as error:
            self.report.error("shard.damaged", error.message, tensor=module, fix=error.tip)

    def as_it_is(self, name: str) -> None:
        """A tensor that no rotation and no smoothing changes."""
        if name in self.complete or name == ROT_NAME:
            comparison, found = Comparison(), self.contents.read(name).float()
            comparison.add(torch.atleast_2d(found), torch.atleast_2d(self.reference.source.read(name)))
            self._record(name, FLOAT, comparison)

    def _linear(self, prefix: str, part: Linear, module: str) -> None:
        needed = {module, *(f"{prefix}{norm}.weight" for norm in part.norm)}
        scale = self._scales.get(module, torch.ones(1))
        if not needed <= self.complete:
            return  # reported by the checks before
        if scale is None or not self.reference.basis.knows(part):
            self.skipped.append(module)
            return
        kind = self.types[module]
        stored = clipped = None
        if kind != FLOAT:
            tensors = read_linear(self.contents, module, kind)
            stored = dequantize(kind, tensors)
            clipped = integer_weight(kind, tensors).abs() >= 7 if kind == W4A8_DYNAMIC else None
        comparison = Comparison()
        # Embedding and heads are float and have no partner: only they are too large to be held whole.
        whole = stored is not None or module in self._pairs
        for first, last, wanted in self.reference.rows(prefix, part, whole):
            found = self._float_rows(module, first, last) if stored is None else stored
            if module in self._pairs:
                self._undo(prefix, self._pairs[module], wanted, found)
            wanted.mul_(scale)
            if module in self._silent:
                silent = self._silent[module]
                wanted[:, silent] *= silent_scale(wanted[:, silent], found[:, silent])
            comparison.add(found, wanted, clipped)
        self._record(module, kind, comparison)

    def _float_rows(self, module: str, first: int, last: int) -> torch.Tensor:
        name = f"{module}.weight"
        rows, columns = self.contents.entries[name].shape
        if last - first == rows:
            return self.contents.read(name).float()
        return self.contents.span(name, first * columns, last * columns).reshape(-1, columns).float()

    def _undo(self, prefix: str, pair: Subgraph, wanted: torch.Tensor, found: torch.Tensor) -> None:
        """Multiply the rows of `found` by the scale that was moved out of them, as the targets' references will be.

        Not `wanted` divided by it: a channel that hardly matters can have a scale so small that its row would outweigh
        all others in every column.
        """
        chosen = source_rows(self.contents.config, pair)
        rows = torch.arange(len(wanted)) if chosen is None else torch.tensor(chosen)
        scale = moved_scale(wanted[rows], found[rows])
        silent = ~found[rows].any(1)
        found[rows] *= scale[:, None]
        self._scales |= {prefix + target: scale for target in pair.targets}
        if bool(silent.any()):
            self._silent |= {prefix + target: silent for target in pair.targets}

    def _record(self, module: str, kind: str, comparison: Comparison) -> None:
        verdict = comparison.judge(kind)
        assert self.report.errors_by_tensor is not None
        self.report.errors_by_tensor.append(
            WeightError(module, kind, verdict.whole, verdict.row_error, verdict.whole_limit)
        )
        if not verdict.ok:
            name = f"{module}.weight" if f"{module}.weight" in self.contents.entries else module
            self.report.error(
                "against.mismatch",
                f"does not match {self.report.against}: {verdict}",
                tensor=name,
                file=self.contents.file_of[name],
                fix="scales, nibble order, rotation or the weight itself are wrong: quantize again",
            )

    def close(self) -> None:
        if self.skipped:
            self.report.warning(
                "against.skipped",
                f"{len(self.skipped)} linears could not be compared, their rotation is not stored (no provenance): "
                f"{', '.join(self.skipped[:3])}, ...",
                file=PROVENANCE_NAME,
                fix="only checkpoints written by glm5-ascend carry the seed of all rotations",
            )
