"""The function `plan`, which the command calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from glm5_ascend.errors import PlanError
from glm5_ascend.options import with_options
from glm5_ascend.plan import memory, weights
from glm5_ascend.plan.constants import fitted
from glm5_ascend.plan.evidence import Case, half_width, has_rows, nearest
from glm5_ascend.plan.hardware import Cluster, load_hardware
from glm5_ascend.plan.layout import Engine, check_engine, parse_layout
from glm5_ascend.plan.memory import End
from glm5_ascend.plan.model import from_directory, named
from glm5_ascend.plan.notes import notes, nothing_fits
from glm5_ascend.plan.options import PlanOptions
from glm5_ascend.plan.predict import predict
from glm5_ascend.plan.proven import DERIVED, NOBODY, Evidence, proven_layouts
from glm5_ascend.plan.result import Plan, Range
from glm5_ascend.plan.search import (
    MEETS,
    Candidate,
    Question,
    beats,
    evaluate,
    experimental_candidates,
    proven_candidates,
)
from glm5_ascend.plan.steps import Steps
from glm5_ascend.plan.workload import parse_acceptance, parse_slo, parse_workload

#: More machines than any deployment has: a typing error, and a very long search.
MAX_NODES = 4096
#: Numbers of machines that are tried without --nodes.
_NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@with_options(PlanOptions)
def plan(options: PlanOptions) -> Plan:
    """Plan a deployment on paper: memory, layout, latency and throughput, each with a range.

    Raises:
        PlanError, ConfigError, CheckpointError: an option is wrong, or nothing fits.
    """
    hardware = load_hardware(str(options.hardware))
    if options.nodes is not None and not 1 <= options.nodes <= MAX_NODES:
        raise PlanError(f"--nodes {options.nodes}: must be 1 to {MAX_NODES}", "correct --nodes")
    if options.directory is not None and options.model is not None:
        raise PlanError("both DIR and --model are given", "give one of them")
    if options.directory is None:
        model = named(options.model or "glm-5", options.quant, options.cache)
    else:
        model = from_directory(Path(options.directory), options.cache)
    if model.rules and model.rules.fp8 and not hardware.fp8:
        what = f"--quant {model.quantization}" if options.directory is None else f"{options.directory}: weights of FP8"
        raise PlanError(f"{what}: {hardware.title} does not multiply FP8", "--quant w8a8, or --hardware ascend-950pr")
    workload, slo = parse_workload(options.workload), parse_slo(options.slo)
    context, positions = workload.prompt + workload.output, model.config.max_position_embeddings
    if context > positions:
        raise PlanError(f"--workload: {context} tokens, {model.name} has {positions} positions", "shorten in= or out=")
    if options.mtp is not None:
        check_engine(Engine(1, drafts=options.mtp), model.config, hardware)
    steps = Steps(model, hardware, hardware.constants or fitted().constants)
    question = Question(steps, workload, slo, parse_acceptance(options.acceptance), options.mtp)
    searched = options.layout is None
    result = (
        _searched(question, options.nodes) if searched else _evaluated(question, str(options.layout), options.nodes)
    )
    if options.html is not None:
        from glm5_ascend.plan.html import write

        write(result, Path(options.html))
    return result


def _evaluated(question: Question, text: str, nodes: int | None) -> Plan:
    """The plan of the layout that the user gave."""
    steps = question.steps
    layout = parse_layout(text, steps.model.config, question.workload.concurrency, question.drafts)
    for engine in layout.engines.values():
        check_engine(engine, steps.model.config, steps.hardware)
    needed = layout.nodes(steps.hardware)
    if nodes is not None and nodes < needed:
        raise PlanError(f"--layout {text}: takes {needed} x {steps.hardware.name}, --nodes is {nodes}", "more nodes")
    sources = dict(proven_layouts(steps.model, Cluster(steps.hardware, needed), question.workload, question.drafts))
    evidence = sources.get(layout)
    if evidence is None:  # the same sizes with other settings
        same = (e for other, e in sources.items() if str(other) == str(layout))
        source = next(same, NOBODY).source
        evidence = Evidence(DERIVED, source, ("other settings",)) if source else NOBODY
    best = evaluate(question, layout, evidence, shed=False)
    if best is None:
        raise nothing_fits(question, layout, needed)
    return _plan(question, Cluster(steps.hardware, nodes or needed), best, [], None)


def _searched(question: Question, nodes: int | None) -> Plan:
    """The plan of the best layouts; without `nodes`, of the fewest machines that carry the load within the SLO."""
    hardware, best = question.steps.hardware, None
    for count in _NODES if nodes is None else (nodes,):
        candidates = [] if hardware.measured_on else proven_candidates(question, count, shed=nodes is not None)
        if nodes is None:
            candidates.sort(key=lambda c: c.verdict)  # stable: the best that serves all clients, if there is one
        if candidates and (nodes is not None or candidates[0].verdict == MEETS):
            break
        if not candidates and (other := experimental_candidates(question, count, ())):
            candidates = other
            break
    else:
        if nodes is None:  # no number of machines meets the SLO: the fewest ones that fit
            candidates = next((fitting for count in _NODES if (fitting := proven_candidates(question, count))), [])
    if not candidates:
        layout = parse_layout(f"tp={hardware.dies_per_node}", question.steps.model.config, 1.0, question.drafts)
        raise nothing_fits(question, layout, nodes or _NODES[-1])
    if nodes is None:
        count = min(c.nodes for c in candidates if c.verdict == candidates[0].verdict)
        candidates = [c for c in candidates if c.nodes <= count]
    best = candidates[0]
    trial = None
    if best.evidence.tag != NOBODY.tag and not hardware.measured_on:
        trial = next(iter(experimental_candidates(question, count, candidates)), None)
        if trial and not beats(trial, best, math.exp(-_half_widths(question, trial)["tok_s"])):
            trial = None
    return _plan(question, Cluster(hardware, count), best, candidates[1:], trial)


def _plan(
    question: Question, cluster: Cluster, best: Candidate, others: list[Candidate], trial: Candidate | None
) -> Plan:
    numbers, sentences = _numbers(question, best), notes(question, cluster, best, others)
    return Plan(question, cluster, best, others, trial, numbers, _near(question, best), sentences)


def _near(question: Question, candidate: Candidate) -> tuple[float, Case] | None:
    """The nearest public result and its distance; None for a measured machine."""
    hardware = question.steps.hardware
    if hardware.measured_on is not None:
        return None
    return nearest(question.steps.model, hardware.name, candidate.layout, question.workload)


def _half_widths(question: Question, candidate: Candidate) -> dict[str, float]:
    """Half widths of the bands on a logarithmic scale, by output."""
    away, _ = _near(question, candidate) or (0.0, None)
    spread = question.acceptance.spread if candidate.layout.decode.drafts else 0.0
    widths = {name: half_width(name, away) for name in ("tok_s", "tpot", "ttft")}
    return {name: width if name == "ttft" else math.hypot(width, spread) for name, width in widths.items()}


def _numbers(question: Question, best: Candidate) -> dict[str, Range]:
    """Figures with their ranges; the range of the memory counts for the speed."""
    steps, load, model = question.steps, best.load, question.steps.model
    ends = [predict(steps, best.layout, load, question.acceptance, end) or best.prediction for end in memory.ENDS]
    widths, p = _half_widths(question, best), best.prediction
    basis = "measured" if steps.hardware.constants else "fitted" if has_rows(model) else "guessed"

    def band(output: str, value: float, others: list[float], scale: float = 1.0) -> Range:
        factor = math.exp(widths[output])
        low, high = min(value, *others) / factor, max(value, *others) * factor
        return Range(scale * value, scale * low, scale * high, basis)

    def exact(value: float, kind: str = "derived") -> Range:
        return Range(value, value, value, kind)

    free = p.memory
    if model.stored_bytes is not None:
        total = exact(model.stored_bytes, "measured")
    else:
        sizes = [weights.stored_bytes(model, *args) for args in ((False, True), (False, False), (True, True))]
        total = Range(sizes[0], sizes[1], sizes[2], "derived")
    engine, positions = replace(best.layout.decode, sequences=1_000_000), model.config.max_position_embeddings
    ranks = engine.dp * best.layout.replicas

    def guessed(value: Callable[[End], float]) -> Range:
        low, middle, high = map(value, memory.ENDS)
        return Range(middle, low, high, "guessed")

    return {
        "weight_bytes_total": total,
        "weight_bytes_per_die": exact(float(sum(free.weights.values()))),
        "kv_bytes_per_token": exact(free.bytes_per_token),
        "state_bytes_per_request": exact(free.state_tokens * free.bytes_per_token),
        "kv_budget_bytes_per_die": guessed(lambda end: free.budgets[end]),
        "max_context_tokens": guessed(lambda end: max(0, min(positions, free.tokens(end) - free.state_tokens))),
        "max_concurrency": guessed(lambda end: math.floor(ranks * memory.most_requests(free, engine, load, end))),
        "tpot_ms": band("tpot", p.tpot, [end.tpot for end in ends], 1e3),
        "ttft_ms": band("ttft", p.ttft, [end.ttft for end in ends], 1e3),
        "output_tokens_per_s": band("tok_s", p.output_per_second, [end.output_per_second for end in ends]),
    }
