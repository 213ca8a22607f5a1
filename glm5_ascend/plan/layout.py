"""How a cluster is divided: engines with their parallel sizes, together or split into prefill and decode."""

from __future__ import annotations

from dataclasses import dataclass

from glm5_ascend.errors import PlanError
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.plan.hardware import Hardware

#: vllm-ascend refuses more draft tokens: one more than them must be at most 16 (sfa_v1.py:240).
MOST_DRAFTS = 15


@dataclass(frozen=True)
class Engine:
    """One pool of dies under one scheduler: `dp` ranks of `tp` dies; experts lie over all of them.

    Attributes:
        drafts: MTP tokens per step, 0: off.
        sequences: most requests of one DP rank at a time (--max-num-seqs).
        batched_tokens: most tokens of one step of a rank (--max-num-batched-tokens).
        utilization: share of a die's memory the engine may use.
        buffer_mb: HCCL_BUFFSIZE.
        split_prefill: DSA context parallelism: each die of a TP group prefills its share of the tokens.
        eager_decode: decode without graphs.
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

    @property
    def ep(self) -> int:
        """With --enable-expert-parallel experts are divided over all dies of the engine."""
        return self.tp * self.dp

    @property
    def dies(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        dcp = f" DCP{self.dcp}" if self.dcp > 1 else ""
        return f"TP{self.tp} DP{self.dp} EP{self.ep}{dcp} MTP{self.drafts}"


@dataclass(frozen=True)
class Layout:
    """`decode` does everything, or decodes only if there is a `prefill` engine; `replicas` of the whole."""

    decode: Engine
    prefill: Engine | None = None
    replicas: int = 1

    @property
    def dies(self) -> int:
        return self.replicas * (self.decode.dies + (self.prefill.dies if self.prefill else 0))

    def __str__(self) -> str:
        text = str(self.decode) if self.prefill is None else f"P {self.prefill} | D {self.decode}"
        return text if self.replicas == 1 else f"{self.replicas} x ({text})"


def check_engine(engine: Engine, config: ModelConfig, hardware: Hardware) -> None:
    """Refuse what the engine itself would refuse, or cannot place.

    Raises:
        PlanError: names the size that is wrong.
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
            "keep tensor parallelism within a node and use dp",
        )
    if engine.ep > experts:
        raise PlanError(
            f"layout: {engine.ep} dies share {experts} experts: at least one each is needed", "use several replicas"
        )
    if engine.dcp not in (1, engine.tp):
        raise PlanError(
            f"layout: dcp {engine.dcp}, sparse attention allows 1 or tp ({engine.tp}) (vllm-ascend raises)",
            f"dcp=1 or dcp={engine.tp}",
        )
    if not 0 <= engine.drafts <= MOST_DRAFTS:
        raise PlanError(
            f"--mtp {engine.drafts}: 0 to {MOST_DRAFTS} draft tokens are possible", "GLM-5 is served with 3"
        )
    if not 0 < engine.utilization <= 1:
        raise PlanError(f"memory utilization {engine.utilization}: must be above 0 and at most 1", "use 0.9 to 0.95")
