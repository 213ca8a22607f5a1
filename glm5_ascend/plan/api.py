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
from glm5_ascend.plan.evidence import OUTPUTS, Case, half_width, has_rows, nearest
from glm5_ascend.plan.hardware import load_hardware
from glm5_ascend.plan.layout import Engine, Layout, check_engine, parse_layout
from glm5_ascend.plan.memory import End
from glm5_ascend.plan.model import from_directory, named
from glm5_ascend.plan.options import PlanOptions
from glm5_ascend.plan.predict import predict
from glm5_ascend.plan.proven import DERIVED, NOBODY, Evidence, faults, proven_layouts
from glm5_ascend.plan.result import Plan, Range
from glm5_ascend.plan.search import (
    EQUAL,
    MEETS,
    SHEDS,
    Candidate,
    Question,
    evaluate,
    experimental_candidates,
    proven_candidates,
)
from glm5_ascend.plan.steps import Steps
from glm5_ascend.plan.workload import parse_acceptance, parse_slo, parse_workload

#: More machines than any deployment has: a typing error, and a very long search.
MAX_NODES = 4096
#: Prompt tokens from which the indexer takes a large part of a prefill.
LONG_PROMPT = 16_384

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
    sources = dict(proven_layouts(steps.model, steps.hardware, needed, question.workload, question.drafts))
    same = next((e for other, e in sources.items() if str(other) == str(layout)), NOBODY)  # with other settings
    changed = Evidence(DERIVED, same.source, ("other settings",)) if same.source else NOBODY
    best = evaluate(question, layout, sources.get(layout, changed), shed=False)
    if best is None:
        raise _nothing_fits(question, layout, needed)
    return _plan(question, nodes or needed, best, [])


def _searched(question: Question, nodes: int | None) -> Plan:
    """The plan of the best layouts; without `nodes`, of the fewest machines that carry the load within the SLO."""
    hardware, fitting = question.steps.hardware, list[tuple[int, list[Candidate]]]()
    for count in _NODES if nodes is None else (nodes,):
        candidates = [] if hardware.measured_on else proven_candidates(question, count, shed=nodes is not None)
        if nodes is None:
            candidates.sort(key=lambda c: c.verdict)  # stable: the best that serves all clients, if there is one
        candidates = candidates or experimental_candidates(question, count, ())
        if candidates:
            fitting.append((count, candidates))
            if nodes is not None or candidates[0].verdict == MEETS or candidates[0].evidence is NOBODY:
                break
    else:
        if not fitting:
            layout = parse_layout(f"tp={hardware.dies_per_node}", question.steps.model.config, 1.0, question.drafts)
            raise _nothing_fits(question, layout, nodes or _NODES[-1])
        # no number of machines meets the SLO: the fewest ones that fit
        fitting = [(fitting[0][0], proven_candidates(question, fitting[0][0]))]
    count, candidates = fitting[-1]
    if nodes is None:
        count = min(c.nodes for c in candidates if c.verdict == candidates[0].verdict)
        candidates = [c for c in candidates if c.nodes <= count]
    best, trial = candidates[0], None
    if best.evidence is not NOBODY and not hardware.measured_on:
        trial = next(iter(experimental_candidates(question, count, candidates)), None)
    if trial is not None:  # worth a trial: its low end is better, or it alone meets the SLO
        low = trial.value * math.exp(-_half_widths(question, trial, _near(question, trial))["tok_s"])
        worth = trial.rank < best.rank or (trial.rank == best.rank and low > best.value)
        trial = trial if worth else None
    return _plan(question, count, best, candidates[1:], trial)


def _plan(
    question: Question, nodes: int, best: Candidate, others: list[Candidate], trial: Candidate | None = None
) -> Plan:
    near, sentences = _near(question, best), _notes(question, nodes, best, others)
    return Plan(question, nodes, best, others, trial, _numbers(question, best, near), near, sentences)


def _near(question: Question, candidate: Candidate) -> tuple[float, Case] | None:
    """The nearest public result and its distance; None for a measured machine."""
    hardware = question.steps.hardware
    if hardware.measured_on is not None:
        return None
    return nearest(question.steps.model, hardware.name, candidate.layout, question.workload)


def _half_widths(question: Question, candidate: Candidate, near: tuple[float, Case] | None) -> dict[str, float]:
    """Half widths of the bands on a logarithmic scale, by output."""
    away = near[0] if near else 0.0
    spread = question.acceptance.spread if candidate.layout.decode.drafts else 0.0
    width = {name: half_width(name, away) for name in OUTPUTS}
    return {name: width[name] if name == "ttft" else math.hypot(width[name], spread) for name in OUTPUTS}


