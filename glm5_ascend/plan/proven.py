"""Layouts that somebody runs, by their sources (profiles, documents, public runs), and copies of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from glm5_ascend.checkpoint.types import FLOAT, W4A8_DYNAMIC
from glm5_ascend.files.yaml_file import read_yaml
from glm5_ascend.plan.evidence import cases
from glm5_ascend.plan.hardware import Hardware, machine_type
from glm5_ascend.plan.inputs import Cache, Count, Keys, Workload, data_file
from glm5_ascend.plan.layout import Engine, Layout, needed_buffer_mb, parse_layout, sequences_for
from glm5_ascend.plan.model import PlannedModel, family, named

PROVEN, DERIVED, EXPERIMENTAL = "proven", "derived", "experimental"
#: More sequences per rank than any public run has are not derived from one, nor any more from one whose memory is full.
MAX_SEQUENCES, FULL = 64, 0.95
#: Contexts longer than the source's by a larger factor are not derived from it; drafts of almost all public runs.
LONGER, _USUAL_DRAFTS = 4, 3
#: Sizes that must be the source's.
_SIZES = ("model_type", "hidden_size", "num_hidden_layers", "n_routed_experts")


class ProvenKeys(Keys):  # a layout of data/proven.yaml
    source: str
    layout: str
    experts: str
    hardware: str
    nodes: Count
    context: Count
    models: tuple[str, ...]
    cache: Cache | None = None
    profile: str | None = None
    first: int = 0
    changes: tuple[str, ...] = ()


class ProvenFile(Keys):
    layouts: tuple[ProvenKeys, ...]


@dataclass(frozen=True)
class Evidence:
    """What is known about a layout: its source (profile, document or run) and what differs from it.

    Attributes:
        tag: proven | derived (copies behind a router, or sizes fitted to the load) | experimental.
        sister: other models of these sizes, or caches, with which the source runs it.
        profile: of deploy/, with these engines. fits: a public source runs it, whatever the planner's memory says.
    """

    tag: str = EXPERIMENTAL
    source: str = ""
    changes: tuple[str, ...] = ()
    sister: str = ""
    profile: str | None = None
    fits: bool = False

    def __str__(self) -> str:
        return "; ".join(
            filter(None, (self.source or "nobody is known to run it", self.sister, ", ".join(self.changes)))
        )


UNPROVEN = Evidence()


@functools.cache
def entries() -> tuple[ProvenKeys, ...]:
    """The documented layouts, and those of the public runs of vllm-ascend."""
    documented, quantizations = read_yaml(data_file("proven.yaml"), ProvenFile).layouts, family().quantizations
    runs = [
        ProvenKeys(
            source=f"{row.source.removesuffix(' configuration')}, {row.case}", layout=row.layout, experts=row.quant[:4],
            hardware=row.hardware, nodes=row.nodes, context=case.workload.prompt + case.workload.output,
            models=(row.model,), cache=row.cache or quantizations[row.quant].cache,
        )
        for case in cases() if case.whole for row in (case.row,)
    ]  # fmt: skip
    return (*documented, *runs)


def proven_layouts(
    model: PlannedModel, hardware: Hardware, nodes: int, workload: Workload, drafts: int | None
) -> Iterator[tuple[Layout, Evidence]]:
    """Layouts of every entry for these weights and machines: as they are (with --mtp's drafts), copied, and sized for
    the load."""
    config = model.config
    experts = {FLOAT: "bf16", W4A8_DYNAMIC: "w4a8"}.get(model.expert_type, "w8a8")
    context = workload.prompt + workload.output
    for entry in entries():
        same = entry.experts == experts and machine_type(entry.hardware) == machine_type(hardware.name)
        if not same or entry.nodes > nodes or not entry.first <= context <= LONGER * entry.context:
            continue
        if any(getattr(config, size) != getattr(named(entry.models[0], "bf16").config, size) for size in _SIZES):
            continue  # nobody runs a model of other sizes
        source = parse_layout(entry.layout, config, workload.concurrency)
        for count in {source.decode.drafts, _USUAL_DRAFTS} if drafts is None else {drafts}:
            layout, changes = _adapted(source, entry, model, context, count)
            for copy, copied in _copies(layout, nodes * hardware.dies_per_node):
                all_changes = (*changes, *copied)
                profile = entry.profile if all_changes == entry.changes else None
                fits = context <= entry.context and not entry.changes
                tag, sister = DERIVED if all_changes else PROVEN, _sister(entry, model)
                yield copy, Evidence(tag, entry.source, all_changes, sister, profile, fits)
                needed = min(sequences_for(workload.concurrency / copy.replicas, copy.decode.dp), MAX_SEQUENCES)
                if copy.decode.sequences < needed and copy.decode.utilization <= FULL:
                    more = f"--max-num-seqs {needed} instead of {copy.decode.sequences}"
                    larger = replace(copy, decode=with_sequences(model, copy.decode, needed, copy.prefill))
                    yield larger, Evidence(DERIVED, entry.source, (*all_changes, more), sister)


def _sister(entry: ProvenKeys, model: PlannedModel) -> str:
    other = "" if model.name in entry.models or model.stored_bytes else f"run with {', '.join(entry.models)}"
    cache = "" if entry.cache in (None, model.cache) else f"run with --cache {entry.cache}"
    return ", ".join(filter(None, (other, cache)))


def _adapted(
    layout: Layout, entry: ProvenKeys, model: PlannedModel, context: int, drafts: int
) -> tuple[Layout, tuple[str, ...]]:
    changes, decode, prefill = entry.changes, layout.decode, layout.prefill
    drafts = drafts if model.config.num_nextn_predict_layers else 0
    if drafts != decode.drafts:
        changes += (f"{drafts} drafts instead of {decode.drafts}",)
        decode = with_sequences(model, replace(decode, drafts=drafts), decode.sequences, prefill)
        prefill = replace(prefill, drafts=min(prefill.drafts, drafts)) if prefill else None
    if decode.index_cache and model.name not in entry.models:
        decode = replace(decode, index_cache=False)
        prefill = replace(prefill, index_cache=False) if prefill else None
    if context > entry.context:
        changes += (f"context longer than its {entry.context:,} tokens",)
    return replace(layout, decode=decode, prefill=prefill), changes


def _counts(limit: int) -> list[int]:
    counts = {2**i for i in range(13)} | {3 * 2**i for i in range(12)} | {limit}
    return sorted(n for n in counts if 1 <= n <= limit)


def _copies(layout: Layout, dies: int) -> Iterator[tuple[Layout, tuple[str, ...]]]:
    """Numbers of engines that fit the dies, and the change; from one that prefills for four to two for one."""
    prefill_dies = layout.prefill.dies if layout.prefill else 0
    for replicas in _counts((dies - prefill_dies) // layout.decode.dies):
        counts, change = [0], f"{replicas} copies behind a router"
        if prefill_dies:
            most = min((dies - replicas * layout.decode.dies) // prefill_dies, 2 * replicas)
            counts = [n for n in _counts(most) if 4 * n >= replicas]
        for n in counts:
            change = f"{n} prefill and {replicas} decode engines" if n else change
            yield replace(layout, replicas=replicas, prefills=n), (change,) * (replicas > 1 or n > 1)


def with_sequences(model: PlannedModel, engine: Engine, sequences: int, prefill: Engine | None) -> Engine:
    """The engine with another --max-num-seqs, and the buffers and batched tokens that it needs."""
    engine = replace(engine, sequences=sequences)
    tokens = sequences * (engine.drafts + 1) if prefill else max(engine.batched_tokens, sequences * (engine.drafts + 1))
    buffer = max(engine.buffer_mb, needed_buffer_mb(model.config, engine))
    return replace(engine, batched_tokens=tokens, buffer_mb=buffer)


def faults(model: PlannedModel, layout: Layout) -> list[str]:
    """Known faults of a layout, with the rules of deploy/rules.yaml and threads about them."""
    engines = layout.engines.values()
    all_faults = (
        (any(e.dcp > 1 and e.drafts for e in engines),
         "DCP with MTP: crashes (rule P63; vllm-ascend 16654, 14320; 13710 before 0.23.0), drifting answers"
         " (vllm 41623)"),
        (any(e.dcp > 1 for e in engines), "DCP: the prefix cache has no hits (rule P37; vllm-ascend 13750)"),
        (any(e.drafts and (e.flashcomm or e.dsa_cp) for e in engines) and model.expert_type == W4A8_DYNAMIC,
         "W4A8 with FlashComm, which DSA-CP needs in 0.23: lost drafts in 0.20, 0.21 (rule P7w; vllm-ascend 9803)"),
        (any(e.index_cache for e in engines),
         "IndexCache: layers reuse another layer's top-k; its effect on answers is not published"),
        (layout.prefill is not None, "PD: garbled answers are reported (vllm-ascend 16686, 16015)"),
    )  # fmt: skip
    return [text for applies, text in all_faults if applies]
