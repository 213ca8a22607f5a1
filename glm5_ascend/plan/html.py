"""The planner's report as one HTML file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from glm5_ascend.plan.chart import load_chart, memory_chart, share_chart
from glm5_ascend.plan.layouts import PROVEN_DRAFTS
from glm5_ascend.plan.result import Plan, PlanCommands
from glm5_ascend.plan.spending import COST_TOTAL
from glm5_ascend.plan.sweep import goodput, sweep
from glm5_ascend.plan.text import NO_COMMANDS, basis_lines, span
from glm5_ascend.plan.workload import Slo
from glm5_ascend.report import page as report
from glm5_ascend.report.content import Card, Code, Page, Section, Table
from glm5_ascend.report.header import ReportHeader, make_header
from glm5_ascend.report.verdict import ReportVerdict

_LAYOUTS = 6
_LOADS = "The best layout with fewer and more clients, and the range of the prediction. Large dot: this workload."
_ORDER = (
    "Best first: layouts that meet the SLO, then by output tokens per second, then by latency. A layout that no public "
    f"result has (other drafts than {PROVEN_DRAFTS}, DCP, experts cut over all dies) must be better by more than the "
    "error of the prediction."
)


def write(plan: Plan, path: Path, commands: PlanCommands = NO_COMMANDS) -> None:
    """Write the report.

    Raises:
        OSError: the file cannot be written.
    """
    report.write(path, document(plan, make_header(), commands))


def document(plan: Plan, header: ReportHeader, commands: PlanCommands = NO_COMMANDS) -> Page:
    """The page; `header` has its origin."""
    cluster, w = plan.cluster, plan.workload
    hit = f", {100 * w.prefix_hit:.0f} % of the prompt cached" if w.prefix_hit else ""
    run = f", a run of {w.requests:,}" if w.requests else ""
    rate = f", at most {w.rate:g} per second" if w.rate else ""
    return Page(
        f"{plan.model.name} {plan.model.quantization} on {cluster.nodes} x {cluster.hardware.title}",
        header,
        verdict(plan),
        [
            f"workload: {w.prompt:,} tokens in, {w.output:,} out, {w.concurrency:g} at a time{rate}{run}{hit}",
            f"layout: {plan.best.layout}",
            *plan.notes,
        ],
        list(_cards(plan)),
        list(_sections(plan, commands)),
    )


def verdict(plan: Plan) -> ReportVerdict:
    """The verdict on the SLO: by the prediction, and by the slow end of its range."""
    slo = (("TPOT", plan.slo.tpot, plan.numbers["tpot_ms"]), ("TTFT", plan.slo.ttft, plan.numbers["ttft_ms"]))
    limits = [(name, 1e3 * limit, number) for name, limit, number in slo if limit is not None]
    if not limits:
        return ReportVerdict("open", "It fits. No SLO was given, so there is no limit on the latency.", "", "")
    threshold = ", ".join(
        f"{name} {limit:g} ms (predicted: {span(number, digits=1)} ms)" for name, limit, number in limits
    )
    reason = (
        "The limits are those of --slo. In brackets: the range of the prediction, by its errors on public results that "
        "were not used in its fit."
    )
    if not plan.within_slo:
        return ReportVerdict(
            "poor",
            "SLO not met: no layout meets the limits on latency; this one is the closest.",
            threshold,
            reason,
        )
    if any(number.high > limit for _, limit, number in limits):
        return ReportVerdict(
            "fair", "SLO met by the prediction, but not at the slow end of its range.", threshold, reason
        )
    return ReportVerdict("good", "SLO met, also at the slow end of the prediction's range.", threshold, reason)


def _sections(plan: Plan, commands: PlanCommands) -> Iterator[Section]:
    yield Section("Memory of one die", [memory_chart(plan.best.prediction.memory)])
    rows = sweep(plan)
    text = _LOADS if plan.slo == Slo() else f"{_LOADS} {goodput(rows).capitalize()}."
    yield Section("Throughput and latency", [load_chart(plan, rows)], text)
    yield Section("What limits a decode step", [share_chart(plan.best.prediction)])
    if plan.others:
        yield Section("Next best layouts", [_others(plan)], _ORDER)
    if commands.lines:
        yield Section("Run it", [Code("\n\n".join(commands.lines))])
    widened = [f"beyond public results: {reason}; range widened" for reason in plan.extrapolated]
    yield Section("Uncertainty", after=[*widened, *basis_lines(plan)])


def _cards(plan: Plan) -> Iterator[Card]:
    n = plan.numbers
    rows = [
        ("output_tokens_per_s", "output tokens per second", n["output_tokens_per_s"], 1.0, 0, ""),
        ("tpot_ms", "per output token", n["tpot_ms"], 1.0, 1, " ms"),
        ("ttft_ms", "to the first token", n["ttft_ms"], 1e-3, 2, " s"),
        ("max_context_tokens", "longest context, tokens", n["max_context_tokens"], 1.0, 0, ""),
        ("max_concurrency", "such requests fit at once", n["max_concurrency"], 1.0, 0, ""),
    ]
    if COST_TOTAL in n:
        rows.append(("cost", "per million output tokens", n[COST_TOTAL], 1.0, 2, ""))
    for key, label, number, scale, digits, unit in rows:
        value, _, rest = span(number, scale, digits).partition(" (")
        ends = f"{rest[:-1]} {unit}".strip() + ", " if rest else ""
        yield Card(key, f"{value}{unit}", label, f"{ends}{number.basis}")


def _others(plan: Plan) -> Table:
    rows = []
    for candidate in [plan.best, *plan.others[:_LAYOUTS]]:
        p = candidate.prediction
        met = "yes" if candidate.meets(plan.slo) else "no"
        name = f"{candidate.layout} (best)" if candidate is plan.best else str(candidate.layout)
        rows.append([name, f"{p.output_per_second:,.0f}", f"{1e3 * p.tpot:.1f}", f"{1e3 * p.ttft:,.0f}", met])
    return Table(["layout", "tokens/s", "TPOT ms", "TTFT ms", "meets SLO"], rows)
