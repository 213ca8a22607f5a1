"""A plan as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from glm5_ascend.plan.result import Plan
from glm5_ascend.plan.search import MEETS
from glm5_ascend.plan.text import basis_lines, table
from glm5_ascend.report import charts
from glm5_ascend.report import page as report
from glm5_ascend.report.content import Card, Chart, Code, Page, Section, Table
from glm5_ascend.report.header import ReportHeader, make_header
from glm5_ascend.report.verdict import ReportVerdict


def write(plan: Plan, path: Path) -> None:
    """Write the report.

    Raises:
        OSError: the file cannot be written.
    """
    report.write(path, document(plan, make_header()))


def document(plan: Plan, header: ReportHeader) -> Page:
    """The page; `header` has its origin."""
    best = plan.best
    lines = [f"load: {plan.workload}", f"{best.evidence.tag}: {best.layout}", f"source: {best.evidence}", *plan.notes]
    return Page(plan.title, header, _verdict(plan), lines, list(_cards(plan)), list(_sections(plan)))


def _verdict(plan: Plan) -> ReportVerdict:
    slo = (("TPOT", plan.slo.tpot, plan.numbers["tpot_ms"]), ("TTFT", plan.slo.ttft, plan.numbers["ttft_ms"]))
    limits = [(name, 1e3 * limit, number) for name, limit, number in slo if limit is not None]
    if not limits:
        return ReportVerdict("open", "It fits. No SLO was given, so there is no limit on the latency.", "", "")
    threshold = ", ".join(f"{name} {limit:g} ms (predicted: {n.text(digits=1)} ms)" for name, limit, n in limits)
    slow = any(number.high > limit for _, limit, number in limits)
    grade = "poor" if plan.best.verdict != MEETS else "fair" if slow else "good"
    reason = "The limits are those of --slo. In brackets: the range of the prediction."
    return ReportVerdict(grade, f"SLO {plan.verdict}.", threshold, reason)  # type: ignore[arg-type]


def _cards(plan: Plan) -> Iterator[Card]:
    for key, label, scale, digits, unit in (
        ("output_tokens_per_s", "output tokens per second", 1.0, 0, ""), ("tpot_ms", "per output token", 1.0, 1, " ms"),
        ("ttft_ms", "to the first token", 1e-3, 2, " s"), ("max_context_tokens", "longest context, tokens", 1.0, 0, ""),
        ("max_concurrency", "such requests fit in the cache", 1.0, 0, ""),
    ):  # fmt: skip
        value, _, rest = plan.numbers[key].text(scale, digits).partition(" (")
        ends = f"{rest[:-1]}{unit}, " if rest else ""
        yield Card(key, f"{value}{unit}", label, f"{ends}{plan.numbers[key].basis}")


def _sections(plan: Plan) -> Iterator[Section]:
    die = plan.best.prediction.memory
    parts = {**die.weights, **{name: size for name, size in die.parts.items() if name != "weights"}}
    parts |= {"left for the cache": max(0.0, die.budget), "not used by the engine": die.total - die.usable}
    gigabytes = [(name, size / 1e9, f"{size / 1e9:.2f} GB") for name, size in parts.items() if size > 0]
    yield Section("Memory of one die", [charts.bars("Memory of one die", gigabytes, "GB of one die")])
    yield Section("Throughput and latency", [_load_chart(plan)], "The layout with fewer and more clients.")
    operators = sorted(plan.step.by_op.items(), key=lambda item: -item[1])
    times = [(name, 1e3 * s, f"{1e3 * s:.1f} ms") for name, s in operators if s > 0.01 * operators[0][1]]
    yield Section("A decode step", [charts.bars("A decode step", times, "ms")])
    head, *rows = (tuple(map(str, row)) for row in table(plan))
    yield Section("Layouts", [Table(head, rows)], "Those with a source first. Experimental: nobody is known to run it.")
    if plan.commands.lines:
        yield Section("Run it", [Code("\n\n".join(plan.commands.lines))])
    yield Section("Uncertainty", after=list(basis_lines(plan)))


def _load_chart(plan: Plan) -> Chart:
    """Throughput over TPOT by load, with the band of the prediction; tooltips have the number of clients."""
    import altair as alt

    speed = plan.numbers["output_tokens_per_s"]
    x, y, clients = "ms per output token (TPOT)", "output tokens per second", "clients"
    records: list[charts.Record] = [
        {clients: row["clients"], x: row["tpot_ms"], y: row["output_tokens_per_s"], "TTFT ms": row["ttft_ms"],
         "low": float(row["output_tokens_per_s"]) * speed.low / speed.value,
         "high": float(row["output_tokens_per_s"]) * speed.high / speed.value, "SLO": row["slo"]}
        for row in plan.loads()
    ]  # fmt: skip
    base = alt.Chart(charts.data(records)).encode(x=alt.X(field=x, type="quantitative"))
    tooltip = [alt.Tooltip(field=name, type="nominal") for name in (clients, x, y, "TTFT ms", "SLO")]
    line = alt.Y(field=y, type="quantitative", scale=alt.Scale(zero=True))
    layers = alt.layer(
        base.mark_area(opacity=0.2).encode(y=alt.Y("low:Q", title=y), y2="high:Q"),
        base.mark_line(strokeWidth=2).encode(y=line),
        base.mark_point(filled=True, size=90, opacity=1).encode(y=line, tooltip=tooltip),
    )
    return charts.finished("Throughput and latency", layers.properties(height=300))
