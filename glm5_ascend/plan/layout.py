"""How a cluster is divided: engines with their parallel sizes and settings, and the text of `--layout`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from glm5_ascend.engine_lines import LINES, STABLE, EngineLine, exchange_buffer_mb
from glm5_ascend.errors import PlanError
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.plan.hardware import Hardware
from glm5_ascend.plan.inputs import Count, adapter, pairs, read_option

#: vllm-ascend refuses more draft tokens: drafts + 1 must be at most 16 (sfa_v1.py:240), with linear attention 8
#: (models/glm5next/kda.py:153).
MAX_DRAFTS, MAX_KDA_DRAFTS = 15, 7
#: Dies over which weights of msModelSlim may be cut without expert parallelism; settings that --layout does not have.
MAX_SLICES, _NO_TEXT = 16, {"line", "partition"}


@dataclass(frozen=True)
class Engine:
    """One pool of dies under one scheduler: `dp` ranks of `tp` dies in each of `pp` stages, over which its experts lie.

    Attributes:
        drafts: MTP tokens per step. sequences: --max-num-seqs. batched_tokens: --max-num-batched-tokens.
        utilization: --gpu-memory-utilization. buffer_mb: HCCL_BUFFSIZE. eager: decode without graphs.
        dsa_cp: DSA context parallelism: each die of a TP group prefills its share of the tokens.
        expert_parallel: false: every die holds a slice of every expert. partition: layers of each stage; empty: equal.
        index_cache: vllm-ascend's `use_index_cache`: three of four layers reuse another layer's top-k.
        flashcomm: its sequence parallelism. mlapo: its fused preprocessing. line: whose copies of weights are counted.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    tp: Count
    dp: Count = 1
    dcp: Count = 1
    drafts: Annotated[int, Field(alias="mtp", ge=0, le=1000)] = 3
    sequences: Annotated[Count, Field(alias="seqs")] = 32
    batched_tokens: Annotated[Count, Field(alias="tokens")] = 4096
    utilization: Annotated[float, Field(gt=0, le=1)] = 0.95
    buffer_mb: Count = 200
    dsa_cp: bool = False
    eager: bool = False
    pp: Count = 1
    expert_parallel: Annotated[bool, Field(alias="ep")] = True
    index_cache: bool = False
    flashcomm: bool = False
    mlapo: bool = True
    line: EngineLine = STABLE
    partition: tuple[int, ...] = ()

    def stages(self, config: ModelConfig) -> list[range]:
        """Main layers of each pipeline stage: those of the partition (PlanError: of other layers), or equal parts that
        begin with an indexer (P66). The first stage has the embedding, the last one head and MTP layer."""
        layers, (base, rest) = config.num_hidden_layers, divmod(config.num_hidden_layers, self.pp)
        equal = (base + (self.pp - 1 - rest <= stage < self.pp - 1) for stage in range(self.pp - 1))
        starts = [next((i for i in range(s, layers) if config.has_indexer(i)), s) for s in accumulate(equal)]
        parts = self.partition or tuple(end - start for start, end in pairwise([0, *starts, layers]))
        if len(parts) != self.pp or sum(parts) != layers:
            text = ",".join(map(str, parts))
            raise PlanError(f"layers {text}: not {self.pp} stages of {layers} layers in all", "one number per stage")
        return [range(*bounds) for bounds in pairwise(accumulate(parts, initial=0))]

    @property
    def ep(self) -> int:
        """Dies that share the experts: with --enable-expert-parallel all dies of the engine (of a stage)."""
        return self.tp * self.dp if self.expert_parallel else 1

    @property
    def dies(self) -> int:
        return self.tp * self.dp * self.pp

    def __str__(self) -> str:
        parts = (
            (True, f"TP{self.tp}"), (self.dp > 1, f"DP{self.dp}"), (self.pp > 1, f"PP{self.pp}"),
            (self.dcp > 1, f"DCP{self.dcp}"), (not self.expert_parallel, "no EP"), (True, f"MTP{self.drafts}"),
            (self.dsa_cp, "DSA-CP"), (self.index_cache, "IndexCache"),
        )  # fmt: skip
        return " ".join(text for shown, text in parts if shown)


