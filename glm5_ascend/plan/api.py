"""The function `plan`, which the command calls, and its answer: layouts, and numbers with ranges; as JSON, too."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from glm5_ascend.errors import PlanError
from glm5_ascend.options import with_options
from glm5_ascend.plan import weights
from glm5_ascend.plan.evidence import alike, medians
from glm5_ascend.plan.hardware import fitted, load_hardware
from glm5_ascend.plan.inputs import Slo, pairs, parse_workload, read_option
from glm5_ascend.plan.layout import Engine, check_engine, parse_layout
from glm5_ascend.plan.memory import ENDS, End, pages
from glm5_ascend.plan.model import from_directory, named
from glm5_ascend.plan.options import PlanOptions
from glm5_ascend.plan.predict import predict
from glm5_ascend.plan.proven import DERIVED, UNPROVEN, faults, proven_layouts
from glm5_ascend.plan.search import MEETS, NEARLY_ALL, SHEDS, Candidate, Question, best_layouts, evaluate
from glm5_ascend.plan.steps import Duration, Steps


@with_options(PlanOptions)
def plan(options: PlanOptions) -> Plan:
    """Plan a deployment on paper: memory, layout, latency and throughput, each with a range; raises PlanError,
    ConfigError or CheckpointError if an option is wrong, or nothing fits."""
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
    positions = model.config.max_position_embeddings
    longest = min(5000, positions)  # without --workload: as much of the usual load as the model takes
    usual = f"in={longest * 7 // 10},out={max(1, longest * 3 // 10)},concurrency=16"
    workload = parse_workload(usual if options.workload is None else options.workload)
    slo = Slo() if options.slo is None else read_option("--slo", Slo, pairs("--slo", options.slo))
    context = workload.prompt + workload.output
    if context > positions:
        raise PlanError(f"--workload: {context} tokens, {model.name} has {positions} positions", "shorten in= or out=")
    if options.acceptance is not None and not 1 <= options.acceptance <= 4:
        raise PlanError(f"--acceptance {options.acceptance:g}: must be 1 to 4", "the mean length in vLLM's log")
    if options.mtp is not None:
        check_engine(Engine(1, drafts=options.mtp), model.config, hardware)
    steps = Steps(model, hardware, fitted().constants)
    question = Question(steps, workload, slo, options.acceptance, options.mtp)
    nodes, candidates, trial = _answers(question, options.layout, options.nodes)
    return Plan(question, nodes, candidates[0], candidates[1:], trial)


def _answers(question: Question, text: str | None, nodes: int | None) -> tuple[int, list[Candidate], Candidate | None]:
    """Number of machines, layouts, and one worth a trial, as `best_layouts` returns them; PlanError if nothing fits."""
    hardware, config, load = question.hardware, question.model.config, question.workload
    clients = 1.0 if text is None else load.concurrency
    layout = parse_layout(f"tp={hardware.dies_per_node}" if text is None else text, config, clients, question.drafts)
    if text is None:
        count, candidates, trial = best_layouts(question, nodes)
    else:
        for engine in layout.engines.values():
            check_engine(engine, config, hardware)
        needed, trial = layout.nodes(hardware), None
        if nodes is not None and nodes < needed:
            raise PlanError(f"--layout {text}: takes {needed} x {hardware.name}, --nodes is {nodes}", "more nodes")
        sources = dict(proven_layouts(question.model, hardware, needed, load, question.drafts))
        same = next((e for other, e in sources.items() if str(other) == str(layout)), UNPROVEN)  # with other settings
        if same.source:
            same = replace(same, tag=DERIVED, changes=("other settings",), profile=None, fits=False)
        best = evaluate(question, layout, sources.get(layout, same), shed=False)
        count, candidates = nodes or needed, [best] if best else []
    if candidates:
        return count, candidates, trial
    roles = layout.engines.items()
    dies = [(question.steps.memory(engine, role == "decode", role != "server"), engine) for role, engine in roles]
    free, engine = min(dies, key=lambda die: die[0].budgets["value"])
    need = (pages(load.prompt + load.output) + free.state_tokens) * free.bytes_per_token
    raise PlanError(
        f"{question.model.name} {question.model.quantization} does not fit {count} x {hardware.name}: "
        f"{engine}, weights {sum(free.weights.values()) / 1e9:.1f} GB of {free.usable / 1e9:.1f} GB usable per die "
        f"leave {free.budgets['value'] / 1e9:.1f} GB, one request needs {need / 1e9:.1f} GB",
        "use more nodes, a smaller --quant, or a shorter context",
    )


@dataclass(frozen=True)
class Range:
    """A number, its range, and its basis: measured | derived | fitted | guessed."""

    value: float
    low: float
    high: float
    basis: str = "derived"

    def text(self, scale: float = 1.0, digits: int = 0) -> str:
        """`12 (10 to 14)`, or the number alone if it has no range."""
        value, low, high = (f"{scale * x:,.{digits}f}" for x in (self.value, self.low, self.high))
        return value if low == high else f"{value} ({low} to {high})"

    def to_json(self) -> dict[str, float | str]:
        """Bytes and tokens as integers, other numbers with five digits."""
        ends = {"value": self.value, "low": self.low, "high": self.high}
        whole = {name: int(x) for name, x in ends.items() if x == int(x) and abs(x) > 1000}
        return {name: float(f"{x:.5g}") for name, x in ends.items()} | whole | {"basis": self.basis}


@dataclass(frozen=True)
class Plan:
    """The answer to a question: number of machines, the first layout, others with a source, best first, and one that
    nobody is known to run, if it is worth a trial; the profile with these engines, and commands that run it."""

    question: Question
    nodes: int
    best: Candidate
    others: list[Candidate]
    experimental: Candidate | None = None
    profile: str | None = None
    lines: tuple[str, ...] = ()

    @cached_property
    def numbers(self) -> dict[str, Range]:
        """Figures with their ranges; the range of the memory counts for the speed."""
        question, layout, load, p = self.question, self.best.layout, self.best.load, self.best.prediction
        ends = [predict(question.steps, layout, load, question.accepted, (end,)) or p for end in ENDS]
        model, widths, die = question.model, question.half_widths(layout), p.memory

        def band(output: str, scale: float = 1.0) -> Range:
            basis = "fitted" if output in self.known else "guessed"
            values, factor = [scale * getattr(prediction, output) for prediction in ends], math.exp(widths[output])
            return Range(scale * getattr(p, output), min(values) / factor, max(values) * factor, basis)

        def exact(value: float) -> Range:
            return Range(value, value, value)

        def guessed(value: Callable[[End], float]) -> Range:
            low, middle, high = map(value, ENDS)
            return Range(middle, low, high, "guessed")

        if model.stored_bytes is not None:
            total = replace(exact(model.stored_bytes), basis="measured")
        else:  # msModelSlim's head in fp32, and no copies of the MTP layer
            middle, low, high = (weights.stored_bytes(model, *a) for a in ((False, True), (False, False), (True, True)))
            total = Range(middle, low, high)
        engine, positions = replace(layout.decode, sequences=1_000_000), model.config.max_position_embeddings
        ranks = engine.dp * layout.replicas
        return {
            "weight_bytes_total": total,
            "weight_bytes_per_die": exact(float(sum(die.weights.values()))),
            "kv_bytes_per_token": exact(die.bytes_per_token),
            "state_bytes_per_request": exact(die.state_tokens * die.bytes_per_token),
            "kv_budget_bytes_per_die": guessed(lambda end: die.budgets[end]),
            "max_context_tokens": guessed(lambda end: max(0, min(positions, die.tokens(end) - die.state_tokens))),
            "max_concurrency": guessed(lambda end: math.floor(ranks * die.most_requests(engine, load, end))),
            "tpot_ms": band("tpot", 1e3),
            "ttft_ms": band("ttft", 1e3),
            "output_tokens_per_s": band("tok_s"),
        }

    @cached_property
    def known(self) -> dict[str, tuple[float, int]]:
        """Median error and number of public results of the first answer's kind, unseen by the fit, by output."""
        question = self.question
        return medians(alike(question.model, question.hardware, self.best.layout, question.workload))

    @cached_property
    def step(self) -> Duration:
        """A decode step of the first answer."""
        p, load = self.best.prediction, self.question.workload
        return self.question.steps.decode(self.best.layout.decode, p.batch, load.prompt + load.output / 2, p.ranks)

    @property
    def within_slo(self) -> bool:
        return self.best.verdict == MEETS

    @property
    def title(self) -> str:
        """Model, weights and machines."""
        model, hardware = self.question.model, self.question.hardware
        dies = self.nodes * hardware.dies_per_node
        return f"{model.name} {model.quantization} on {self.nodes} x {hardware.title} ({dies} dies)"

    @property
    def verdict(self) -> str:
        """Says if the printed latencies meet the SLO."""
        if self.best.verdict == SHEDS:
            clients = f"{self.best.admitted:g} of {self.question.workload.concurrency:g} clients"
            return f"met for {clients}, and the numbers are for these: admit no more at the router, or add machines"
        if self.best.verdict != MEETS:
            return "not met (limits on latency, or rate=); this is the closest layout that was evaluated"
        if self.question.slo.excess(*(self.numbers[name].high / 1e3 for name in ("tpot_ms", "ttft_ms"))) > 1.0:
            return "met by the prediction, not at the slow end of its range"
        return "met, also at the slow end of the range"

    @cached_property
    def notes(self) -> list[str]:
        """Assumptions, enough or idle machines, limits on the number of requests, and known faults."""
        model, hardware, best, layout = self.question.model, self.question.hardware, self.best, self.best.layout
        p, pod, rules = best.prediction, hardware.links.pod, model.rules
        slots = layout.decode.sequences * layout.decode.dp * layout.replicas
        sentences = (
            *((bool(text), f"little data: {text}") for text in (hardware.little_data, rules and rules.little_data)),
            ("tok_s" not in self.known,
             f"no public speed of {model.config.spec.label} of this kind (machines, PD, hits) is fitted: guessed"),
            (p.hit < 0.99 * best.load.prefix_hit * (layout.decode.dcp == 1),
             f"the caches of a rank do not hold {best.load.different} prefixes: {100 * p.hit:.0f} % of a prompt is"
             " found; hits=host or hits=pool keeps all, fewer prefixes= if clients share them"),
            (pod is not None and best.nodes > 1,
             f"assumed: the nodes are one supernode (UB, up to {pod and pod.nodes} nodes); otherwise"
             " --hardware a3-roce"),
            self._enough(),
            (best.unsure,
             "it fits only if graphs, buffers and fragmentation take less than the high end of their range"),
            (p.bound == "memory", f"cache memory holds {p.batch * p.ranks:.0f} requests at a time, the others wait"),
            (p.bound == "seqs",
             f"--max-num-seqs {layout.decode.sequences} admits {slots} requests, the others wait"),
            *((True, f"known fault: {text}") for text in faults(model, layout)),
        )  # fmt: skip
        return [text for applies, text in sentences if applies]

    def doubt(self, faster: Candidate) -> str:
        """Why a faster layout is not the first answer."""
        if faster.unsure or faster.nodes > self.best.nodes:
            return "its memory is unsure" if faster.unsure else "it takes more machines"
        model, best = self.question.model, self.best
        more = len(faults(model, faster.layout)) > len(faults(model, best.layout))
        return f"within 5 %, and with more {'known faults' if more else 'changes to its source'}"

    def _enough(self) -> tuple[bool, str]:
        best = self.best
        fewer = (c for c in self.others if c.rank == best.rank and c.nodes < best.nodes)
        enough = [c for c in fewer if c.value >= NEARLY_ALL * best.value]
        small = min(enough, key=lambda c: (c.nodes, c.order), default=best)
        machines = "one machine is" if small.nodes == 1 else f"{small.nodes} machines are"
        share = f"{small.layout} has {100 * small.value / best.value:.0f} % of its throughput"
        idle = f"; {self.nodes - best.nodes} stay idle" if best.nodes < self.nodes else ""
        text = f"{machines} enough for this load{'' if small is best else ': ' + share}{idle}"
        return small.nodes < self.nodes, text

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `--json`: sizes in bytes, times in ms; `layout.text` is a value of --layout."""
        best, p, model = self.best, self.best.prediction, self.question.model
        distance, case = self.question.nearest(best.layout)
        return {
            "schema_version": 2, "command": "plan", "ok": self.within_slo, "exit_code": 0,
            "model": model.name, "quantization": model.quantization, "cache": model.cache,
            "hardware": self.question.hardware.name, "nodes": self.nodes,
            **_candidate(best), **{name: value.to_json() for name, value in self.numbers.items()},
            "engines": {
                role: {"tp": e.tp, "dp": e.dp, "pp": e.pp, "ep": e.ep, "dcp": e.dcp, "mtp": e.drafts}
                for role, e in best.layout.engines.items()
            },
            "bound": p.bound, "running": round(p.running, 1), "prefix_hit": round(p.hit, 3),
            "decode_step_ms": {name: round(1e3 * s, 4) for name, s in self.step.by_op.items()},
            "memory_per_die": {"total": p.memory.total, "usable": p.memory.usable,
                               "parts": {k: round(v) for k, v in p.memory.parts.items()}, "weights": p.memory.weights},
            "slo_met": self.within_slo, "notes": self.notes,
            "nearest": {"id": case.row.id, "distance": round(distance, 2), "measured": case.measured},
            "others": [_candidate(c) for c in self.others[:8]],
            "experimental": _candidate(self.experimental) if self.experimental else None,
            "profile": self.profile, "command_lines": list(self.lines),
        }  # fmt: skip


def _candidate(candidate: Candidate) -> dict[str, Any]:
    evidence, p = candidate.evidence, candidate.prediction
    numbers = {"output_tokens_per_s": p.tok_s, "tpot_ms": 1e3 * p.tpot, "ttft_ms": 1e3 * p.ttft}
    return {
        "layout": {"name": str(candidate.layout), "text": candidate.layout.text(), "nodes": candidate.nodes},
        "evidence": {name: getattr(evidence, name) for name in ("tag", "source", "changes", "sister")},
        "clients_within_slo": candidate.admitted,
        **{name: float(f"{value:.5g}") for name, value in numbers.items()},
    }
