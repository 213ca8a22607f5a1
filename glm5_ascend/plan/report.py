"""A plan as text for a terminal, and as one HTML page with the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from glm5_ascend.plan.evidence import cases, medians
from glm5_ascend.plan.hardware import fitted
from glm5_ascend.plan.inputs import Slo
from glm5_ascend.plan.memory import ENDS, UNPUBLISHED
from glm5_ascend.plan.predict import predict
from glm5_ascend.plan.search import SHEDS
from glm5_ascend.report.page import Grade, Page, ReportVerdict, Section
from glm5_ascend.report.terminal import STYLES
from glm5_ascend.report.terminal import show as show_rows

if TYPE_CHECKING:
    from rich.console import Console

    from glm5_ascend.plan.api import Plan

Rows = Iterator[tuple[str, ...]]
_GB, OTHERS = 1e9, 4  # further layouts that are shown
WORDS = {"tok_s": "tokens/s", "ttft": "TTFT", "tpot": "TPOT"}
BOUNDS = {
    "decode": "decode steps", "prefill": "prefill", "memory": "cache memory", "seqs": "--max-num-seqs",
    "arrivals": "arriving requests",
}  # fmt: skip


def show(plan: Plan, console: Console) -> None:
    """Print the report. Commands are not wrapped, so that they can be copied."""
    from rich.text import Text

    styles = {"SLO": STYLES["ok" if plan.within_slo else "problem"], "note": STYLES["warning"]}
    show_rows([(plan.title,)], console)
    answers = [(name, Text(text, styles.get(name, ""))) for name, text in answer(plan)]
    layouts = table(plan) if plan.others or plan.experimental else ()
    for rows, right in ((answers, ()), (memory(plan), ()), (layouts, (1, 2, 3))):
        show_rows(rows, console, right=right)
        console.print()
    for line in plan.lines:
        console.print(line, soft_wrap=True)
    if plan.lines:
        console.print()
    show_rows(([line] for line in basis_lines(plan)), console)


def answer(plan: Plan) -> Iterator[tuple[str, str]]:
    """The first answer: load, layout, source, speeds, what limits them, verdict, notes, and the nearest result."""
    n, best, step, (distance, case) = plan.numbers, plan.best, plan.step, plan.question.nearest(plan.best.layout)
    speed, tpot, ttft = n["output_tokens_per_s"], n["tpot_ms"], n["ttft_ms"]
    limits = sorted(step.by_limit.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {100 * seconds / step.seconds:.0f} %" for name, seconds in limits)
    bound = BOUNDS[best.prediction.bound]
    yield "load", str(plan.question.workload)
    yield best.evidence.tag, str(best.layout)
    yield "source", str(best.evidence)
    yield from settings(plan)
    yield "tokens/s", f"{speed.text()} output tokens, all requests  [{_known(plan, 'tok_s', speed.basis)}]"
    yield "mean TPOT", f"{tpot.text(digits=1)} ms  [{_known(plan, 'tpot', tpot.basis)}]"
    yield "mean TTFT", f"{ttft.text()} ms  [{_known(plan, 'ttft', ttft.basis)}]"
    yield "limits", f"throughput by {bound}; a decode step of {1e3 * step.seconds:.0f} ms: {shares}"
    if plan.question.slo != Slo() or not plan.within_slo:
        yield "SLO", plan.verdict
    yield from (("note", note) for note in plan.notes)
    measured = case.measured["tok_s"]
    text = f"{measured:,.0f} tokens/s measured with {case.layout}, {case.workload}"
    drafts = case.layout.decode.drafts and not plan.question.steps.model.config.num_nextn_predict_layers
    if not speed.low <= measured <= speed.high and not drafts:
        same = predict(plan.question.steps, case.layout, case.workload, ends=ENDS[1:])
        text += f"; for these the plan has {same.tok_s:,.0f}" if same else ""
    yield "nearest", f"{case.row.case}: {text} (distance {distance:.1f})"


def settings(plan: Plan) -> Iterator[tuple[str, str]]:
    """Settings of the engines that are not in the layout's name."""
    for role, e in plan.best.layout.engines.items():
        sizes = f"--max-num-seqs {e.sequences}, --max-num-batched-tokens {e.batched_tokens}"
        sizes += f", --gpu-memory-utilization {e.utilization:g}, HCCL_BUFFSIZE {e.buffer_mb}"
        yield "settings" if role == "server" else f"settings, {role}", sizes


def _known(plan: Plan, output: str, basis: str) -> str:
    error, count = plan.known.get(output, (0.0, 0))
    accuracy = f"median error {100 * error:.0f} % of {count} unseen results" if count else "no public result"
    return f"{basis}; {accuracy} of this kind"


