"""Notes of a plan, and the error where nothing fits."""

from __future__ import annotations

from glm5_ascend.errors import PlanError
from glm5_ascend.plan import memory
from glm5_ascend.plan.evidence import has_rows
from glm5_ascend.plan.hardware import Cluster
from glm5_ascend.plan.layout import Layout
from glm5_ascend.plan.proven import faults
from glm5_ascend.plan.search import EQUAL, SHEDS, Candidate, Question

#: Prompt tokens from which the indexer takes a large part of a prefill.
LONG_PROMPT = 16_384


def notes(question: Question, cluster: Cluster, best: Candidate, others: list[Candidate]) -> list[str]:
    """Assumptions, enough or idle machines, limits on the number of requests, and known faults."""
    load, layout, hardware, model = question.workload, best.layout, cluster.hardware, question.steps.model
    p, prefill, pod, rules = best.prediction, layout.prefill or layout.decode, hardware.links.pod, model.rules
    slots = layout.decode.sequences * layout.decode.dp * layout.replicas
    sentences = (
        *((bool(text), f"little data: {text}") for text in (hardware.little_data, rules and rules.little_data)),
        (not has_rows(model),
         f"no public speed of {model.config.spec.label} on an NPU is fitted: the speeds are guessed"),
        (pod is not None and best.nodes > 1,
         f"assumed: the nodes are one supernode (UB, up to {pod and pod.nodes} nodes); otherwise --hardware a3-roce"),
        _enough(cluster, best, others),
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


def _enough(cluster: Cluster, best: Candidate, others: list[Candidate]) -> tuple[bool, str]:
    enough = [c for c in others if c.rank == best.rank and c.nodes < best.nodes and c.value >= EQUAL * best.value]
    small = min(enough, key=lambda c: (c.nodes, c.order), default=best)
    machines = "one machine is" if small.nodes == 1 else f"{small.nodes} machines are"
    share = "" if small is best else f": {small.layout} has {100 * small.value / best.value:.0f} % of its throughput"
    idle = f"; {cluster.nodes - best.nodes} stay idle" if best.nodes < cluster.nodes else ""
    return small.nodes < cluster.nodes, f"{machines} enough for this load{share}{idle}"


def nothing_fits(question: Question, layout: Layout, nodes: int) -> PlanError:
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
