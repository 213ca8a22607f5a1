"""Two deployments of unequal size behind one router, where no number of like engines fills the cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from glm5_ascend.plan.efficiency import Efficiencies, fitted
from glm5_ascend.plan.hardware import Cluster
from glm5_ascend.plan.layouts import Options
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.search import Candidate, search
from glm5_ascend.plan.workload import Slo, Workload

#: Nodes up to which two parts are tried: beyond, like engines fill a cluster but for little.
MOST_NODES = 8
#: Times the clients are divided anew, by what the parts answered.
_ROUNDS = 3


@dataclass(frozen=True)
class Part:
    """Some nodes with a layout of their own, and the clients that the router sends them."""

    nodes: int
    clients: int
    found: Candidate


def unequal(
    model: PlannedModel, cluster: Cluster, workload: Workload, slo: Slo, efficiency: Efficiencies, options: Options,
    best: Candidate,
) -> tuple[Part, Part] | None:  # fmt: skip
    """The two parts that together answer most, if by more than the error of a prediction than `best` does.

    A workload with a rate or an end is not divided: there latency decides.
    """
    if not 3 <= cluster.nodes <= MOST_NODES or workload.rate or workload.requests or workload.concurrency < 2:
        return None
    sure = math.exp(fitted().bands["tok_s"] * fitted().median_error["tok_s"])

    def answered(parts: tuple[Part, Part]) -> float:
        return sum(part.found.prediction.output_per_second for part in parts)

    pairs = [
        pair
        for few in range(1, (cluster.nodes + 1) // 2)
        if (pair := _divided(model, cluster, few, workload, slo, efficiency, options))
        and all(slo.met(part.found.prediction.tpot, part.found.prediction.ttft) for part in pair)
    ]
    top = max(pairs, key=answered, default=None)
    return top if top and answered(top) > sure * best.prediction.output_per_second else None


def told(parts: tuple[Part, Part]) -> str:
    """In words for a plan."""
    each = " and ".join(
        f"{part.clients} clients to {part.nodes} node{'s' if part.nodes > 1 else ''} with {part.found.layout}"
        for part in parts
    )
    together = sum(part.found.prediction.output_per_second for part in parts)
    return f"two unequal deployments answer more: {each}, {together:,.0f} tokens/s; plan each with its own --nodes"


def _divided(
    model: PlannedModel, cluster: Cluster, few: int, workload: Workload, slo: Slo, efficiency: Efficiencies,
    options: Options,
) -> tuple[Part, Part] | None:  # fmt: skip
    """`few` nodes and the rest; a router that asks the least loaded gives each the clients that it can answer."""

    def parts(share: float) -> Iterator[Part]:
        clients = min(max(1, round(share * workload.concurrency)), int(workload.concurrency) - 1)
        for nodes, own in ((few, clients), (cluster.nodes - few, int(workload.concurrency) - clients)):
            load = replace(workload, concurrency=own)
            for found in search(model, replace(cluster, nodes=nodes), load, slo, efficiency, options)[:1]:
                yield Part(nodes, own, found)

    share, pair = few / cluster.nodes, list[Part]()
    for _ in range(_ROUNDS):
        pair = list(parts(share))
        if len(pair) < 2:
            return None
        ours, theirs = (part.found.prediction.output_per_second for part in pair)
        share = ours / (ours + theirs)
    return pair[0], pair[1]
