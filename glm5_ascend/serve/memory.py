"""What a server on a CPU needs of memory, and what this machine has. Imports neither torch nor vLLM."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from glm5_ascend.checkpoint.summary import CheckpointSummary
from glm5_ascend.errors import MissingEnvironmentError
from glm5_ascend.serve.flags import ServerCommand, value_of

_CGROUPS, _OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
#: Folder and files of control groups of version 2, and of version 1's memory.
_GROUP_FILES = {
    "": ("", "memory.max", "memory.current"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}
#: Bytes of the server's two processes before they load a model.
_PROCESSES = 1_500_000_000
#: vLLM's defaults of a server on a CPU: tokens of a step, and sequences.
_TOKENS, _SEQUENCES = 2048, 128
_CACHE = "VLLM_CPU_KVCACHE_SPACE"


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
    copied = _copied(checkpoint.config) if checkpoint.types else weights
    return Memory(weights, min(copied, weights), _cache(command), _working(checkpoint.config, command), available())


def available() -> int:
    """Bytes that new processes may take: of the machine, and of each control group above this process."""
    return min([psutil.virtual_memory().available, *_left_in_cgroups()])


def _left_in_cgroups() -> Iterator[int]:
    """Limit minus use, where a group has a limit; its cache of files can be given back."""
    lines = _OWN_GROUP.read_text().splitlines() if _OWN_GROUP.exists() else []
    for _, kind, path in (line.split(":", 2) for line in lines):
        if kind not in _GROUP_FILES:
            continue
        (root, limit_file, used_file), prefix = _GROUP_FILES[kind], "total_" if kind else ""
        group = _CGROUPS / root / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(_CGROUPS / root):
                break
            try:
                limit, used = ((folder / file).read_text().strip() for file in (limit_file, used_file))
                rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):
                continue
            if limit != "max":
                files = int(rows[f"{prefix}inactive_file"]) + int(rows[f"{prefix}active_file"])
                yield max(0, int(limit) - int(used) + files)


def _copied(config: Mapping[str, Any]) -> int:
    """Bytes of the weights of a quantized GLM-5 that the server copies: parts of fused layers, and small float ones."""
    size = _Sizes(config)
    hidden, latents = size("hidden_size"), size("kv_lora_rank")
    heads, index_heads, index_dim = size("num_attention_heads"), size("index_n_heads"), size("index_head_dim")
    fused = hidden * (size("q_lora_rank") + latents + size("qk_rope_head_dim"))
    absorbed = 2 * heads * (size("qk_nope_head_dim") + size("v_head_dim")) * latents
    indexer = 2 * (size("q_lora_rank") * index_heads * index_dim + hidden * (index_dim + index_heads))
    layers, dense = size("num_hidden_layers") + size("num_nextn_predict_layers"), size("first_k_dense_replace")
    experts = size("n_routed_experts") * (4 * hidden + 4 * (2 * size("moe_intermediate_size") + hidden))
    shared = 2 * hidden * size("moe_intermediate_size") * size("n_shared_experts")
    mlps = dense * 2 * hidden * size("intermediate_size") + (layers - dense) * (experts + shared)
    return layers * (fused + absorbed + indexer) + mlps


def _cache(command: ServerCommand) -> int:
    stated = value_of(command.argv, "--kv-cache-memory-bytes")
    if stated.isdecimal():
        return int(stated)
    space = command.env.get(_CACHE) or os.environ.get(_CACHE, "")
    return int(space) * 2**30 if space.isdecimal() else 0


def _working(config: Mapping[str, Any], command: ServerCommand) -> int:
    """The processes, the activations of a step and its logits."""
    size = _Sizes(config)
    tokens, sequences = (
        int(text) if text.isdecimal() else default
        for text, default in (
            (value_of(command.argv, "--max-num-batched-tokens"), _TOKENS),
            (value_of(command.argv, "--max-num-seqs"), _SEQUENCES),
        )
    )
    attention = size("num_attention_heads") * (2 * size("kv_lora_rank") + 2 * size("qk_head_dim"))
    step = tokens * (2 * attention + 16 * size("hidden_size") + 4 * size("index_topk"))
    return _PROCESSES + step + 10 * sequences * size("vocab_size")


class _Sizes:
    """Numbers of config.json; 0 if one is absent."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def __call__(self, key: str) -> int:
        value = self._config.get(key)
        return value if isinstance(value, int) else 0


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
