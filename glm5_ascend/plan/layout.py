"""How a cluster is divided: engines with their parallel sizes, together or split into prefill and decode."""

from __future__ import annotations

import math
from dataclasses import dataclass

from glm5_ascend.engine_lines import STABLE, EngineLine
from glm5_ascend.errors import PlanError
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.plan.hardware import Hardware
from glm5_ascend.plan.stages import PipelineStage, stages

#: vllm-ascend refuses more draft tokens: drafts + 1 must be at most 16 (sfa_v1.py:240).
MAX_DRAFTS = 15
#: Dies over which weights of msModelSlim may be cut without expert parallelism.
MAX_SLICES = 16


@dataclass(frozen=True)
class Engine:
    """One pool of dies under one scheduler: `dp` ranks of `tp` dies; experts lie over all of them.

    Attributes:
        drafts: MTP tokens per step, 0: off.
        sequences: maximum requests of one DP rank at a time (--max-num-seqs).
        batched_tokens: maximum tokens of one step of a rank (--max-num-batched-tokens).
        utilization: share of a die's memory the engine may use.
        buffer_mb: HCCL_BUFFSIZE.
        split_prefill: DSA context parallelism: each die of a TP group prefills its share of the tokens.
        eager_decode: decode without graphs.
        pp: pipeline stages, each of tp x dp dies with its share of the layers.
        partition: layers of each stage; empty: equal.
        expert_parallel: false: every die holds a slice of every expert.
        redundant: additional copies of experts, for EPLB or for a number of dies that does not divide the experts.
        flashcomm: vllm-ascend's sequence parallelism. mlapo: its fused preprocessing, where it can run.
        line: line of vllm-ascend whose copies of weights are counted.
    """

    tp: int
    dp: int
    dcp: int = 1
    drafts: int = 3
    sequences: int = 32
    batched_tokens: int = 4096
    utilization: float = 0.95
    buffer_mb: int = 200
    split_prefill: bool = True
    eager_decode: bool = False
    pp: int = 1
    expert_parallel: bool = True
    redundant: int = 0
    flashcomm: bool = False
    mlapo: bool = True
    line: EngineLine = STABLE
    partition: tuple[int, ...] = ()

    def stages(self, config: ModelConfig) -> tuple[PipelineStage, ...]:
        """The layers of each pipeline stage; PlanError if the partition does not fit the model."""
        return stages(config.num_hidden_layers, self.pp, self.partition)

    @property
    def ep(self) -> int:
        """Dies that share the experts: with --enable-expert-parallel all dies of the engine (of a stage)."""
        return self.tp * self.dp if self.expert_parallel else 1

    @property
    def dies(self) -> int:
        return self.tp * self.dp * self.pp

    def __str__(self) -> str:
        pp = f" PP{self.pp}" if self.pp > 1 else ""
        dcp = f" DCP{self.dcp}" if self.dcp > 1 else ""
        redundant = f"+{self.redundant}" if self.redundant else ""
        return f"TP{self.tp} DP{self.dp}{pp} EP{self.ep}{redundant}{dcp} MTP{self.drafts}"


@dataclass(frozen=True)
class Layout:
    """`replicas` engines that prefill and decode, or that decode for `prefills` engines like `prefill`.

    `prefills` of 0: one prefill engine for each replica.
    """

    decode: Engine
    prefill: Engine | None = None
    replicas: int = 1
    prefills: int = 0

    @property
    def prefill_engines(self) -> int:
        """Number of engines that only prefill."""
        return 0 if self.prefill is None else self.prefills or self.replicas

    @property
    def dies(self) -> int:
        return self.replicas * self.decode.dies + (self.prefill_engines * self.prefill.dies if self.prefill else 0)

    def __str__(self) -> str:
        if self.prefill is None:
            return str(self.decode) if self.replicas == 1 else f"{self.replicas} x ({self.decode})"
        if self.prefill_engines == self.replicas:
            text = f"P {self.prefill} | D {self.decode}"
            return text if self.replicas == 1 else f"{self.replicas} x ({text})"
        prefills, decodes = (f"{n} x " if n > 1 else "" for n in (self.prefill_engines, self.replicas))
        return f"{prefills}P {self.prefill} | {decodes}D {self.decode}"


def exchange_buffer_mb(config: ModelConfig, engine: Engine) -> int:
    """HCCL_BUFFSIZE in MB that dispatch and combine of a decode step need (CANN's formula, two buffers)."""
    if not engine.expert_parallel or engine.ep == 1:
        return 0
    tokens = min(512, math.ceil(engine.sequences * (engine.drafts + 1) / engine.tp))
    local = (config.n_routed_experts + engine.redundant) // engine.ep
    dispatch_row = _aligned(_aligned(2 * config.hidden_size, 32) + 64, 512)
    combine = (config.num_experts_per_tok + 1) * tokens * _aligned(2 * config.hidden_size, 512)
    return math.ceil(2 * (local * tokens * engine.ep * dispatch_row + combine) / 2**20)


def _aligned(value: int, step: int) -> int:
    return step * -(-value // step)


def check_engine(engine: Engine, config: ModelConfig, hardware: Hardware) -> None:
    """Check sizes that the engine would refuse.

    Raises:
        PlanError: names the wrong size.
    """
    for name, value in (("tp", engine.tp), ("dp", engine.dp), ("dcp", engine.dcp), ("seqs", engine.sequences)):
        if value < 1:
            raise PlanError(f"layout: {name} is {value}, must be at least 1", "correct --layout")
    heads, experts = config.num_attention_heads, config.n_routed_experts
    if heads % engine.tp:
        raise PlanError(f"layout: tp {engine.tp} does not divide the {heads} attention heads", "use a power of two")
    if engine.tp > hardware.dies_per_node:
        raise PlanError(
            f"layout: tp {engine.tp} is more than the {hardware.dies_per_node} dies of a node of {hardware.name}",
            "use tensor parallelism within a node, and dp beyond",
        )
    if engine.ep > experts + engine.redundant:
        raise PlanError(
            f"layout: {engine.ep} dies share {experts} experts: each die needs at least one", "use several replicas"
        )
    if (experts + engine.redundant) % engine.ep:
        missing = -(experts + engine.redundant) % engine.ep
        raise PlanError(
            f"layout: {engine.ep} dies do not divide the {experts + engine.redundant} experts evenly:"
            " the engine gives each die the same number",
            f"redundant={engine.redundant + missing} makes them {experts + engine.redundant + missing}, or other sizes",
        )
    if not engine.expert_parallel and (engine.dp > 1 or engine.tp > MAX_SLICES):
        raise PlanError(
            f"layout: ep=0 cuts every expert over {engine.tp * engine.dp} dies: at most {MAX_SLICES}, of one rank",
            f"dp=1 and tp of at most {MAX_SLICES}, or without ep=0",
        )
    if engine.pp > config.num_hidden_layers:
        raise PlanError(f"layout: pp {engine.pp} is more than the {config.num_hidden_layers} layers", "use 2")
    if engine.dcp not in (1, engine.tp):
        raise PlanError(
            f"layout: dcp {engine.dcp}, sparse attention allows 1 or tp ({engine.tp}) (vllm-ascend raises)",
            f"dcp=1 or dcp={engine.tp}",
        )
    if not 0 <= engine.drafts <= MAX_DRAFTS:
        raise PlanError(f"--mtp {engine.drafts}: 0 to {MAX_DRAFTS} draft tokens are possible", "GLM-5 is served with 3")
    if not 0 < engine.utilization <= 1:
        raise PlanError(f"memory utilization {engine.utilization}: must be above 0 and at most 1", "use 0.9 to 0.95")
