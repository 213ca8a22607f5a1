"""Two deployments of unequal size behind one router, where equal engines do not fill the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from glm5_ascend.plan.efficiency import Efficiencies, typical_error
from glm5_ascend.plan.hardware import Cluster
from glm5_ascend.plan.layouts import SearchOptions
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.search import Candidate, search
from glm5_ascend.plan.workload import Slo, Workload

#: Largest cluster that is divided: equal engines fill larger ones almost completely.
MAX_NODES = 8
#: Times the clients are divided again by the throughput of the parts.
_ROUNDS = 3


@dataclass(frozen=True)
class Part:
    """Some nodes with their own layout, and the clients that the router sends to them."""

    nodes: int
    clients: int
    candidate: Candidate


def unequal(
    model: PlannedModel, cluster: Cluster, workload: Workload, slo: Slo, efficiency: Efficiencies,
    options: SearchOptions, best: Candidate,
) -> tuple[Part, Part] | None:  # fmt: skip
    """The two parts with the highest throughput, if it exceeds that of `best` by more than the error of a prediction.

    A workload with a rate or an end is not divided: there latency decides.
    """
    if not 3 <= cluster.nodes <= MAX_NODES or workload.rate or workload.requests or workload.concurrency < 2:
        return None
    pairs = [
        pair
        for nodes in range(1, (cluster.nodes + 1) // 2)
        if (pair := _divide(model, cluster, nodes, workload, slo, efficiency, options))
        and all(part.candidate.meets(slo) for part in pair)
    ]
    top = max(pairs, key=_throughput, default=None)
    return top if top and _throughput(top) > typical_error() * best.prediction.output_per_second else None


def describe(parts: tuple[Part, Part]) -> str:
    """One line about the two parts."""
    text = " and ".join(
        f"{part.clients} clients to {part.nodes} node{'s' if part.nodes > 1 else ''} with {part.candidate.layout}"
        for part in parts
    )
    return f"two unequal deployments are faster: {text}, {_throughput(parts):,.0f} tokens/s; plan each with its --nodes"


def _throughput(parts: tuple[Part, Part]) -> float:
    return sum(part.candidate.prediction.output_per_second for part in parts)


def _divide(
    model: PlannedModel, cluster: Cluster, nodes: int, workload: Workload, slo: Slo, efficiency: Efficiencies,
    options: SearchOptions,
) -> tuple[Part, Part] | None:  # fmt: skip
    """`nodes` nodes and the rest; a least-loaded router gives each part the clients that it can answer."""

    def parts(share: float) -> Iterator[Part]:
        total = int(workload.concurrency)
        clients = min(max(1, round(share * workload.concurrency)), total - 1)
        for part_nodes, part_clients in ((nodes, clients), (cluster.nodes - nodes, total - clients)):
            load = replace(workload, concurrency=part_clients)
            candidates = search(model, replace(cluster, nodes=part_nodes), load, slo, efficiency, options)
            if candidates:
                yield Part(part_nodes, part_clients, candidates[0])

    share, pair = nodes / cluster.nodes, list[Part]()
    for _ in range(_ROUNDS):
        pair = list(parts(share))
        if len(pair) < 2:
            return None
        first, second = (part.candidate.prediction.output_per_second for part in pair)
        share = first / (first + second)
    return pair[0], pair[1]
