"""What a server on a CPU needs of memory, and what this machine has. Imports neither torch nor vLLM."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from glm5_ascend.checkpoint.summary import CheckpointSummary
from glm5_ascend.checkpoint.types import FLOAT
from glm5_ascend.errors import ConfigError, MissingEnvironmentError
from glm5_ascend.files.cgroups import available_memory
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.memory import FP32, cached_values
from glm5_ascend.model.spec import Linear
from glm5_ascend.serve.flags import ServerCommand, given_flags, number_of, value_of
from glm5_ascend.serve.limits import drafts_of, ranks_of
from glm5_kernels import registry

#: Bytes of the server's two processes before they load a model, and of the process of each rank of tensor parallel.
_PROCESSES, _WORKER = 1_500_000_000, 700_000_000
#: vLLM's defaults of a server on a CPU: tokens of a step, and sequences.
_TOKENS, _SEQUENCES = 2048, 128
#: What the engine says when it has found that the checkpoint's files do not fit into the memory.
FROM_DISK = "the weights do not fit into the memory: each step reads them from the disk"
_CACHE = "VLLM_CPU_KVCACHE_SPACE"
#: A context that a server has even where the memory is short, and a block of the cache, in tokens.
_SHORT_CONTEXT, _BLOCK = 8192, 64


@dataclass(frozen=True)
class Memory:
    """What a server needs and what there is, in bytes.

    Attributes:
        weights: of the checkpoint's files. copied: of weights that are not used where the files are mapped.
        cache: of keys and latents. working: of the processes and of a step.
    """

    weights: int
    copied: int
    cache: int
    working: int
    available: int

    def __str__(self) -> str:
        parts = [f"weights {_gb(self.weights)}", f"cache {_gb(self.cache)}", f"working memory {_gb(self.working)}"]
        if self.copied < self.weights:
            parts.insert(1, f"of which {_gb(self.copied)} are copied and the rest stays in mapped files")
        slow = "" if self.fixed + self.weights - self.copied <= self.available else "; weights are read from disk again"
        return f"memory: {', '.join(parts)}; available {_gb(self.available)}{slow}"

    @property
    def fixed(self) -> int:
        """Bytes that must fit into the memory: all but those of the mapped files."""
        return self.copied + self.cache + self.working

    def require(self) -> None:
        """Raise `MissingEnvironmentError` if what must fit does not."""
        if self.fixed > self.available:
            raise MissingEnvironmentError(
                f"the server needs {_gb(self.fixed)} of memory beside the mapped files, {_gb(self.available)} are "
                f"available: copied weights {_gb(self.copied)}, cache {_gb(self.cache)}, working memory "
                f"{_gb(self.working)}",
                "end other programs, raise the container's limit, or set a smaller cache (VLLM_CPU_KVCACHE_SPACE, GiB)",
            )


def check_memory(checkpoint: CheckpointSummary, command: ServerCommand) -> None:
    """Print what the server needs and what there is; raise `MissingEnvironmentError` if it cannot run."""
    memory = memory_of(checkpoint, command)
    memory.require()
    print(memory, file=sys.stderr, flush=True)


def memory_of(checkpoint: CheckpointSummary, command: ServerCommand) -> Memory:
    """The memory of a server with this checkpoint and command, and what is available now."""
    weights = sum(path.stat().st_size for path in checkpoint.directory.glob("*.safetensors"))
    config, ranks = checkpoint.model, ranks_of(command.argv)
    drafts = bool(value_of(command.argv, "--speculative-config"))
    copied = copied_bytes(config, checkpoint.types, drafts, ranks) if checkpoint.types else weights
    working = _working(config, command, ranks)
    return Memory(weights, min(copied, weights), ranks * cache_bytes(command), working, available_memory())


def default_limits(checkpoint: CheckpointSummary, command: ServerCommand) -> dict[str, str]:
    """Flags of vLLM: the longest context that half of the memory that is left holds, and a cache for two of them.

    The context has at least 8192 tokens, or all that the model has; the cache at least 1 GiB, if all sequences can use
    it: vLLM writes to all of it at the start. Each rank of tensor parallel has one. What the command's flags or
    VLLM_CPU_KVCACHE_SPACE say is taken as it is.

    Raises:
        ConfigError: a stated context that a stated cache cannot hold; vLLM finds that after it has loaded the weights.
    """
    memory, config, flags = memory_of(checkpoint, command), checkpoint.model, command.argv
    dtype = value_of(flags, "--dtype") or checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    longest, blocks = (
        config.max_position_embeddings,
        cache_blocks(config, 4 if dtype in ("float32", "float") else 2, flags),
    )
    ranks = ranks_of(flags)
    left = (memory.available - memory.weights - memory.working) // ranks
    most = memory.cache // ranks or max(left // 2, blocks.bytes_for(min(longest, _SHORT_CONTEXT)))
    stated = value_of(flags, "--max-model-len")
    fits = max(_BLOCK, (most // blocks.size - blocks.fixed) * blocks.tokens)
    context = int(stated) if stated.isdecimal() else min(longest, fits if fits < 1024 else fits // 1024 * 1024)
    needed, rows = blocks.bytes_for(context), -(-context // blocks.tokens) * blocks.size
    if memory.cache // ranks and rows > memory.cache // ranks:
        raise ConfigError(
            f"a context of {context} tokens takes {_gb(needed)} of cache, {_gb(memory.cache // ranks)} are given",
            f"give a shorter --max-model-len, or --kv-cache-memory-bytes {needed}",
        )
    cache = max(needed, min(most, needed * number_of(flags, "--max-num-seqs", _SEQUENCES), max(2**30, 2 * needed)))
    limits = {"--max-model-len": str(context), "--kv-cache-memory-bytes": str(cache)}
    if memory.cache or "--gpu-memory-utilization" in given_flags(flags):
        del limits["--kv-cache-memory-bytes"]
    if stated:
        del limits["--max-model-len"]
    return limits


class CacheBlocks(NamedTuple):
    """Blocks of the cache: `tokens` and bytes of one, and how many a sequence has beside those of its tokens."""

    tokens: int
    size: int
    fixed: int

    def bytes_for(self, context: int) -> int:
        """Bytes of a cache that holds a sequence."""
        return (-(-context // self.tokens) + self.fixed) * self.size


def cache_blocks(config: ModelConfig, item: int, flags: Sequence[str]) -> CacheBlocks:
    """The cache's blocks in a rank, as `plugin.linear_states.fit_blocks` makes them for values of `item` bytes.

    Beside its tokens a sequence has vLLM's empty block and the one that is begun; the state of each linear attention
    layer, the one before it, and one for each draft.
    """
    drafts, layers = drafts_of(flags), range(config.num_layers_with_mtp)
    sparse = [layer for layer in layers if config.attention_kind(layer) == "sparse"]
    pool = config.index_kpool
    ring = 0 if pool == 1 else pool << ((pool + drafts - 1) // pool).bit_length()  # tokens: `RingCache`
    rows = item * _BLOCK * cached_values(config, layers)
    rings = item * 2 * ring * config.index_head_dim * len(sparse)
    heads, linear = config.linear_num_heads // ranks_of(flags), len(layers) - len(sparse)
    width = heads * config.linear_head_dim
    window = item * 3 * width * (config.linear_conv_kernel_dim - 1 + drafts)
    state = (width * config.linear_head_dim * FP32 + window + 8) * bool(linear)
    parts = max(1, -(-state // (rows + rings)))
    size = max(state, parts * rows + rings)
    states = linear and -(-linear // (size // state))
    return CacheBlocks(parts * _BLOCK, size, 3 + states * (2 + drafts))


def copied_bytes(config: ModelConfig, types: Mapping[str, str], drafts: bool, ranks: int) -> int:
    """Bytes of the weights of a quantized model that a server copies out of the mapped files, in all its ranks.

    `serve/plugin` copies what vLLM fuses (q_a with kv_a, float weights of the indexer), splits (W_UK or W_UV) or
    multiplies by torch (MTP's rot.weight, and other FLOAT linears but where the CPU has no instructions for bf16), and
    all scales. A test compares this with a server at GLM-5's widths.
    """
    total, sizes = 2 * ranks * drafts * config.hidden_size**2, config.sizes
    for prefix, weight, count in config.counted_weights():
        if not isinstance(weight, Linear) or (prefix.startswith(config.mtp_prefixes) and not drafts):
            continue
        rows, columns = weight.shape(sizes)
        routed, values = config.spec.is_routed(prefix + weight.name), count * rows * columns
        is_float = types.get(f"{prefix}{weight.name}.weight", FLOAT) == FLOAT
        if not is_float:
            total += count * rows * (FP32 if routed else 2 * FP32)  # weight_scale; of a linear weight_offset, too
            in_rows = ranks > 1 and weight.name.endswith(("o_proj", "down_proj"))
            total += values * (ranks * (weight.name in config.spec.down_projections) + (in_rows and not routed))
        elif weight.name == "self_attn.kv_b_proj":
            total += 2 * config.num_attention_heads * max(config.qk_nope_head_dim, config.v_head_dim) * columns
        elif not routed and not weight.is_table and (ranks > 1 or not _stays_in_file(weight.name)):
            total += 2 * ranks * values
    return total


def _stays_in_file(name: str) -> bool:
    """True for a FLOAT linear that our op multiplies where it is mapped."""
    copied = "_a_proj" in name or "indexer" in name or name.endswith(("eh_proj", "mlp.gate"))  # fused, or plain torch
    return name == "self_attn.q_b_proj" or (registry.widens_bf16() and not copied)


def cache_bytes(command: ServerCommand) -> int:
    """Bytes of the cache that a command states; 0 if it states none."""
    space = command.env.get(_CACHE) or os.environ.get(_CACHE, "")
    return number_of(command.argv, "--kv-cache-memory-bytes", int(space) * 2**30 if space.isdecimal() else 0)


def _working(config: ModelConfig, command: ServerCommand, ranks: int) -> int:
    """The processes, the activations of a step and its logits."""
    tokens = number_of(command.argv, "--max-num-batched-tokens", _TOKENS)
    sequences = number_of(command.argv, "--max-num-seqs", _SEQUENCES)
    attended = config.kv_lora_rank + config.qk_nope_head_dim + config.qk_rope_head_dim
    step = tokens * (4 * config.num_attention_heads * attended + 16 * config.hidden_size + 4 * config.index_topk)
    workers = 0 if ranks == 1 else ranks * _WORKER
    return _PROCESSES + workers + ranks * (step + 10 * sequences * config.vocab_size)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
