"""The memory of one die: weights, buffers, and the rest for the caches, whose rows and pages are those of vllm-ascend
182b75e `sfa_v1.py`, `kv_cache_interface.py` and 0.30.0rc2 `models/glm5next/cache_config.py`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, get_args

from glm5_ascend.plan import weights
from glm5_ascend.plan.hardware import Hardware
from glm5_ascend.plan.inputs import Workload
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.weights import BF16, FP32

#: Tokens of a page; buffers of communicators whose size the engine sets, in and out each (vllm-ascend's default).
PAGE, _GROUP_MB = 128, 200
#: Latent values that share a scale in a packed row; bytes of a scale of the indexer's keys.
_SCALE_TILE, _FP16 = 128, 2
End = Literal["low", "value", "high"]
ENDS: tuple[End, ...] = get_args(End)
#: Bytes of a die besides weights and caches (low, value, high), guessed in bounds: the official recipes (A3 W8A8 with
#: 40,960 tokens, A2 W4A8 with 32,768) must fit; PD: vllm-ascend #12839 saw 10 GB more, a public run leaves at most 5.
GUESSED = {"graphs": (0.5e9, 1.5e9, 3.0e9), "margin": (0.0, 1.0e9, 2.0e9), "PD transfer": (0.0, 0.0, 5.0e9)}
#: Parts of a die's memory that are not published; all others follow from sizes and vllm-ascend's code.
UNPUBLISHED = (*GUESSED, "communication buffers")
#: Communicators that hold HCCL_BUFFSIZE in and out: the experts'; the engine gives the others sizes of their own.
COMMUNICATORS = (1, 1, 3)


def attention_row(model: PlannedModel) -> int:
    """Bytes of a token's latent and rope values in one layer."""
    c = model.config
    if model.cache == "li+sfa":
        return c.kv_lora_rank + BF16 * c.qk_rope_head_dim + FP32 * (c.kv_lora_rank // _SCALE_TILE)
    return BF16 * (c.kv_lora_rank + c.qk_rope_head_dim)


def indexer_row(model: PlannedModel, layer: int | None = None) -> int:
    """Bytes of the indexer keys in one layer per token; without `layer`, in a layer whose keys are INT8 with C8."""
    dim = model.config.index_head_dim // model.config.index_kpool
    bf16 = model.cache == "none" or (layer is not None and bool(model.marked) and layer not in model.marked)
    return BF16 * dim if bf16 else dim + _FP16


@functools.lru_cache(maxsize=1024)
def bytes_per_token(model: PlannedModel, mtp: bool, dcp: int = 1, stage: range | None = None) -> float:
    """Cache bytes of a token on every die of a tensor-parallel group; stage: None for all layers. DCP divides the
    attention rows, not the indexer keys; layers of linear attention share pages with the others."""
    config = model.config
    cached = list(range(config.num_hidden_layers) if stage is None else stage)
    if mtp and cached[-1] == config.num_hidden_layers - 1:
        cached += range(config.num_hidden_layers, config.num_layers_with_mtp)
    indexers = sum(indexer_row(model, layer) for layer in cached if config.has_indexer(layer))
    kinds = [config.attention_kind(layer) for layer in cached]
    pools = max(kinds.count("sparse"), math.ceil(kinds.count("linear") / max(1, _longest_run(kinds))))
    return pools * attention_row(model) / dcp + indexers


def _longest_run(kinds: list[str]) -> int:
    return max((len(list(run)) for kind, run in groupby(kinds) if kind == "linear"), default=0)


def state_tokens(model: PlannedModel, engine: Engine, stage: range) -> int:
    """Tokens whose cache has as many bytes as what a request keeps whatever its length: for each group of layers of
    linear attention its state, one for each draft and one for the prefix cache; and the indexer's unfinished pool."""
    c, groups = model.config, _longest_run(list(map(model.config.attention_kind, stage)))
    if not groups:
        return 0
    width = c.linear_num_heads // engine.tp * c.linear_head_dim
    convolutions = 3 * width * (c.linear_conv_kernel_dim - 1 + engine.drafts) * BF16
    page = pages((FP32 * width * c.linear_head_dim + convolutions) / attention_row(model))
    return page * (1 + groups * (2 + engine.drafts))


def pages(tokens: float) -> int:
    """Tokens rounded up to whole pages."""
    return PAGE * -int(-tokens // PAGE)


@dataclass(frozen=True)
class Memory:
    """Bytes of one die: by use (parts), of weights by use, and left for the caches of this rank (budgets) by the ends
    of GUESSED, negative: it does not fit; `state_tokens` as the function of this name."""

    total: float
    usable: float
    parts: dict[str, float]
    weights: dict[str, int]
    bytes_per_token: float
    budgets: dict[End, float]
    state_tokens: int = 0

    def tokens(self, end: End = "value") -> int:
        """Cached tokens of one rank, in whole pages."""
        return max(0, int(self.budgets[end] / self.bytes_per_token) // PAGE * PAGE)

    def most_requests(self, engine: Engine, load: Workload, end: End = "value") -> float:
        """Requests of one rank that fit the caches, with each prefix once, and --max-num-seqs: whole requests, of
        which the last one begins while the others are on average half through their output."""
        shared, fresh, mean = self._sizes(load)
        rest, prefixes = self.tokens(end) - shared - fresh, load.different
        if rest < pages(load.output):
            return 0.0  # not one whole request
        others = rest / (shared + mean)
        if others + 1 > prefixes:
            others = (rest - (prefixes - 1) * shared) / mean
        return min(float(engine.sequences), 1.0 + math.floor(others))

    def resident(self, load: Workload, running: float, end: End = "value") -> float:
        """Share of the prefixes that stay in a rank's caches beside so many requests; all ranks see all prefixes."""
        shared, _, mean = self._sizes(load)
        return min(1.0, max(shared, self.tokens(end) - running * mean) / (load.different * shared)) if shared else 1.0

    def _sizes(self, load: Workload) -> tuple[float, float, float]:
        """Tokens of a prefix, and of the rest of a request: at its begin, and on average."""
        shared = pages(load.prompt * load.prefix_hit)
        fresh = pages(load.prompt - shared) + self.state_tokens
        return shared, fresh, fresh + load.output / 2 + PAGE / 2


def fit(
    model: PlannedModel, hardware: Hardware, engine: Engine, decode_only: bool = False, split: bool = False
) -> Memory:
    """Memory of a die of the pipeline stage with the fewest cached tokens, in an engine that does not prefill
    (`decode_only`), or one of those that share the work of prefill and decode (`split`)."""
    stages = (stage_fit(model, hardware, engine, stage, decode_only, split) for stage in engine.stages(model.config))
    return min(stages, key=lambda memory: memory.budgets["value"] / memory.bytes_per_token)


def stage_fit(
    model: PlannedModel, hardware: Hardware, engine: Engine, stage: range, decode_only: bool, split: bool
) -> Memory:
    """Memory of a die of one pipeline stage; arguments as in `fit`."""
    c, by_kind = model.config, weights.per_die(model, engine, stage)
    # Peak of one MoE layer in a full prefill step: residuals, and the routed copies of its tokens.
    routed = c.num_experts_per_tok * (3 * c.hidden_size + 4 * c.moe_intermediate_size)
    residuals = 4 * c.hidden_size + 2 * c.stream_width
    logits = FP32 * engine.sequences * (engine.drafts + 1) * c.vocab_size / engine.tp
    activations = engine.batched_tokens * BF16 * (residuals + routed / engine.tp) + logits
    copies = weights.copies(model, engine, decode_only, split, stage)
    exact = {"weights": float(sum(by_kind.values())), **copies, "activations": activations}
    groups = (engine.tp > 1) + 2 * (engine.dp > 1) + (engine.pp > 1)  # tensor; data and world; stages
    sizes = [engine.buffer_mb * n * (engine.dies > 1) + _GROUP_MB * groups for n in COMMUNICATORS]
    absent = {"graphs": engine.eager, "PD transfer": not split}
    guessed = {name: (0.0, 0.0, 0.0) if absent.get(name) else ends for name, ends in GUESSED.items()}
    guessed["communication buffers"] = 2e6 * sizes[0], 2e6 * sizes[1], 2e6 * sizes[2]
    usable = hardware.memory_bytes * engine.utilization
    left = [usable - sum(exact.values()) - sum(ends) for ends in zip(*guessed.values(), strict=True)]
    return Memory(
        total=hardware.memory_bytes, usable=usable, weights=by_kind,
        parts=exact | {name: value for name, (_, value, _) in guessed.items()},
        bytes_per_token=bytes_per_token(model, engine.drafts > 0, engine.dcp, stage),
        budgets=dict(zip(ENDS, reversed(left), strict=True)), state_tokens=state_tokens(model, engine, stage),
    )  # fmt: skip
