"""The planner's report as one HTML file."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from glm5_ascend.plan.chart import frontier_chart, memory_bar, share_bars
from glm5_ascend.plan.frontier import frontier
from glm5_ascend.plan.profile import commands
from glm5_ascend.plan.result import Plan
from glm5_ascend.plan.text import basis, span
from glm5_ascend.report import page as report


def write(plan: Plan, path: Path) -> None:
    """Write the report.

    Raises:
        OSError: the file cannot be written.
    """
    cluster = plan.cluster
    title = f"{plan.model.name} {plan.model.quantization} on {cluster.nodes} x {cluster.hardware.title}"
    report.write(path, report.page(title, body(plan)))


def body(plan: Plan) -> Iterator[str]:
    """What stands below the title, line by line."""
    w = plan.workload
    hit = f", {100 * w.prefix_hit:.0f} % of the prompt cached" if w.prefix_hit else ""
    run = f", a run of {w.requests:,}" if w.requests else ""
    yield f'<p class="soft">{w.prompt:,} tokens in, {w.output:,} out, {w.concurrency:g} at a time{run}{hit}</p>'
    yield f"<p>Layout <strong>{escape(str(plan.chosen.layout))}</strong></p>"
    yield from _cards(plan)
    for note in plan.notes:
        yield f"<p>{escape(note)}</p>"
    if not plan.within_slo:
        yield "<p><strong>No layout found meets the limits on latency; this one comes closest.</strong></p>"
    yield "<h2>Memory of one die</h2>"
    yield memory_bar(plan.chosen.prediction.memory)
    yield "<h2>Throughput and latency</h2>"
    yield '<p class="soft">The chosen layout with fewer and more requests, and the band of the prediction.</p>'
    yield frontier_chart(frontier(plan), plan.numbers["output_tokens_per_s"], plan.slo.tpot)
    yield "<h2>What limits a decode step</h2>"
    yield share_bars(plan.chosen.prediction)
    yield from _others(plan)
    yield "<h2>Run it</h2>"
    yield "<pre>" + escape("\n\n".join(commands(plan))) + "</pre>"
    yield "<h2>How sure this is</h2>"
    for reason in plan.extrapolated:
        yield f"<p>{escape(reason)}: band widened.</p>"
    for line in basis(plan):
        yield f'<p class="soft">{escape(line)}</p>'


def _cards(plan: Plan) -> Iterator[str]:
    n = plan.numbers
    rows = [
        ("output_tokens_per_s", "output tokens per second", n["output_tokens_per_s"], 1.0, 0, ""),
        ("tpot_ms", "per output token", n["tpot_ms"], 1.0, 1, " ms"),
        ("ttft_ms", "to the first token", n["ttft_ms"], 1e-3, 2, " s"),
        ("max_context_tokens", "longest context, tokens", n["max_context_tokens"], 1.0, 0, ""),
        ("max_concurrency", "such requests fit at once", n["max_concurrency"], 1.0, 0, ""),
    ]
    if "cost_per_million_output_tokens" in n:
        rows.append(("cost", "per million output tokens", n["cost_per_million_output_tokens"], 1.0, 2, ""))
    yield '<div class="cards">'
    for key, label, number, scale, digits, unit in rows:
        value, _, rest = span(number, scale, digits).partition(" (")
        wide = f"{rest[:-1]} {unit}".strip() + ", " if rest else ""
        yield report.card(key, f"{value}{unit}", label, f"{wide}{number.basis}")
    yield "</div>"


def _others(plan: Plan) -> Iterator[str]:
    if not plan.others:
        return
    yield "<h2>Next best layouts</h2>"
    rows = []
    for other in plan.others[:6]:
        p = other.prediction
        rows.append([str(other.layout), f"{p.output_per_second:,.0f}", f"{1e3 * p.tpot:.1f}", f"{1e3 * p.ttft:,.0f}"])
    yield from report.table(["layout", "tokens/s", "TPOT ms", "TTFT ms"], rows)
