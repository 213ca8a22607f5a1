"""How a cluster is divided: engines with their parallel sizes and settings, and the text of `--layout`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from glm5_ascend.engine_lines import LINES, STABLE, EngineLine
from glm5_ascend.errors import PlanError
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.plan.data_files import key_values
from glm5_ascend.plan.hardware import Hardware

#: vllm-ascend refuses more draft tokens: drafts + 1 must be at most 16 (sfa_v1.py:240).
MAX_DRAFTS = 15
#: The same for linear attention (models/glm5next/kda.py:153).
MAX_KDA_DRAFTS = 7
#: Dies over which weights of msModelSlim may be cut without expert parallelism.
MAX_SLICES = 16


@dataclass(frozen=True)
class PipelineStage:
    """Layers [first, end) of the target. The first stage has the embedding, the last one head and MTP layer."""

    first: int
    end: int
    is_first: bool = True
    is_last: bool = True

    def holds(self, layer: int, is_mtp: bool) -> bool:
        return self.is_last if is_mtp else self.first <= layer < self.end


@dataclass(frozen=True)
class Engine:
    """One pool of dies under one scheduler: `dp` ranks of `tp` dies; experts lie over all of them.

    Attributes:
        drafts: MTP tokens per step, 0: off.
        sequences: maximum requests of one DP rank at a time (--max-num-seqs).
        batched_tokens: maximum tokens of one step of a rank (--max-num-batched-tokens).
        utilization: share of a die's memory the engine may use.
        buffer_mb: HCCL_BUFFSIZE.
        dsa_cp: DSA context parallelism: each die of a TP group prefills its share of the tokens.
        eager: decode without graphs.
        pp: pipeline stages, each of tp x dp dies with its share of the layers.
        partition: layers of each stage; empty: equal.
        expert_parallel: false: every die holds a slice of every expert.
        redundant: additional copies of experts, for EPLB or for a number of dies that does not divide the experts.
        index_cache: vllm-ascend's `use_index_cache`: three of four layers reuse another layer's top-k.
        flashcomm: vllm-ascend's sequence parallelism. mlapo: its fused preprocessing, where it can run.
        line: line of vllm-ascend whose copies of weights are counted.
    """

    tp: int
    dp: int = 1
    dcp: int = 1
    drafts: int = 3
    sequences: int = 32
    batched_tokens: int = 4096
    utilization: float = 0.95
    buffer_mb: int = 200
    dsa_cp: bool = False
    eager: bool = False
    pp: int = 1
    expert_parallel: bool = True
    redundant: int = 0
    index_cache: bool = False
    flashcomm: bool = False
    mlapo: bool = True
    line: EngineLine = STABLE
    partition: tuple[int, ...] = ()

    def stages(self, config: ModelConfig) -> tuple[PipelineStage, ...]:
        """The layers of each pipeline stage: equal parts, each from a layer with an indexer of its own on (rule P66).

        Raises:
            PlanError: the partition has another number of stages or layers.
        """
        layers, (base, rest) = config.num_hidden_layers, divmod(config.num_hidden_layers, self.pp)
        equal = (base + (self.pp - 1 - rest <= stage < self.pp - 1) for stage in range(self.pp - 1))
        starts = [next((i for i in range(s, layers) if config.has_indexer(i)), s) for s in accumulate(equal)]
        parts = self.partition or tuple(end - start for start, end in pairwise([0, *starts, layers]))
        if len(parts) != self.pp or sum(parts) != layers:
            text = ",".join(map(str, parts))
            raise PlanError(f"layers {text}: not {self.pp} stages of {layers} layers in all", "one number per stage")
        bounds = pairwise(accumulate(parts, initial=0))
        return tuple(PipelineStage(*bound, i == 0, i == self.pp - 1) for i, bound in enumerate(bounds))

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
            (self.dcp > 1, f"DCP{self.dcp}"), (not self.expert_parallel, "no EP"),
            (self.redundant > 0, f"+{self.redundant} experts"), (True, f"MTP{self.drafts}"), (self.dsa_cp, "DSA-CP"),
            (self.index_cache, "IndexCache"),
        )  # fmt: skip
        return " ".join(text for shown, text in parts if shown)


@dataclass(frozen=True)
class Layout:
    """`replicas` engines that prefill and decode, or that decode for `prefills` engines like `prefill`."""

    decode: Engine
    prefill: Engine | None = None
    replicas: int = 1
    prefills: int = 1

    @property
    def prefill_engines(self) -> int:
        """Number of engines that only prefill."""
        return self.prefills if self.prefill else 0

    @property
    def engines(self) -> dict[str, Engine]:
        """Engines by role: `server`, or `prefill` and `decode`."""
        return {"prefill": self.prefill, "decode": self.decode} if self.prefill else {"server": self.decode}

    @property
    def dies(self) -> int:
        return self.replicas * self.decode.dies + (self.prefills * self.prefill.dies if self.prefill else 0)

    def nodes(self, hardware: Hardware) -> int:
        """Nodes that the engines take: a large engine takes whole nodes, small ones share a node."""
        size, total = hardware.dies_per_node, 0
        for engine, count in ((self.decode, self.replicas), (self.prefill, self.prefill_engines)):
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
        values: dict[str, Any] = {key: getattr(self.decode, name) for key, name in _KEYS.items()}
        if self.prefill:
            values |= {f"prefill_{key}": getattr(self.prefill, name) for key, name in _KEYS.items()}
            values["prefills"] = self.prefills
        return ",".join(f"{key}={float(value):g}" for key, value in (values | {"replicas": self.replicas}).items())


def exchange_buffer_mb(config: ModelConfig, engine: Engine) -> int:
    """HCCL_BUFFSIZE in MB that dispatch and combine of a decode step need (CANN's formula, two buffers)."""
    if not engine.expert_parallel or engine.ep == 1:
        return 0

    def aligned(value: int, step: int) -> int:
        return step * -(-value // step)

    tokens = min(512, math.ceil(engine.sequences * (engine.drafts + 1) / engine.tp))
    local = (config.n_routed_experts + engine.redundant) // engine.ep
    dispatch_row = aligned(aligned(2 * config.hidden_size, 32) + 64, 512)
    combine = (config.num_experts_per_tok + 1) * tokens * aligned(2 * config.hidden_size, 512)
    return math.ceil(2 * (local * tokens * engine.ep * dispatch_row + combine) / 2**20)


def check_engine(engine: Engine, config: ModelConfig, hardware: Hardware) -> None:
    """Check sizes that the engine would refuse.

    Raises:
        PlanError: names the wrong size.
    """
    heads, experts = config.num_attention_heads, config.n_routed_experts + engine.redundant
    missing, node = -experts % engine.ep, hardware.dies_per_node
    cut = not engine.expert_parallel and (engine.dp > 1 or engine.tp > MAX_SLICES)
    drafts = MAX_KDA_DRAFTS if config.attention_types else MAX_DRAFTS
    for wrong, problem, fix in (
        (heads % engine.tp, f"tp {engine.tp} does not divide the {heads} attention heads", "use a power of two"),
        (engine.tp > node, f"tp {engine.tp}: a node of {hardware.name} has {node} dies", "dp beyond a node"),
        (engine.ep > experts, f"{engine.ep} dies share {experts} experts: each needs one", "use several replicas"),
        (missing, f"{engine.ep} dies do not divide the {experts} experts", f"redundant={engine.redundant + missing}"),
        (cut, f"ep=0 cuts every expert: at most over {MAX_SLICES} dies, of one rank", "dp=1, or without ep=0"),
        (engine.pp > config.num_hidden_layers, f"pp {engine.pp} is more than the layers", "use 2"),
        (engine.dcp not in (1, engine.tp), f"dcp {engine.dcp}: sparse attention allows 1 or tp", f"dcp={engine.tp}"),
        (engine.dcp > 1 and bool(config.attention_types), "dcp: the pooled indexer takes none (rule P74)", "dcp=1"),
        (engine.drafts > drafts, f"mtp {engine.drafts}: at most {drafts}", "GLM-5 is served with 3, its Flash with 5"),
        (engine.drafts and not config.num_nextn_predict_layers, "mtp: the model has no MTP layer", "mtp=0"),
        (not 0 < engine.utilization <= 1, f"utilization {engine.utilization:g}: at most 1", "use 0.9 to 0.95"),
    ):
        if wrong:
            raise PlanError(f"layout: {problem}", fix)


#: Keys of --layout by the field of an engine; with `prefill_` before them, those of the prefill engine.
_KEYS = {
    "tp": "tp", "dp": "dp", "dcp": "dcp", "pp": "pp", "ep": "expert_parallel", "redundant": "redundant",
    "mtp": "drafts", "seqs": "sequences", "tokens": "batched_tokens", "utilization": "utilization",
    "buffer_mb": "buffer_mb", "dsa_cp": "dsa_cp", "index_cache": "index_cache", "eager": "eager",
    "flashcomm": "flashcomm", "mlapo": "mlapo",
}  # fmt: skip
_SWITCHES = ("ep", "dsa_cp", "index_cache", "eager", "flashcomm", "mlapo")
_MAY_BE_ZERO = (*_SWITCHES, "redundant", "mtp")
_COUNTS = ("replicas", "prefills")


def parse_layout(text: str, config: ModelConfig, clients: float, drafts: int | None = None) -> Layout:
    """The layout of `tp=16,dp=2` or `tp=1,dp=32,prefill_tp=8,prefill_dp=4`; missing settings are the usual ones.

    Args:
        clients: requests at a time, for `seqs`. drafts: for `mtp`; None: 3, or none without an MTP layer.

    Raises:
        PlanError: unknown key, not a number, or a missing key.
    """
    values: dict[str, float] = {}
    for key, value in key_values("--layout", text, (*_KEYS, *_COUNTS, *(f"prefill_{key}" for key in _KEYS))).items():
        name = key.removeprefix("prefill_")
        whole = value.isdecimal() and len(value) <= 6 and (int(value) >= 1 or name in _MAY_BE_ZERO)
        share = name == "utilization" and value.replace(".", "", 1).isdecimal() and len(value) <= 6
        if not (whole or share) or (name in _SWITCHES and value not in ("0", "1")):
            raise PlanError(f"--layout: {key}={value!r:.20} is not a possible number", "as in tp=16,dp=2,dsa_cp=1")
        values[key] = float(value)
    if "tp" not in values:
        raise PlanError("--layout: tp= is missing", "--layout tp=16,dp=1")
    apart = sorted(key for key in values if key.startswith("prefill"))
    if apart and "prefill_tp" not in values:
        raise PlanError(f"--layout: {apart[0]} without prefill_tp", "prefill_tp=8,prefill_dp=4 are a prefill engine")
    usual, replicas = usual_settings(config, drafts), int(values.get("replicas", 1))
    decode = _engine(values, "", usual | {"sequences": sequences_for(clients / replicas, int(values.get("dp", 1)))})
    if "buffer_mb" not in values:
        decode = replace(decode, buffer_mb=max(200, exchange_buffer_mb(config, decode)))
    if not apart:
        return Layout(decode, None, replicas)
    if "tokens" not in values:
        decode = replace(decode, batched_tokens=decode.sequences * (decode.drafts + 1))
    official = {  # settings of engines that only prefill in vllm-ascend's documents and CI
        "sequences": 64, "batched_tokens": 8192, "buffer_mb": 400, "dsa_cp": values["prefill_tp"] > 1, "eager": True,
        "drafts": min(1, decode.drafts),
    }  # fmt: skip
    prefill = _engine(values, "prefill_", usual | official)
    return Layout(decode, prefill, replicas, int(values.get("prefills", 1)))


def usual_settings(config: ModelConfig, drafts: int | None) -> dict[str, Any]:
    """Settings of every engine for this model. drafts: None: 3, or none without an MTP layer."""
    usual = 3 if config.num_nextn_predict_layers else 0
    return {"drafts": usual if drafts is None else drafts, "line": LINES[config.spec.vllm_ascend]}


def sequences_for(clients: float, dp: int) -> int:
    """--max-num-seqs of a rank for so many clients of an engine."""
    return max(1, min(256, math.ceil(clients / dp)))


def _engine(values: Mapping[str, float], prefix: str, usual: Mapping[str, Any]) -> Engine:
    settings = dict(usual)
    for key, name in _KEYS.items():
        if prefix + key in values:
            value = values[prefix + key]
            settings[name] = value if key == "utilization" else bool(value) if key in _SWITCHES else int(value)
    return Engine(**settings)
