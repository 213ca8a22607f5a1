"""The layouts that an engine would run on a cluster: what `search.py` chooses from.

Experts are divided whole: an engine's dies divide them. Numbers of engines are taken from one list that does not depend
on the cluster, so that what a cluster may run a larger one may run too; nodes may stay idle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from glm5_ascend.checkpoint.types import W4A8_DYNAMIC
from glm5_ascend.plan.hardware import Cluster
from glm5_ascend.plan.layout import Engine, Layout, exchange_buffer_mb
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.timing import PromptTime, Timing
from glm5_ascend.plan.workload import Acceptance, Workload, accepted

#: What everyone runs.
PROVEN_DRAFTS = 3
#: What the official prefill nodes run with (CI of vllm-ascend).
PREFILL_TOKENS, PREFILL_BUFFER_MB, PREFILL_DRAFTS, PREFILL_SEQUENCES = 8192, 400, 1, 64
MOST_SEQUENCES = 256
#: Kinds of prefill engines that are tried; share of its time that a prefill rank may be busy.
PREFILL_KINDS, BUSY = 4, 0.7


@dataclass(frozen=True)
class Options:
    """What the user fixed; None: the search decides."""

    drafts: int | None = None
    sequences: int | None = None
    utilization: float = 0.95
    batched_tokens: int = 4096
    buffer_mb: int = 200
    acceptance: float | Acceptance | None = None
    skew: float = 1.0


def counts(most: int) -> list[int]:
    """Numbers of engines that are tried, up to `most` of them: 1, 2, 3, 4, 6, 8, 12, ... and `most` itself."""
    found = {2**i for i in range(13)} | {3 * 2**i for i in range(12)}
    return sorted({n for n in found if n <= most} | ({most, most - 1} - {0, -1}))


def divides_prefill(model: PlannedModel) -> bool:
    """Whether DSA-CP is planned for engines that draft: it needs FlashComm, which W4A8's drafts do not go with."""
    return model.expert_type != W4A8_DYNAMIC


def engine(
    model: PlannedModel, tp: int, dp: int, workload: Workload, replicas: int, options: Options, dcp: int = 1
) -> Engine:
    """An engine with the number of sequences its share of the workload needs."""
    needed = math.ceil(workload.concurrency / replicas / dp)
    one = Engine(
        tp, dp, dcp, PROVEN_DRAFTS if options.drafts is None else options.drafts,
        options.sequences or max(1, min(MOST_SEQUENCES, needed)), options.batched_tokens, options.utilization,
        options.buffer_mb, split_prefill=tp > 1 and divides_prefill(model), skew=options.skew,
    )  # fmt: skip
    return replace(one, buffer_mb=max(options.buffer_mb, exchange_buffer_mb(model.config, one)))


def prefill_engine(model: PlannedModel, tp: int, dp: int, options: Options, pp: int = 1) -> Engine:
    """An engine that only prefills, as the official ones do: with DSA-CP, for W4A8 too."""
    return Engine(
        tp, dp, 1, PREFILL_DRAFTS if options.drafts != 0 else 0, PREFILL_SEQUENCES, PREFILL_TOKENS,
        options.utilization, PREFILL_BUFFER_MB, split_prefill=tp > 1, eager_decode=True,
        pp=pp, skew=options.skew,
    )  # fmt: skip


def decode_engine(found: Engine) -> Engine:
    """The same as one that only decodes: its steps hold the drafts of its requests and no prompt."""
    return replace(found, batched_tokens=found.sequences * (found.drafts + 1), split_prefill=False)


def sizes(model: PlannedModel, cluster: Cluster) -> list[int]:
    """Dies of an engine: parts of a node where experts are fewer than its dies, else whole nodes."""
    experts, own = model.config.n_routed_experts, cluster.hardware.dies_per_node
    every = [dies for dies in range(1, min(experts, cluster.dies) + 1) if experts % dies == 0]
    return [dies for dies in every if dies % own == 0 or (own > experts and own % dies == 0)]


