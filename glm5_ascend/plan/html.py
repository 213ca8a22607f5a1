"""The report as one HTML file: no network, no script, readable on a phone, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from glm5_ascend.plan.chart import frontier_chart, memory_bar, share_bars
from glm5_ascend.plan.frontier import frontier
from glm5_ascend.plan.profile import commands
from glm5_ascend.plan.result import Plan
from glm5_ascend.plan.text import basis, span

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5a6572; --line: #d7dde4; --page: #ffffff; --card: #f5f7f9;
  --one: #2a6fbb; --two: #c2571a; --free: #6fae7b; --a: #1f5a9e; --b: #3f86cf; --c: #7fb2e6; --d: #5b3f98; --e: #8a6fc0;
  --f: #b9a3dd; --g: #0f7c86; --h: #5bb3ba; --i: #a8431a; --j: #d8803f; --k: #edb98a; --l: #8d6b2f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaee; --soft: #9aa5b1; --line: #39424c; --page: #14181c;
  --card: #1d2329; --one: #6aa9ec; --two: #ee9a5e; --free: #5a9668; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--page); }
h1 { font-size: 1.4rem; margin: 0.5rem 0 0; } h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
p { margin: 0.3rem 0; } .soft { color: var(--soft); font-size: 0.9rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 0.7rem; margin: 1rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 0.5rem; padding: 0.7rem 0.9rem; }
.card b { display: block; font-size: 1.5rem; line-height: 1.2; } .card span { color: var(--soft); font-size: 0.85rem; }
svg { display: block; width: 100%; max-width: 36rem; height: auto; }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; } svg text.soft { fill: var(--soft); font-size: 11px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 0.92rem; }
td, th { text-align: right; padding: 0.25rem 0.6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
td:first-child, th:first-child { text-align: left; padding-left: 0; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 0.5rem; padding: 0.7rem;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: 0.82rem; }
"""


def write(plan: Plan, path: Path) -> None:
    """Write the report.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text("\n".join(page(plan)) + "\n", encoding="utf-8")


def page(plan: Plan) -> Iterator[str]:
    """The document, line by line."""
    w, cluster = plan.workload, plan.cluster
    title = f"{plan.model.name} {plan.model.quantization} on {cluster.nodes} x {cluster.hardware.title}"
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
    hit = f", {100 * w.prefix_hit:.0f} % of the prompt cached" if w.prefix_hit else ""
    yield f"<h1>{escape(title)}</h1>"
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
    yield "</body></html>"


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
        yield f'<div class="card" id="{key}"><b>{value}{unit}</b><span>{label}<br>{wide}{number.basis}</span></div>'
    yield "</div>"


def _others(plan: Plan) -> Iterator[str]:
    if not plan.others:
        return
    yield "<h2>Next best layouts</h2><div class='wide'><table>"
    yield "<tr><th>layout</th><th>tokens/s</th><th>TPOT ms</th><th>TTFT ms</th></tr>"
    for other in plan.others[:6]:
        p = other.prediction
        yield (
            f"<tr><td>{escape(str(other.layout))}</td><td>{p.output_per_second:,.0f}</td>"
            f"<td>{1e3 * p.tpot:.1f}</td><td>{1e3 * p.ttft:,.0f}</td></tr>"
        )
    yield "</table></div>"
