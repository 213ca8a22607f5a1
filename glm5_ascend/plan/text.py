"""A plan as text for a terminal, and as one JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from glm5_ascend.plan.efficiency import fitted
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.result import Plan, PlanCommands, Range
from glm5_ascend.plan.spending import COST_INPUT, COST_OUTPUT, COST_TOTAL, ENERGY, TOKENS_PER_KWH
from glm5_ascend.report.terminal import STYLES
from glm5_ascend.report.terminal import show as show_rows

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    Rows = Iterator[tuple[str | Text, ...]]

_GB = 1e9
NO_COMMANDS = PlanCommands()
#: Unpublished parts of a die's memory; all others follow from sizes and vllm-ascend's code.
GUESSED = ("graphs", "communication buffers", "PD transfer", "margin")


def span(number: Range, scale: float = 1.0, digits: int = 0) -> str:
    """`12 (10 to 14)`, or the number alone if it has no range."""
    value, low, high = (f"{scale * x:,.{digits}f}" for x in (number.value, number.low, number.high))
    return value if low == high else f"{value} ({low} to {high})"


def lines(
    plan: Plan, simulated: Mapping[str, float] | None = None, width: int = 80, commands: PlanCommands = NO_COMMANDS
) -> list[str]:
    """The lines of `show` for a terminal of `width` columns."""
    from io import StringIO

    from rich.console import Console

    text = StringIO()
    show(plan, simulated, Console(file=text, width=width, highlight=False), commands)
    return text.getvalue().splitlines()


def show(
    plan: Plan, simulated: Mapping[str, float] | None, console: Console, commands: PlanCommands = NO_COMMANDS
) -> None:
    """Print the report; `simulated`: percentiles by tails.py. Commands are not wrapped, so that they can be copied."""
    cluster = plan.cluster
    machines = f"{cluster.nodes} x {cluster.hardware.title} ({cluster.dies} dies)"
    show_rows([(f"{plan.model.name} {plan.model.quantization} on {machines}",)], console)
    show_rows(_request(plan), console)
    for rows in (_memory(plan), [*_speed(plan, simulated), *_remarks(plan)]):
        console.print()
        show_rows(rows, console)
    console.print()
    if plan.others:
        show_rows(_others(plan), console, right=(1, 2, 3))
        console.print()
    for line in commands.lines:
        console.print(line, soft_wrap=True, markup=False)
    if commands.lines:
        console.print()
    show_rows(([line] for line in basis_lines(plan)), console)


def _request(plan: Plan) -> Rows:
    w = plan.workload
    hit = f", {100 * w.prefix_hit:.0f} % of the prompt cached" if w.prefix_hit else ""
    run = f", a run of {w.requests}" if w.requests else ""
    rate = f", at most {w.rate:g} per second" if w.rate else ""
    yield "workload", f"{w.prompt} in, {w.output} out, {w.concurrency:g} at a time{rate}{run}{hit}"
    yield "layout", str(plan.best.layout)


def _memory(plan: Plan) -> Rows:
    n, die = plan.numbers, plan.best.prediction.memory
    yield "checkpoint", f"{span(n['weight_bytes_total'], 1 / _GB, 1)} GB  [{n['weight_bytes_total'].basis}]"
    yield "memory of one die", f"{die.total / _GB:.1f} GB, of which the engine may use {die.usable / _GB:.1f}"
    for name, nbytes in die.weights.items():
        yield f"  {name}", f"{nbytes / _GB:6.2f} GB  [derived]"
    for name, amount in die.parts.items():
        if name != "weights" and amount:
            basis = "guessed" if name in GUESSED else "derived"
            yield f"  {name}", f"{amount / _GB:6.2f} GB  [{basis}]"
    yield "  left for the cache", f"{span(n['kv_budget_bytes_per_die'], 1 / _GB, 1)} GB"
    yield "cache of a token", f"{n['kv_bytes_per_token'].value:,.0f} bytes  [derived]"
    yield "longest context", f"{span(n['max_context_tokens'])} tokens"
    yield "requests that fit", f"{span(n['max_concurrency'])} of this size"


def _speed(plan: Plan, simulated: Mapping[str, float] | None) -> Rows:
    n = plan.numbers
    speed = n["output_tokens_per_s"]
    yield "tokens/s", f"{span(speed)} output tokens, all requests  [{speed.basis}]"
    yield "TPOT", f"{span(n['tpot_ms'], digits=1)} ms  [{n['tpot_ms'].basis}]"
    yield "TTFT", f"{span(n['ttft_ms'])} ms  [{n['ttft_ms'].basis}; few public numbers]"
    if COST_TOTAL in n:
        yield "cost", f"{span(n[COST_TOTAL], digits=3)} per million output tokens"
        parts = f"{n[COST_INPUT].value:,.3f} per million input tokens, {n[COST_OUTPUT].value:,.3f} per million output"
        yield "divided", f"{parts} tokens, by the machines' time"
    if (power := plan.cluster.hardware.power_watts) is not None:
        per_kwh = f"{span(n[TOKENS_PER_KWH])} tokens per kWh"
        yield "energy", f"{span(n[ENERGY], digits=2)} kWh per million output tokens, {per_kwh}"
        yield "assumed", f"{power.value:,.0f} W per machine  [{power.quality}: {power.source}]"
    if simulated:
        how = "simulated, lengths vary by half" if plan.workload.requests is None else "simulated, this run"
        for name, key in (("TPOT", "tpot"), ("TTFT", "ttft")):
            values = ", ".join(f"p{share} {1e3 * simulated[f'{key}_p{share}']:,.0f}" for share in (50, 90, 99))
            yield "tails", f"{name} {values} ms  [{how}]"


def _remarks(plan: Plan) -> Rows:
    from rich.text import Text

    yield "limits", _limits(plan)
    if not plan.within_slo:
        yield "SLO", Text("not met by any layout; this one is the closest", STYLES["problem"])
    for note in plan.notes:
        yield "note", Text(note, STYLES["warning"])
    for reason in plan.extrapolated:
        yield "beyond", f"{reason}: band widened"


def _others(plan: Plan) -> Rows:
    yield "next best layouts", "tokens/s", "TPOT ms", "TTFT ms"
    for other in plan.others[:4]:
        p = other.prediction
        yield str(other.layout), f"{p.output_per_second:,.0f}", f"{1e3 * p.tpot:.1f}", f"{1e3 * p.ttft:,.0f}"


def _limits(plan: Plan) -> str:
    p = plan.best.prediction
    total = sum(p.by_limit.values())
    largest = sorted(p.by_limit.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {100 * seconds / total:.0f} %" for name, seconds in largest)
    bound = {
        "decode": "decode steps", "prefill": "prefill", "memory": "cache memory", "arrivals": "requests arriving",
    }[p.bound]  # fmt: skip
    return f"throughput by {bound}; a decode step of {1e3 * p.step_seconds:.0f} ms: {shares}"


def basis_lines(plan: Plan) -> Iterator[str]:
    """Explanations of the words in brackets."""
    yield "measured: read from the checkpoint or this machine. derived: arithmetic on the model and the machine's data."
    if plan.cluster.hardware.efficiencies is None:
        data = fitted()
        yield (
            f"fitted: seven efficiencies, on {len(data.fitted_on)} public results as of {data.date}; median error on"
            f" unseen results {100 * data.median_error['tok_s']:.0f} % in throughput,"
            f" {100 * data.median_error['ttft']:.0f} % in TTFT. Ranges should hold 4 of 5 results."
        )
    yield "guessed: no public number exists; the range shows the uncertainty. None of this was run on an NPU."


def to_json(
    plan: Plan, simulated: Mapping[str, float] | None = None, commands: PlanCommands = NO_COMMANDS
) -> dict[str, Any]:
    """The report as one JSON object: sizes in bytes, times in ms (`simulated`: in seconds)."""
    layout, p = plan.best.layout, plan.best.prediction
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
        "profile": commands.profile, "command_lines": list(commands.lines),
        "simulated": None if simulated is None else dict(simulated),
    }  # fmt: skip


def _engine(engine: Engine) -> dict[str, int]:
    return {"tp": engine.tp, "dp": engine.dp, "ep": engine.ep, "dcp": engine.dcp, "mtp": engine.drafts}
