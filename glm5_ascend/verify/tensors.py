"""Every tensor that config.json and the schemes require exists with its dtype and shape, and no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import torch

from glm5_ascend.checkpoint.checks.loaded_checkpoint import FLOATS, LoadedCheckpoint, check_stated_dtype
from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.schemes import FLOAT, W4A8_DYNAMIC, W8A8, Stored, stored_tensors
from glm5_ascend.checkpoint.shards import dtype_name
from glm5_ascend.checkpoint.types import ROT_NAME
from glm5_ascend.model.spec import Linear

#: Not stored by msModelSlim under static W8A8; the engine then never reads them. Ours stores them for all or none.
_OPTIONAL_STATIC = ("weight_scale", "weight_offset")
_AGAIN = "quantize again, or copy the checkpoint again"


def check_tensors(checkpoint: LoadedCheckpoint, schemes: dict[str, str], report: Report) -> set[str]:
    """Compare stored tensors with required ones; return the complete modules (for norms: tensor names)."""
    static = [module for module, scheme in schemes.items() if scheme == W8A8]
    stored = {s: sum(f"{module}.{s}" in checkpoint.entries for module in static) for s in _OPTIONAL_STATIC}
    checker = _StoredTensors(checkpoint, report, {s for s, count in stored.items() if 2 * count <= len(static)})
    size = checkpoint.config.sizes
    complete: set[str] = set()
    for prefix, weight in checkpoint.config.all_weights():
        module, shape = prefix + weight.name, weight.shape(size)
        scheme = schemes[module] if isinstance(weight, Linear) else FLOAT
        if scheme == FLOAT:
            if checker.floating(prefix + weight.tensor_name, shape):
                complete.add(module if isinstance(weight, Linear) else prefix + weight.tensor_name)
        elif checker.linear(module, scheme, (shape[0], shape[1])):
            complete.add(module)
    _check_unexpected(checkpoint, checker.expected | {ROT_NAME}, report)
    _check_mixed(checkpoint, checkpoint.entries.keys(), {torch.bfloat16, torch.float16}, report)
    check_stated_dtype(checkpoint, report)
    if static:
        _check_float16(checkpoint, report)
    return complete


class _StoredTensors:
    """Compares stored tensors with demanded ones, and collects the names of the demanded ones in `expected`."""

    def __init__(self, checkpoint: LoadedCheckpoint, report: Report, optional_static: set[str]) -> None:
        self.checkpoint, self.report, self.optional_static = checkpoint, report, optional_static
        self.expected: set[str] = set()

    def linear(self, module: str, scheme: str, shape: tuple[int, int]) -> bool:
        """Return True if a quantized linear of logical `shape` [N, K] is complete; report what is not."""
        demanded = stored_tensors(scheme, shape, module)
        good = True
        for stored in demanded:
            name = f"{module}.{stored.suffix}"
            if scheme == W8A8 and stored.suffix in self.optional_static and name not in self.checkpoint.entries:
                self.expected.add(name)
                continue
            good &= self._stored(name, scheme, shape, stored)
        return good

    def _stored(self, name: str, scheme: str, shape: tuple[int, int], stored: Stored) -> bool:
        allowed: tuple[torch.dtype, ...] = (stored.dtype,)
        if stored.suffix == "deq_scale":
            allowed = (torch.float32, torch.int64)  # int64 holds the fp32 bits, for an engine running in float16
        hint = ""
        if scheme == W4A8_DYNAMIC and stored.suffix == "weight":
            entry = self.checkpoint.entries.get(name)
            if entry is not None and entry.shape == shape:
                hint = ": INT4 is not packed (two output rows per byte)"
            elif entry is not None and entry.shape == (shape[0], shape[1] // 2):
                hint = ": INT4 is packed along the input axis, the engine expects two output rows per byte"
        if stored.suffix == "scale_bias":
            hint = ": the engine would broadcast it silently"
        return self._check(name, allowed, stored.shape, hint)

    def floating(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return True if a float tensor of this shape exists; report it if not."""
        return self._check(name, FLOATS, shape, "")

    def _check(self, name: str, allowed: tuple[torch.dtype, ...], shape: tuple[int, ...], hint: str) -> bool:
        self.expected.add(name)
        entry = self.checkpoint.entries.get(name)
        if entry is None:
            if name not in self.checkpoint.unreadable:
                why = "not found; the engine would run with uninitialised memory"
                self.report.error("tensor.missing", why, tensor=name, fix=_AGAIN)
            return False
        if entry.dtype not in allowed:
            why = f"stored as {dtype_name(entry.dtype)}, expected {' or '.join(map(dtype_name, allowed))}"
            self.report.error("tensor.dtype", why, tensor=name, fix=_AGAIN)
        if entry.shape != shape:
            why = f"shape {list(entry.shape)}, expected {list(shape)}{hint}"
            self.report.error("tensor.shape", why, tensor=name, fix=_AGAIN)
        return entry.dtype in allowed and entry.shape == shape


def _check_unexpected(checkpoint: LoadedCheckpoint, expected: set[str], report: Report) -> None:
    for name in sorted(checkpoint.entries.keys() - expected):
        if name.startswith(checkpoint.config.absent_indexers):
            why = "this layer shares its indexer: the tensor is dropped by the engine"
            report.warning("tensor.shared_indexer", why, tensor=name, fix="check indexer_types in config.json")
        else:
            fix = "renamed, or left over from another run: " + _AGAIN
            report.error("tensor.unexpected", "no module of this model reads it", tensor=name, fix=fix)


def _check_mixed(
    checkpoint: LoadedCheckpoint, names: Collection[str], dtypes: set[torch.dtype], report: Report
) -> bool:
    """Report the rarer of several dtypes that exclude each other; return True if there was one.

    bf16 bits read as fp16 are other finite numbers: the lie of a header that no value gives away.
    """
    count = Counter(checkpoint.entries[name].dtype for name in names if checkpoint.entries[name].dtype in dtypes)
    usual = min(count, key=lambda dtype: (-count[dtype], str(dtype)), default=None)
    for name in names:
        dtype = checkpoint.entries[name].dtype
        if usual is not None and dtype in count and dtype is not usual:
            why = f"stored as {dtype_name(dtype)}, {count[usual]} as {dtype_name(usual)}"
            report.error("tensor.dtype", why, tensor=name, fix=_AGAIN)
    return len(count) > 1


def _check_float16(checkpoint: LoadedCheckpoint, report: Report) -> None:
    """An engine running in float16 keeps deq_scale in an int64 parameter; copying fp32 into it gives zeros."""
    stated = checkpoint.raw.get("dtype", checkpoint.raw.get("torch_dtype"))
    names = [name for name in checkpoint.entries if name.endswith(".deq_scale")]
    if _check_mixed(checkpoint, names, {torch.float32, torch.int64}, report):
        return
    expected = torch.int64 if stated == "float16" else torch.float32
    others = {checkpoint.entries[name].dtype for name in names} & {torch.float32, torch.int64} - {expected}
    for dtype in others:  # other dtypes were reported with their tensor
        # For a float16 source this tool stores float32, which is right for bfloat16, in which GLM-5 is served.
        say = report.error if expected is torch.float32 else report.warning
        say(
            "tensor.deq_scale_dtype",
            f"deq_scale is {dtype_name(dtype)}, an engine running in {stated} expects {dtype_name(expected)}",
            file="config.json",
            fix=f"serve with --dtype {'bfloat16' if dtype is torch.float32 else 'float16'}",
        )
