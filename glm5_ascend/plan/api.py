"""The function `plan`, which the command calls."""

from __future__ import annotations

import math
from pathlib import Path

from glm5_ascend.errors import PlanError
from glm5_ascend.options import with_options
from glm5_ascend.plan.data_files import pairs, read_option
from glm5_ascend.plan.hardware import fitted, load_hardware
from glm5_ascend.plan.layout import Engine, Layout, check_engine, parse_layout
from glm5_ascend.plan.memory import pages
from glm5_ascend.plan.model import from_directory, named
from glm5_ascend.plan.options import PlanOptions
from glm5_ascend.plan.proven import DERIVED, NOBODY, Evidence, proven_layouts
from glm5_ascend.plan.result import Plan
from glm5_ascend.plan.search import MEETS, Candidate, Question, evaluate, experimental_candidates, proven_candidates
from glm5_ascend.plan.steps import Steps
from glm5_ascend.plan.workload import Slo, parse_workload

#: Numbers of machines that are tried without --nodes.
_NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@with_options(PlanOptions)
def plan(options: PlanOptions) -> Plan:
    """Plan a deployment on paper: memory, layout, latency and throughput, each with a range.

    Raises:
        PlanError, ConfigError, CheckpointError: an option is wrong, or nothing fits.
    """
    hardware = load_hardware(str(options.hardware))
    if options.directory is not None and options.model is not None:
        raise PlanError("both DIR and --model are given", "give one of them")
    if options.directory is None:
        model = named(options.model or "glm-5", options.quant, options.cache)
    else:
        model = from_directory(Path(options.directory), options.cache)
    if model.rules and model.rules.fp8 and not hardware.fp8:
        what = f"--quant {model.quantization}" if options.directory is None else f"{options.directory}: weights of FP8"
        raise PlanError(f"{what}: {hardware.title} does not multiply FP8", "--quant w8a8, or --hardware ascend-950pr")
    workload = parse_workload(options.workload)
    slo = read_option("--slo", Slo, pairs(options.slo)) if options.slo else Slo()
    context, positions = workload.prompt + workload.output, model.config.max_position_embeddings
    if context > positions:
        raise PlanError(f"--workload: {context} tokens, {model.name} has {positions} positions", "shorten in= or out=")
    if options.acceptance is not None and not 1 <= options.acceptance <= 4:
        raise PlanError(
            f"--acceptance {options.acceptance:g}: must be 1 to 4", "the mean accepted length in vLLM's log"
        )
    if options.mtp is not None:
        check_engine(Engine(1, drafts=options.mtp), model.config, hardware)
    steps = Steps(model, hardware, hardware.constants or fitted().constants)
    question = Question(steps, workload, slo, options.acceptance, options.mtp)
    if options.layout is not None:
        result = _evaluated(question, options.layout, options.nodes)
    else:
        result = _searched(question, options.nodes)
    if options.html is not None:
        from glm5_ascend.plan.report import write

        write(result, Path(options.html))
    return result


def _evaluated(question: Question, text: str, nodes: int | None) -> Plan:
    """The plan of the layout that the user gave."""
    hardware, model = question.hardware, question.model
    layout = parse_layout(text, model.config, question.workload.concurrency, question.drafts)
    for engine in layout.engines.values():
        check_engine(engine, model.config, hardware)
    needed = layout.nodes(hardware)
    if nodes is not None and nodes < needed:
        raise PlanError(f"--layout {text}: takes {needed} x {hardware.name}, --nodes is {nodes}", "more nodes")
    sources = dict(proven_layouts(model, hardware, needed, question.workload, question.drafts))
    same = next((e for other, e in sources.items() if str(other) == str(layout)), NOBODY)  # with other settings
    changed = Evidence(DERIVED, same.source, ("other settings",)) if same.source else NOBODY
    best = evaluate(question, layout, sources.get(layout, changed), shed=False)
    if best is None:
        raise _nothing_fits(question, layout, needed)
    return Plan(**vars(question), nodes=nodes or needed, best=best, others=[])


def _searched(question: Question, nodes: int | None) -> Plan:
    """The plan of the best layouts; without `nodes`, of the fewest machines that carry the load within the SLO."""
    hardware, fitting = question.hardware, list[tuple[int, list[Candidate]]]()
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
            layout = parse_layout(f"tp={hardware.dies_per_node}", question.model.config, 1.0, question.drafts)
            raise _nothing_fits(question, layout, nodes or _NODES[-1])
        # no number of machines meets the SLO: the fewest ones that fit
        fitting = [(fitting[0][0], proven_candidates(question, fitting[0][0]))]
    count, candidates = fitting[-1]
    if nodes is None:
        count = min(c.nodes for c in candidates if c.verdict == candidates[0].verdict)
        candidates = [c for c in candidates if c.nodes <= count]
    best, trial = candidates[0], None
    if best.evidence is not NOBODY:
        trial = next(iter(experimental_candidates(question, count, candidates)), None)
    if trial is not None:  # worth a trial: its low end is better, or it alone meets the SLO
        low = trial.value * math.exp(-question.half_widths(trial.layout)["tok_s"])
        if trial.rank > best.rank or (trial.rank == best.rank and low <= best.value):
            trial = None
    return Plan(**vars(question), nodes=count, best=best, others=candidates[1:], experimental=trial)


def _nothing_fits(question: Question, layout: Layout, nodes: int) -> PlanError:
    """The error about the engine of a layout with the least memory for its caches."""
    load, roles = question.workload, layout.engines.items()
    dies = [(question.steps.memory(engine, role == "decode", role != "server"), engine) for role, engine in roles]
    free, engine = min(dies, key=lambda die: die[0].budget)
    need = (pages(load.prompt + load.output) + free.state_tokens) * free.bytes_per_token
    return PlanError(
        f"{question.model.name} {question.model.quantization} does not fit {nodes} x {question.hardware.name}: "
        f"{engine}, weights {sum(free.weights.values()) / 1e9:.1f} GB of {free.usable / 1e9:.1f} GB usable per die "
        f"leave {free.budget / 1e9:.1f} GB, one request needs {need / 1e9:.1f} GB",
        "use more nodes, a smaller --quant, or a shorter context",
    )
