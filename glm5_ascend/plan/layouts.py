"""Layouts that an engine would accept on a cluster: the candidates of `search.py`.

An engine's dies divide the experts evenly. The numbers of engines come from one list that does not depend on the
cluster, so that a larger cluster can run every layout of a smaller one; nodes may stay idle.
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

#: Draft tokens of all public results.
PROVEN_DRAFTS = 3
#: Settings of the official prefill nodes (CI of vllm-ascend).
PREFILL_TOKENS, PREFILL_BUFFER_MB, PREFILL_DRAFTS, PREFILL_SEQUENCES = 8192, 400, 1, 64
MAX_SEQUENCES = 256
#: Share of its time that a prefill rank may be busy.
PREFILL_UTILIZATION = 0.7


@dataclass(frozen=True)
class SearchOptions:
    """Values that the user fixed; None: the search chooses."""

    drafts: int | None = None
    sequences: int | None = None
    acceptance: float | Acceptance | None = None


def engine_counts(limit: int) -> list[int]:
    """Numbers of engines to try, up to `limit`: 1, 2, 3, 4, 6, 8, 12, ... and `limit` itself."""
    counts = {2**i for i in range(13)} | {3 * 2**i for i in range(12)}
    return sorted({n for n in counts if n <= limit} | ({limit, limit - 1} - {0, -1}))


def plans_dsa_cp(model: PlannedModel) -> bool:
    """Check if DSA-CP is planned for engines that draft: it needs FlashComm, which fails with W4A8's drafts."""
    return model.expert_type != W4A8_DYNAMIC


def engine(
    model: PlannedModel, tp: int, dp: int, workload: Workload, replicas: int, options: SearchOptions, dcp: int = 1
) -> Engine:
    """An engine with as many sequences as its share of the workload needs."""
    needed = math.ceil(workload.concurrency / replicas / dp)
    candidate = Engine(
        tp=tp, dp=dp, dcp=dcp, drafts=PROVEN_DRAFTS if options.drafts is None else options.drafts,
        sequences=options.sequences or max(1, min(MAX_SEQUENCES, needed)), split_prefill=tp > 1 and plans_dsa_cp(model),
    )  # fmt: skip
    return replace(candidate, buffer_mb=max(candidate.buffer_mb, exchange_buffer_mb(model.config, candidate)))


def prefill_engine(tp: int, dp: int, options: SearchOptions, pp: int = 1) -> Engine:
    """An engine that only prefills, configured as the official ones: with DSA-CP, for W4A8 too."""
    return Engine(
        tp=tp, dp=dp, pp=pp, drafts=PREFILL_DRAFTS if options.drafts != 0 else 0, sequences=PREFILL_SEQUENCES,
        batched_tokens=PREFILL_TOKENS, buffer_mb=PREFILL_BUFFER_MB, split_prefill=tp > 1, eager_decode=True,
    )  # fmt: skip


def decode_engine(engine: Engine) -> Engine:
    """The engine without prefill: its steps hold the drafts of its requests and no prompt."""
    return replace(engine, batched_tokens=engine.sequences * (engine.drafts + 1), split_prefill=False)


def engine_sizes(model: PlannedModel, cluster: Cluster) -> list[int]:
    """Dies of an engine: parts of a node where there are fewer experts than its dies, else whole nodes."""
    experts, node = model.config.n_routed_experts, cluster.hardware.dies_per_node
    sizes = [dies for dies in range(1, min(experts, cluster.dies) + 1) if experts % dies == 0]
    return [dies for dies in sizes if dies % node == 0 or (node > experts and node % dies == 0)]


def tensor_parallel_sizes(model: PlannedModel, cluster: Cluster, dies: int) -> list[int]:
    """TP sizes of an engine of so many dies: within a node, and dividing the heads."""
    heads, node = model.config.num_attention_heads, cluster.hardware.dies_per_node
    return [tp for tp in range(1, min(dies, node) + 1) if dies % tp == 0 and heads % tp == 0 and node % tp == 0]