@dataclass(frozen=True)
class Layout:
    """`replicas` engines that prefill and decode, or that decode for `prefills` (else 0) engines like `prefill`."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    decode: Engine
    prefill: Engine | None = None
    replicas: Count = 1
    prefills: Count = 0

    @property
    def engines(self) -> dict[str, Engine]:
        """Engines by role: `server`, or `prefill` and `decode`."""
        return {"prefill": self.prefill, "decode": self.decode} if self.prefill else {"server": self.decode}

    def nodes(self, hardware: Hardware) -> int:
        """Nodes that the engines take: large engines take whole ones, small ones share one."""
        size, total = hardware.dies_per_node, 0
        for engine, count in ((self.decode, self.replicas), (self.prefill, self.prefills)):
            if engine is not None:
                total += -(-count // (size // engine.dies)) if engine.dies < size else count * -(-engine.dies // size)
        return total

    def __str__(self) -> str:
        def times(count: int, engine: Engine) -> str:
            return f"{count} x ({engine})" if count > 1 else str(engine)

        decode = times(self.replicas, self.decode)
        return f"P {times(self.prefills, self.prefill)} | D {decode}" if self.prefill else decode

    def text(self) -> str:
        """The layout as --layout reads it, with every setting."""
        values = adapter(Engine).dump_python(self.decode, by_alias=True, exclude=_NO_TEXT)
        if self.prefill:
            prefill = adapter(Engine).dump_python(self.prefill, by_alias=True, exclude=_NO_TEXT)
            values |= {f"prefill_{key}": value for key, value in prefill.items()} | {"prefills": self.prefills}
        return ",".join(f"{key}={float(value):g}" for key, value in (values | {"replicas": self.replicas}).items())


def parse_layout(text: str, config: ModelConfig, clients: float, drafts: int | None = None) -> Layout:
    """The layout of `tp=16,dp=2` or `tp=1,dp=32,prefill_tp=8`, sized for so many clients without `seqs`, with `drafts`
    without `mtp`, and usual settings; PlanError names a wrong key."""
    texts, usual = pairs("--layout", text), 3 if config.num_nextn_predict_layers else 0
    common = {"mtp": usual if drafts is None else drafts, "line": LINES[config.engines.vllm_ascend]}
    apart = {key.removeprefix("prefill_"): value for key, value in texts.items() if key.startswith("prefill_")}
    values: dict[str, Any] = {key: texts[key] for key in ("replicas", "prefills") if key in texts}
    values["decode"] = common | {k: v for k, v in texts.items() if k not in values and not k.startswith("prefill_")}
    if apart or "prefills" in texts:  # settings of engines that only prefill in vllm-ascend's documents and CI
        values.setdefault("prefills", 1)
        values["prefill"] = common | {
            "seqs": 64, "tokens": 8192, "buffer_mb": 400, "dsa_cp": apart.get("tp") != "1", "eager": True,
        } | apart  # fmt: skip
    layout = read_option("--layout", Layout, values)
    decode, prefill = layout.decode, layout.prefill
    if "seqs" not in texts:
        decode = replace(decode, sequences=sequences_for(clients / layout.replicas, decode.dp))
    if "buffer_mb" not in texts:
        decode = replace(decode, buffer_mb=max(200, needed_buffer_mb(config, decode)))
    if prefill and "tokens" not in texts:
        decode = replace(decode, batched_tokens=decode.sequences * (decode.drafts + 1))
    if prefill and "mtp" not in apart:
        prefill = replace(prefill, drafts=min(1, decode.drafts))
    return replace(layout, decode=decode, prefill=prefill)


def sequences_for(clients: float, dp: int) -> int:
    """--max-num-seqs of a rank for so many clients of an engine."""
    return max(1, min(256, math.ceil(clients / dp)))


def needed_buffer_mb(config: ModelConfig, engine: Engine) -> int:
    """HCCL_BUFFSIZE in MB of an engine's decode step, by `exchange_buffer_mb`."""
    sizes = config.n_routed_experts, config.num_experts_per_tok, config.hidden_size
    return exchange_buffer_mb(engine.sequences, engine.drafts, engine.tp, engine.ep, *sizes)


def check_engine(engine: Engine, config: ModelConfig, hardware: Hardware) -> None:
    """Check sizes that the engine would refuse; raises PlanError, which names the wrong one."""
    heads, experts, node = config.num_attention_heads, config.n_routed_experts, hardware.dies_per_node
    cut = not engine.expert_parallel and (engine.dp > 1 or engine.tp > MAX_SLICES)
    drafts = MAX_KDA_DRAFTS if config.attention_types else MAX_DRAFTS
    for wrong, problem, fix in (
        (heads % engine.tp, f"tp {engine.tp} does not divide the {heads} attention heads", "use a power of two"),
        (engine.tp > node, f"tp {engine.tp}: a node of {hardware.name} has {node} dies", "dp beyond a node"),
        (engine.ep > experts, f"{engine.ep} dies share {experts} experts: each needs one", "use several replicas"),
        (experts % engine.ep, f"{engine.ep} dies do not divide the {experts} experts", "use several replicas"),
        (cut, f"ep=0 cuts every expert: at most over {MAX_SLICES} dies, of one rank", "dp=1, or without ep=0"),
        (engine.pp > config.num_hidden_layers, f"pp {engine.pp} is more than the layers", "use 2"),
        (engine.dcp not in (1, engine.tp), f"dcp {engine.dcp}: sparse attention allows 1 or tp", f"dcp={engine.tp}"),
        (engine.dcp > 1 and bool(config.attention_types), "dcp: the pooled indexer takes none (rule P74)", "dcp=1"),
        (engine.drafts > drafts, f"mtp {engine.drafts}: at most {drafts}", "GLM-5 is served with 3, its Flash with 5"),
        (engine.drafts and not config.num_nextn_predict_layers, "mtp: the model has no MTP layer", "mtp=0"),
    ):
        if wrong:
            raise PlanError(f"layout: {problem}", fix)
