"""A plan as text for a terminal, and as one JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from glm5_ascend.plan.efficiency import fitted
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.profile import commands, profile_of
from glm5_ascend.plan.result import Plan, Range

_GB = 1e9


def span(number: Range, scale: float = 1.0, digits: int = 0) -> str:
    """`12 (10 to 14)`, or the number alone if it has no range."""
    value, low, high = (f"{scale * x:,.{digits}f}" for x in (number.value, number.low, number.high))
    return value if low == high else f"{value} ({low} to {high})"


def lines(plan: Plan, simulated: Mapping[str, float] | None = None) -> Iterator[str]:
    """The report of a terminal; `simulated` is what tails.py found."""
    n, w, cluster = plan.numbers, plan.workload, plan.cluster
    hit = f", {100 * w.prefix_hit:.0f} % of the prompt cached" if w.prefix_hit else ""
    machines = f"{cluster.nodes} x {cluster.hardware.title} ({cluster.dies} dies)"
    yield f"{plan.model.name} {plan.model.quantization} on {machines}"
    run = f", a run of {w.requests}" if w.requests else ""
    rate = f", at most {w.rate:g} per second" if w.rate else ""
    yield f"workload  {w.prompt} in, {w.output} out, {w.concurrency:g} at a time{rate}{run}{hit}"
    yield f"layout    {plan.chosen.layout}"
    yield ""
    yield from _memory(plan)
    yield ""
    yield f"tokens/s  {span(n['output_tokens_per_s'])} output tokens, all requests  [{n['output_tokens_per_s'].basis}]"
    yield f"TPOT      {span(n['tpot_ms'], digits=1)} ms  [{n['tpot_ms'].basis}]"
    yield f"TTFT      {span(n['ttft_ms'])} ms  [{n['ttft_ms'].basis}; no public number tests it alone]"
    if "cost_per_million_output_tokens" in n:
        yield f"cost      {span(n['cost_per_million_output_tokens'], digits=3)} per million output tokens"
    if simulated:
        how = "simulated, with lengths spread by half" if w.requests is None else "simulated, this run"
        for name, key, scale, unit in (("TPOT", "tpot", 1e3, "ms"), ("TTFT", "ttft", 1e3, "ms")):
            values = ", ".join(f"p{share} {scale * simulated[f'{key}_p{share}']:,.0f}" for share in (50, 90, 99))
            yield f"tails     {name} {values} {unit}  [{how}]"
    yield f"limits    {_limits(plan)}"
    if not plan.within_slo:
        yield "SLO       not met by any layout found; this one comes closest"
    for note in plan.notes:
        yield f"note      {note}"
    for reason in plan.extrapolated:
        yield f"beyond    {reason}: band widened"
    yield ""
    if plan.others:
        yield "next best layouts                                        tokens/s   TPOT ms   TTFT ms"
        for other in plan.others[:4]:
            q = other.prediction
            yield f"  {other.layout!s:<52} {q.output_per_second:10,.0f} {1e3 * q.tpot:9.1f} {1e3 * q.ttft:9,.0f}"
        yield ""
    yield from commands(plan)
    yield ""
    yield from basis(plan)


def _memory(plan: Plan) -> Iterator[str]:
    n, held = plan.numbers, plan.chosen.prediction.memory
    yield f"checkpoint          {span(n['weight_bytes_total'], 1 / _GB, 1)} GB  [{n['weight_bytes_total'].basis}]"
    yield f"memory of one die   {held.total / _GB:.1f} GB, of which the engine may use {held.usable / _GB:.1f}"
    for name, nbytes in held.weights.items():
        yield f"  {name:<24} {nbytes / _GB:6.2f} GB  [derived]"
    for name, amount in held.parts.items():
        if name != "weights" and amount:
            known = "derived" if name in ("MLAPO copies", "activations") else "guessed"
            yield f"  {name:<24} {amount / _GB:6.2f} GB  [{known}]"
    yield f"  {'left for the cache':<24} {span(n['kv_budget_bytes_per_die'], 1 / _GB, 1)} GB"
    yield f"cache of a token    {n['kv_bytes_per_token'].value:,.0f} bytes  [derived]"
    yield f"longest context     {span(n['max_context_tokens'])} tokens"
    yield f"requests that fit   {span(n['max_concurrency'])} of this size"


def _limits(plan: Plan) -> str:
    p = plan.chosen.prediction
    total = sum(p.by_limit.values())
    largest = sorted(p.by_limit.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {100 * seconds / total:.0f} %" for name, seconds in largest)
    bound = {
        "decode": "decode steps", "prefill": "prefill", "memory": "cache memory", "arrivals": "requests arriving",
    }[p.bound]  # fmt: skip
    return f"throughput by {bound}; a decode step of {1e3 * p.step_seconds:.0f} ms: {shares}"


def basis(plan: Plan) -> Iterator[str]:
    """What the words in brackets mean, in full."""
    yield "measured: read from the checkpoint or this machine. derived: arithmetic on the model and the machine's data."
    if plan.cluster.hardware.efficiencies is None:
        data = fitted()
        yield (
            f"fitted: six efficiencies, on {len(data.fitted_on)} public results; median error for results not seen"
            f" {100 * data.median_error:.0f} %."
        )
    yield "guessed: no public number exists; the range says how far off it may be. We have run none of this on an NPU."


def to_json(plan: Plan, simulated: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The same as one object; sizes in bytes, times in ms (of `simulated`: in seconds)."""
    layout, p = plan.chosen.layout, plan.chosen.prediction
    decode: dict[str, Any] = _engine(layout.decode)
    pd = None if layout.prefill is None else {"prefill": _engine(layout.prefill), "decode": _engine(layout.decode)}
    return {
        "schema_version": 1, "command": "plan", "ok": plan.within_slo, "exit_code": 0,
        "model": plan.model.name, "quantization": plan.model.quantization, "cache": plan.model.cache,
        "hardware": plan.cluster.hardware.name, "nodes": plan.cluster.nodes,
        **{name: number.to_json() for name, number in plan.numbers.items()},
        "layout": {**decode, "pd": pd, "replicas": layout.replicas},
        "bound": p.bound, "limited_by": p.limited_by,
        "decode_step_ms": {name: round(1e3 * s, 4) for name, s in p.by_op.items()},
        "memory_per_die": {"total": p.memory.total, "usable": p.memory.usable,
                           "parts": {k: round(v) for k, v in p.memory.parts.items()}, "weights": p.memory.weights},
        "slo_met": plan.within_slo, "extrapolated": plan.extrapolated, "notes": plan.notes,
        "others": [
            {"layout": str(c.layout), "output_tokens_per_s": round(c.prediction.output_per_second, 2),
             "tpot_ms": round(1e3 * c.prediction.tpot, 3), "ttft_ms": round(1e3 * c.prediction.ttft, 2)}
            for c in plan.others[:8]
        ],
        "profile": profile_of(plan), "command_lines": list(commands(plan)),
        "simulated": None if simulated is None else dict(simulated),
    }  # fmt: skip


def _engine(engine: Engine) -> dict[str, int]:
    return {"tp": engine.tp, "dp": engine.dp, "ep": engine.ep, "dcp": engine.dcp, "mtp": engine.drafts}
