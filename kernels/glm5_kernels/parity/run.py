"""Run the parity cases on every available implementation and compare with the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from glm5_kernels import registry
from glm5_kernels.contract import tensor_specs
from glm5_kernels.errors import UnsupportedVariantError
from glm5_kernels.int8 import LinearWeights
from glm5_kernels.paged_cache import PagedBatch, cache_rows, physical_rows, query_layout
from glm5_kernels.parity.cases import Case, cases
from glm5_kernels.parity.compare import Difference, Tolerance, compare_selection, compare_values
from glm5_kernels.w4a8_moe import ExpertWeights


@dataclass(frozen=True)
class ParityRow(Difference):
    """One output of one implementation compared with the reference.

    `skipped` says why an implementation does not support this variant; then nothing was compared.
    """

    op: str
    variant: str
    implementation: str
    output: str
    allowed: str = ""
    skipped: str = ""


def parity(
    device: str = "cpu", ops: tuple[str, ...] = (), seed: int = 0, kernels: tuple[str, ...] = ()
) -> Iterator[ParityRow]:
    """Yield rows in the order of the cases.

    Args:
        device: where the implementations under test run; the reference runs on the CPU.
        ops, kernels: only these ops and implementations; all if empty.
    """
    kind = torch.device(device).type
    for case in cases(seed, ops):
        runnable = [name for name in registry.OPS[case.op] if registry.obstacle(case.op, name, kind) is None]
        others = [name for name in runnable if name != "reference" and name in (kernels or runnable)]
        if not others:
            continue
        want = results(case, "reference", "cpu")
        for implementation in others:
            names = case.op, case.variant, implementation
            try:
                got = results(case, implementation, device)
            except UnsupportedVariantError as error:
                yield ParityRow(True, "", 0.0, 0.0, *names, "-", skipped=str(error))
                continue
            except Exception as error:  # a failing implementation is a result, not the end of the suite
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                yield ParityRow(False, text, math.inf, math.inf, *names, "-")
                continue
            yield from judge(case, implementation, got, want)


def judge(case: Case, implementation: str, got: list[Any], want: list[Any]) -> Iterator[ParityRow]:
    def row(output: str, difference: Difference, allowed: str) -> ParityRow:
        names: dict[str, Any] = {"op": case.op, "variant": case.variant, "implementation": implementation}
        return ParityRow(**vars(difference), **names, output=output, allowed=allowed)

    if case.gap is not None:
        difference = compare_selection(got[0], want[0], _scores(case), case.gap)
        yield row("positions", difference, f"swaps within {case.gap:g} of the last selected score")
        return
    for (name, tolerance), a, b in zip(case.outputs, got, want, strict=True):
        yield row(name, compare_values(torch.as_tensor(a), torch.as_tensor(b), tolerance), _text(tolerance))


def _text(tolerance: Tolerance) -> str:
    if not tolerance.absolute and not tolerance.relative:
        return tolerance.reason
    norm = f", {tolerance.norm:.1e} in all" if tolerance.norm < math.inf else ""
    return f"{tolerance.absolute:.1e} + {tolerance.relative:.1e}{norm}: {tolerance.reason}"


def results(case: Case, implementation: str, device: str) -> list[Any]:
    """The op's outputs and the arguments that it wrote; the case's own arguments are copied first."""
    arguments = [copied(argument, device) for argument in case.arguments]
    output = registry.load(case.op, implementation)(*arguments)
    outputs = list(output) if isinstance(output, tuple) else [] if output is None else [output]
    return outputs + [arguments[spec.number] for spec in tensor_specs(registry.contract(case.op)) if spec.written]


def copied(value: Any, device: str) -> Any:
    """A copy of an operand on a device, with its strides."""
    if isinstance(value, LinearWeights | PagedBatch):
        return type(value)(*[copied(field, device) for field in value])
    if isinstance(value, ExpertWeights):
        return ExpertWeights([copied(block, device) for block in value.blocks])
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_contiguous():
        return value.to(device, copy=True)
    whole = torch.empty(*value.shape[:-1], value.stride(-2), dtype=value.dtype, device=device)
    view = whole[..., : value.shape[-1]]
    view.copy_(value)
    return view


def _scores(case: Case) -> list[torch.Tensor]:
    """fp64 scores of all visible positions for each query token of an indexer case."""
    operands = registry.contract(case.op)(*case.arguments)
    q, cache, weights, *scales = (x for x in operands if isinstance(x, torch.Tensor))
    batch, pool = operands.batch, getattr(operands, "pool", 1)
    request, visible = query_layout(batch, len(q))
    scores = []
    for token in range(len(q)):
        positions = torch.arange(max(int(visible[token]), 0) // pool)
        rows = physical_rows(positions[None], batch.block_table[request[token]][None], cache.shape[1])[0]
        keys = cache_rows(cache, rows).double()
        dots, factor = q[token].double() @ keys.T, torch.ones(1, dtype=torch.float64)
        if scales:
            dots = dots * scales[0][token].double()[:, None]
            factor = cache_rows(scales[1][..., None], rows).double()[:, 0]
        score = (weights[token].double()[:, None] * torch.relu(dots)).sum(0) * factor
        opened = torch.full((max(int(visible[token]), 0) % pool,), torch.inf)
        scores.append(torch.cat([score.repeat_interleave(pool), opened]))
    return scores