def aggregated(model: PlannedModel, cluster: Cluster, workload: Workload, options: SearchOptions) -> Iterator[Layout]:
    """Replicas of engines that prefill and decode; with and without DCP, and with every expert cut over all dies."""
    for dies in engine_sizes(model, cluster):
        for replicas in engine_counts(cluster.dies // dies):
            for tp in tensor_parallel_sizes(model, cluster, dies):
                for dcp in (1, tp) if tp > 1 else (1,):
                    candidate = engine(model, tp, dies // tp, workload, replicas, options, dcp)
                    yield Layout(candidate, None, replicas)
                    if candidate.split_prefill:  # DSA-CP keeps projections whole, which may not fit the memory
                        yield Layout(replace(candidate, split_prefill=False), None, replicas)
            if 1 < dies <= 16 and dies in tensor_parallel_sizes(model, cluster, dies):
                candidate = engine(model, dies, 1, workload, replicas, options)
                yield Layout(replace(candidate, expert_parallel=False, split_prefill=False), None, replicas)


def disaggregated(
    model: PlannedModel, cluster: Cluster, workload: Workload, options: SearchOptions, timing: Timing
) -> Iterator[Layout]:
    """Engines that prefill and engines that decode, with as many prefill engines as the decode engines need."""
    if cluster.nodes < 2:
        return
    node, context = cluster.hardware.dies_per_node, workload.prompt + workload.output / 2
    steps = (workload.output - 1) / accepted(PROVEN_DRAFTS, options.acceptance)
    for prefill in _prefill_engines(model, cluster, workload, options, timing):
        prompt = timing.prompt(prefill, workload.fresh, workload.prompt - workload.fresh, float(prefill.dp))
        for dies in (d for d in engine_sizes(model, cluster) if d % node == 0 and d + prefill.dies <= cluster.dies):
            for tp in tensor_parallel_sizes(model, cluster, dies):
                for replicas in engine_counts((cluster.dies - prefill.dies) // dies):
                    decode = decode_engine(engine(model, tp, dies // tp, workload, replicas, options))
                    per_rank = workload.concurrency / replicas / decode.dp
                    seconds = max(1e-9, steps * timing.at(decode, per_rank, context))
                    rate = min(workload.concurrency / seconds, workload.rate or math.inf)
                    needed = max(1, math.ceil(rate * prompt.packed / prefill.dp / PREFILL_UTILIZATION))
                    limit = (cluster.dies - replicas * dies) // prefill.dies
                    for prefills in {min(needed, limit), min(max(1, needed // 2), limit)}:
                        yield Layout(decode, prefill, replicas, prefills)


def _prefill_engines(
    model: PlannedModel, cluster: Cluster, workload: Workload, options: SearchOptions, timing: Timing
) -> list[Engine]:
    """For 1, 2 and 4 nodes: the engine with most prompts per second, and the one that is fastest with one prompt."""
    node, experts, heads = (
        cluster.hardware.dies_per_node,
        model.config.n_routed_experts,
        model.config.num_attention_heads,
    )

    def prompt_time(engine: Engine) -> PromptTime:
        return timing.prompt(engine, workload.fresh, workload.prompt - workload.fresh, float(engine.dp))

    selected = list[Engine]()
    for dies in (n * node for n in (1, 2, 4)):
        candidates = []
        for tp in (t for t in (8, 16) if dies % t == 0 and node % t == 0 and heads % t == 0):
            for pp in (1, 2):
                if (pp == 1 or dies == 2 * tp) and dies % (tp * pp) == 0 and experts % (dies // pp) == 0:
                    candidates.append(prefill_engine(tp, dies // tp // pp, options, pp))
        if candidates:
            selected.append(min(candidates, key=lambda engine: prompt_time(engine).packed / engine.dp))
            selected.append(min(candidates, key=lambda engine: prompt_time(engine).alone))
    return [engine for engine in dict.fromkeys(selected) if engine.dies < cluster.dies]