def parallel(model: PlannedModel, cluster: Cluster, dies: int) -> list[int]:
    """Tensor-parallel sizes of an engine of so many dies: within a node, and dividing the heads."""
    heads, own = model.config.num_attention_heads, cluster.hardware.dies_per_node
    return [tp for tp in range(1, min(dies, own) + 1) if dies % tp == 0 and heads % tp == 0 and own % tp == 0]


def together(model: PlannedModel, cluster: Cluster, workload: Workload, options: Options) -> Iterator[Layout]:
    """Engines that do everything, side by side; with and without DCP, and with every expert cut over all dies."""
    for dies in sizes(model, cluster):
        for replicas in counts(cluster.dies // dies):
            for tp in parallel(model, cluster, dies):
                for dcp in (1, tp) if tp > 1 else (1,):
                    one = engine(model, tp, dies // tp, workload, replicas, options, dcp)
                    yield Layout(one, None, replicas)
                    if one.split_prefill:  # whole projections on every die: where memory is short, not
                        yield Layout(replace(one, split_prefill=False), None, replicas)
            if 1 < dies <= 16 and dies in parallel(model, cluster, dies):
                cut = engine(model, dies, 1, workload, replicas, options)
                yield Layout(replace(cut, expert_parallel=False, split_prefill=False), None, replicas)


def apart(
    model: PlannedModel, cluster: Cluster, workload: Workload, options: Options, timing: Timing
) -> Iterator[Layout]:
    """Engines that prefill and engines that decode, as many of each as the other needs."""
    own = cluster.hardware.dies_per_node
    if cluster.nodes < 2:
        return
    context = workload.prompt + workload.output / 2
    steps = (workload.output - 1) / accepted(PROVEN_DRAFTS, options.acceptance)
    for ahead in _prefill_kinds(model, cluster, workload, options, timing):
        needed = timing.prompt(ahead, workload.fresh, workload.prompt - workload.fresh, float(ahead.dp)).tight
        for dies in (d for d in sizes(model, cluster) if d % own == 0 and d + ahead.dies <= cluster.dies):
            most = (cluster.dies - ahead.dies) // dies
            for tp in parallel(model, cluster, dies):
                for replicas in counts(most):
                    behind = decode_engine(engine(model, tp, dies // tp, workload, replicas, options))
                    share = workload.concurrency / replicas / behind.dp
                    seconds = max(1e-9, steps * timing.at(behind, share, context))
                    rate = min(workload.concurrency / seconds, workload.rate or math.inf)
                    wanted = max(1, math.ceil(rate * needed / ahead.dp / BUSY))
                    room = (cluster.dies - replicas * dies) // ahead.dies
                    for prefills in {min(wanted, room), min(max(1, wanted // 2), room)}:
                        yield Layout(behind, ahead, replicas, prefills)


def _prefill_kinds(
    model: PlannedModel, cluster: Cluster, workload: Workload, options: Options, timing: Timing
) -> list[Engine]:
    """Of 1, 2 and 4 nodes each the engine with most prompts per second and the one that is quickest with one prompt."""
    own, experts, found = cluster.hardware.dies_per_node, model.config.n_routed_experts, list[Engine]()
    for dies in (n * own for n in (1, 2, 4)):
        kinds = []
        for tp in (t for t in (8, 16) if dies % t == 0 and own % t == 0 and model.config.num_attention_heads % t == 0):
            for pp in (1, 2):
                if (pp == 1 or dies == 2 * tp) and dies % (tp * pp) == 0 and experts % (dies // pp) == 0:
                    kinds.append(prefill_engine(model, tp, dies // tp // pp, options, pp))

        def times(one: Engine) -> PromptTime:
            return timing.prompt(one, workload.fresh, workload.prompt - workload.fresh, float(one.dp))

        if kinds:
            found.append(min(kinds, key=lambda one: times(one).tight / one.dp))
            found.append(min(kinds, key=lambda one: times(one).alone))
    return [one for one in dict.fromkeys(found) if one.dies < cluster.dies]