def _numbers(question: Question, best: Candidate, near: tuple[float, Case] | None) -> dict[str, Range]:
    """Figures with their ranges; the range of the memory counts for the speed."""
    steps, load, model, p = question.steps, best.load, question.steps.model, best.prediction
    ends = [predict(steps, best.layout, load, question.acceptance, end) or p for end in memory.ENDS]
    widths, free = _half_widths(question, best, near), p.memory
    basis = "measured" if steps.hardware.constants else "fitted" if has_rows(model) else "guessed"

    def band(output: str, *values: float) -> Range:
        """The range of a speed; the first value is the prediction."""
        factor = math.exp(widths[output])
        return Range(values[0], min(values) / factor, max(values) * factor, basis)

    def exact(value: float, kind: str = "derived") -> Range:
        return Range(value, value, value, kind)

    def guessed(value: Callable[[End], float]) -> Range:
        low, middle, high = map(value, memory.ENDS)
        return Range(middle, low, high, "guessed")

    if model.stored_bytes is not None:
        total = exact(model.stored_bytes, "measured")
    else:  # msModelSlim's head in fp32, and no copies of the MTP layer
        middle, low, high = (weights.stored_bytes(model, *a) for a in ((False, True), (False, False), (True, True)))
        total = Range(middle, low, high, "derived")
    engine, positions = replace(best.layout.decode, sequences=1_000_000), model.config.max_position_embeddings
    ranks = engine.dp * best.layout.replicas
    return {
        "weight_bytes_total": total,
        "weight_bytes_per_die": exact(float(sum(free.weights.values()))),
        "kv_bytes_per_token": exact(free.bytes_per_token),
        "state_bytes_per_request": exact(free.state_tokens * free.bytes_per_token),
        "kv_budget_bytes_per_die": guessed(lambda end: free.budgets[end]),
        "max_context_tokens": guessed(lambda end: max(0, min(positions, free.tokens(end) - free.state_tokens))),
        "max_concurrency": guessed(lambda end: math.floor(ranks * memory.most_requests(free, engine, load, end))),
        "tpot_ms": band("tpot", 1e3 * p.tpot, *(1e3 * end.tpot for end in ends)),
        "ttft_ms": band("ttft", 1e3 * p.ttft, *(1e3 * end.ttft for end in ends)),
        "output_tokens_per_s": band("tok_s", p.output_per_second, *(end.output_per_second for end in ends)),
    }


def _notes(question: Question, nodes: int, best: Candidate, others: list[Candidate]) -> list[str]:
    """Assumptions, enough or idle machines, limits on the number of requests, and known faults."""
    load, layout, hardware, model = question.workload, best.layout, question.steps.hardware, question.steps.model
    p, prefill, pod, rules = best.prediction, layout.prefill or layout.decode, hardware.links.pod, model.rules
    slots = layout.decode.sequences * layout.decode.dp * layout.replicas
    sentences = (
        *((bool(text), f"little data: {text}") for text in (hardware.little_data, rules and rules.little_data)),
        (not has_rows(model),
         f"no public speed of {model.config.spec.label} on an NPU is fitted: the speeds are guessed"),
        (pod is not None and best.nodes > 1,
         f"assumed: the nodes are one supernode (UB, up to {pod and pod.nodes} nodes); otherwise --hardware a3-roce"),
        _enough(nodes, best, others),
        (best.verdict == SHEDS,
         f"within the SLO it serves {best.admitted or 0:g} of {load.concurrency:g} clients, and the numbers are for"
         " these: admit no more at the router, or add machines"),
        (best.unsure, "it fits only if graphs, buffers and fragmentation take less than the high end of their range"),
        (p.bound == "memory", f"cache memory holds {p.running:.0f} requests at a time, the others wait"),
        (p.bound == "seqs",
         f"--max-num-seqs {layout.decode.sequences} admits {slots} requests, the others wait"),
        (load.fresh > LONG_PROMPT and prefill.tp > 1 and not prefill.dsa_cp,
         "without DSA-CP every die scores the whole prompt: dsa_cp=1 in --layout divides that"),
        (layout.decode.dcp > 1, "DCP switches the prefix cache off: hits are not counted"),
        *((True, f"known fault: {text}") for text in faults(model, layout)),
    )  # fmt: skip
    return [text for applies, text in sentences if applies]


def _enough(nodes: int, best: Candidate, others: list[Candidate]) -> tuple[bool, str]:
    enough = [c for c in others if c.rank == best.rank and c.nodes < best.nodes and c.value >= EQUAL * best.value]
    small = min(enough, key=lambda c: (c.nodes, c.order), default=best)
    machines = "one machine is" if small.nodes == 1 else f"{small.nodes} machines are"
    share = "" if small is best else f": {small.layout} has {100 * small.value / best.value:.0f} % of its throughput"
    idle = f"; {nodes - best.nodes} stay idle" if best.nodes < nodes else ""
    return small.nodes < nodes, f"{machines} enough for this load{share}{idle}"


def _nothing_fits(question: Question, layout: Layout, nodes: int) -> PlanError:
    """The error about the engine of a layout that misses most bytes."""
    steps, load = question.steps, question.workload
    needs = []
    for role, engine in layout.engines.items():
        free = steps.memory(engine, role == "decode", role != "server")
        need = (memory.pages(load.prompt + load.output) + free.state_tokens) * free.bytes_per_token
        needs.append((free.budget - need, engine, free, need))
    _, engine, free, need = min(needs, key=lambda item: item[0])
    return PlanError(
        f"{steps.model.name} {steps.model.quantization} does not fit {nodes} x {steps.hardware.name}: "
        f"{engine}, weights {sum(free.weights.values()) / 1e9:.1f} GB of {free.usable / 1e9:.1f} GB usable per die "
        f"leave {free.budget / 1e9:.1f} GB, one request needs {need / 1e9:.1f} GB",
        "use more nodes, a smaller --quant, or a shorter context",
    )