def memory(plan: Plan) -> Iterator[tuple[str, str]]:
    """The memory of a die by use, and what fits into it."""
    n, die = plan.numbers, plan.best.prediction.memory
    yield "checkpoint", f"{n['weight_bytes_total'].text(1 / _GB, 1)} GB  [{n['weight_bytes_total'].basis}]"
    yield "memory of one die", f"{die.total / _GB:.1f} GB, of which the engine may use {die.usable / _GB:.1f}"
    for name, nbytes in {**die.weights, **die.parts}.items():
        if nbytes and name != "weights":
            yield f"  {name}", f"{nbytes / _GB:6.2f} GB  [{'guessed' if name in UNPUBLISHED else 'derived'}]"
    yield "  left for the cache", f"{n['kv_budget_bytes_per_die'].text(1 / _GB, 1)} GB"
    yield "cache of a token", f"{n['kv_bytes_per_token'].value:,.0f} bytes  [derived]"
    if die.state_tokens:
        yield "state of a request", f"{n['state_bytes_per_request'].value / 1e6:,.0f} MB  [derived]"
    yield "longest context", f"{n['max_context_tokens'].text()} tokens"
    yield "cache holds", f"{n['max_concurrency'].text()} requests of this size"


def table(plan: Plan) -> Rows:
    """The first answer, further layouts with a source, and one that nobody runs, with a header."""
    yield "layout", "tokens/s", "TPOT ms", "TTFT ms", "source"
    shown = [plan.best, *plan.others[:OTHERS], *([plan.experimental] if plan.experimental else [])]
    for candidate in shown:
        p = candidate.prediction
        remarks = [f"{candidate.evidence.tag}: {candidate.evidence}"]
        remarks += ["memory unsure"] if candidate.unsure else []
        if candidate.rank == plan.best.rank and candidate.value > plan.best.value and candidate.evidence.source:
            remarks.append("not first: " + plan.doubt(candidate))
        remarks += [f"SLO for {candidate.admitted:g} clients"] if candidate.verdict == SHEDS else []
        remarks += ["SLO missed"] if candidate.verdict > SHEDS else []
        speeds = f"{p.tok_s:,.0f}", f"{1e3 * p.tpot:.1f}", f"{1e3 * p.ttft:,.0f}"
        yield str(candidate.layout), *speeds, "; ".join(remarks)


def basis_lines(plan: Plan) -> Iterator[str]:
    """Errors of the planner on public results, and the meaning of the words in brackets."""
    if plan.experimental is not None:
        yield f"experimental: see it with --layout {plan.experimental.layout.text()}"
    for engine, title in (("vllm-ascend", "vllm-ascend"), ("sglang", "SGLang, not modelled")):
        errors = medians(case for case in cases() if case.row.engine == engine and (case.judged or engine == "sglang"))
        texts = (f"{WORDS[name]} {100 * error:.0f} % ({count})" for name, (error, count) in errors.items())
        yield f"median error of results of {title}, each by a fit without its source: {', '.join(texts)}"
    yield f"the ranges hold {100 * fitted().inside:.0f} % of those of vllm-ascend"
    yield "measured: of the checkpoint. derived: arithmetic. guessed: no public number exists."
    yield "None of this was run on an NPU by this project."


def document(plan: Plan) -> Page:
    """The report as an HTML page."""
    grade: Grade = "good" if plan.verdict.startswith("met, also") else "fair" if plan.within_slo else "poor"
    verdict = ReportVerdict(grade, f"SLO {plan.verdict}.", "", "The limits are those of --slo.")
    if plan.question.slo == Slo():
        verdict = ReportVerdict("open", "It fits. No SLO was given, so there is no limit on the latency.", "", "")
    uses = [(name.strip(), text) for name, text in memory(plan)]
    operators = {name: 1e3 * seconds for name, seconds in sorted(plan.step.by_op.items(), key=lambda item: -item[1])}
    times = [(name, f"{ms:.1f} ms") for name, ms in operators.items()]
    head, *rows = table(plan)
    about = "Those with a source first. Experimental: nobody is known to run it."
    sections = [
        Section("Memory of one die", (), ("use", "bytes"), uses),
        Section("A decode step", (), ("operator", "time"), times, list(operators.values())),
        Section("Layouts", [about], head, rows),
        *([Section("Run it", code="\n\n".join(plan.lines))] if plan.lines else []),
        Section("Uncertainty", list(basis_lines(plan))),
    ]
    return Page(plan.title, verdict, [f"{name}: {text}" for name, text in answer(plan)], sections)
