"""Bytes and operations per second of this CPU at a model's shapes, with as many threads as the server has.

Each is the fastest call in at least SECONDS, after a first one that compiles and warms up: other processes only make
calls slower. The efficiency of the served engine is fitted separately, to what it serves.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from glm5_ascend.model.config import ModelConfig
from glm5_kernels import ops

SECONDS = 1.0
#: Query tokens of a call, and cached tokens before them.
TOKENS, CONTEXT = 256, 768
COPY_BYTES = 256 * 2**20
PAGE = 64


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of the fastest call."""
    work()
    seconds: list[float] = []
    while sum(seconds) < SECONDS or len(seconds) < 5:
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def memory_rate() -> float:
    """Bytes read and written per second by a copy larger than all caches."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds_of(lambda: target.copy_(source))


def vector_rate() -> float:
    """fp32 element operations per second, in the L2 cache."""
    a, b, c = (torch.rand(2**16) for _ in range(3))
    return 2 * 2**16 / seconds_of(lambda: torch.addcmul(a, b, c, out=a))


def shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """[rows, columns] of the largest products of a layer."""
    c = config
    qk = c.qk_nope_head_dim + c.qk_rope_head_dim
    return [
        (c.q_lora_rank + c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size),
        (c.num_attention_heads * qk, c.q_lora_rank),
        (c.index_n_heads * c.index_head_dim, c.q_lora_rank),
        (c.hidden_size, c.num_attention_heads * c.v_head_dim),
        (2 * c.moe_intermediate_size, c.hidden_size),
        (c.hidden_size, c.moe_intermediate_size),
    ]


def product_rate(config: ModelConfig, dtype: torch.dtype) -> float:
    """Operations per second over one product of each shape; int8: with the quantization of its input."""
    work: list[Callable[[], object]] = []
    for rows, columns in shapes(config):
        if dtype == torch.int8:
            weight = torch.randint(-127, 128, (columns, rows), dtype=torch.int8).t()
            linear = ops.LinearWeights(weight, ops.PER_TOKEN, torch.full((rows,), 0.01))
            x = torch.randn(TOKENS, columns, dtype=torch.bfloat16)
            work.append(lambda x=x, linear=linear: ops.int8_linear(x, linear))  # type: ignore[misc]
        else:
            w, x = torch.randn(rows, columns, dtype=dtype), torch.randn(TOKENS, columns, dtype=dtype)
            work.append(lambda x=x, w=w: F.linear(x, w))  # type: ignore[misc]
    operations = sum(2.0 * TOKENS * rows * columns for rows, columns in shapes(config))
    return operations / sum(seconds_of(one) for one in work)


def _paged(width: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A bf16 cache of one request, and its block table."""
    blocks = -(-tokens // PAGE)
    return torch.randn(blocks, PAGE, width, dtype=torch.bfloat16), torch.arange(blocks, dtype=torch.int32)[None]


def indexer_rate(config: ModelConfig) -> float:
    """Operations per second of the lightning indexer, with its top-k."""
    c, length = config, CONTEXT + TOKENS // 2
    keys, table = _paged(c.index_head_dim, length)
    q = torch.randn(TOKENS, c.index_n_heads, c.index_head_dim, dtype=torch.bfloat16)
    starts, lens = torch.tensor([0, TOKENS], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    weights = torch.rand(TOKENS, c.index_n_heads)
    seconds = seconds_of(
        lambda: ops.lightning_indexer(q, keys, weights, ops.PagedBatch(starts, lens, table), c.index_topk)
    )
    pairs = sum(range(length - TOKENS + 1, length + 1))
    return 2.0 * pairs * c.index_n_heads * c.index_head_dim / seconds


def attention_rate(config: ModelConfig) -> float:
    """Operations per second of sparse attention over `index_topk` selected positions."""
    c, length = config, CONTEXT + TOKENS // 2
    width = c.kv_lora_rank + c.qk_rope_head_dim
    cache, table = _paged(width, length)
    ckv, kpe = cache.split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
    nope = torch.randn(TOKENS, c.num_attention_heads, c.kv_lora_rank, dtype=torch.bfloat16)
    rope = torch.randn(TOKENS, c.num_attention_heads, c.qk_rope_head_dim, dtype=torch.bfloat16)
    starts, lens = torch.tensor([0, TOKENS], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    visible_keys = range(length - TOKENS + 1, length + 1)
    positions = torch.full((TOKENS, c.index_topk), -1, dtype=torch.int32)
    for token, visible in enumerate(visible_keys):
        count = min(visible, c.index_topk)
        positions[token, :count] = torch.randperm(visible)[:count].int()
    seconds = seconds_of(
        lambda: ops.sparse_flash_attention(
            nope, rope, ckv, kpe, positions, ops.PagedBatch(starts, lens, table), width**-0.5
        )
    )
    pairs = sum(min(visible, c.index_topk) for visible in visible_keys)
    return 2.0 * pairs * c.num_attention_heads * (width + c.kv_lora_rank) / seconds


def expert_rate(config: ModelConfig) -> float:
    """Operations per second of quantized routed experts, with TOKENS tokens spread over all of them."""
    c = config
    experts, width = c.n_routed_experts, c.moe_intermediate_size
    first = torch.randint(-8, 8, (experts, c.hidden_size, 2 * width), dtype=torch.int8).transpose(1, 2)
    second = torch.randint(-8, 8, (experts, width, c.hidden_size), dtype=torch.int8).transpose(1, 2)
    scales = torch.full((experts, 2 * width), 0.01), torch.full((experts, c.hidden_size), 0.01)
    ids = itertools.islice(itertools.cycle(range(experts)), TOKENS * c.num_experts_per_tok)
    expert_ids = torch.tensor(list(ids)).view(TOKENS, c.num_experts_per_tok)
    weights = torch.full(expert_ids.shape, 1.0 / c.num_experts_per_tok)
    x = torch.randn(TOKENS, c.hidden_size, dtype=torch.bfloat16)
    seconds = seconds_of(lambda: ops.w4a8_moe(x, weights, expert_ids, first, scales[0], second, scales[1]))
    return 6.0 * TOKENS * c.num_experts_per_tok * width * c.hidden_size / seconds
