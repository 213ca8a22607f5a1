"""SGLang's scheduler and worker with a cache that holds tokens: a step computes whole sequences again.

Everything of the server is real but the attention over the cache: batches, prefix cache, slots of the memory pool,
logits, log-probabilities, sampling. A slot holds the id of its token instead of what attention keeps of it. A step
reads its requests' slots and computes their sequences from the start, as `forward` does: a cache's answers, slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_on_cpu import start  # isort: skip  # before SGLang

import sgl_kernel_npu.mem_cache.allocator
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.allocator import alloc_extend_naive
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context, get_attn_backend
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models.deepseek_v2 import DeepseekV2Model
from sglang_on_cpu.attention import Backend, one_sequence
from torch import Tensor


class TokenCache(AttentionBackend):
    """Stands for the attention backend of a worker: knows the slots of its requests, and their tokens."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        self.slots = runner.req_to_token_pool
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        self.page_size = runner.page_size
        self.tokens = torch.zeros(runner.token_to_kv_pool.size + 2 * runner.page_size, dtype=torch.long)

    def init_forward_metadata(self, batch: Any) -> None:
        """Nothing is laid out before a step."""

    def sequences(self, batch: Any) -> list[tuple[list[int], int]]:
        """(all tokens of a request, how many of them are new) of each request of a step."""
        self.tokens[batch.out_cache_loc] = batch.input_ids
        new = [1] * batch.batch_size if batch.forward_mode.is_decode() else batch.extend_seq_lens_cpu
        requests = []
        for number, (request, length) in enumerate(zip(batch.req_pool_indices, batch.seq_lens, strict=True)):
            slots = self.slots.req_to_token[int(request), : int(length)].long()
            requests.append((self.tokens[slots].tolist(), int(new[number])))
        return requests


whole_sequence = DeepseekV2Model.forward


@torch.no_grad()
def step(model: DeepseekV2Model, input_ids: Tensor, positions: Tensor, batch: Any, *_: Any) -> Tensor:
    """Hidden states of a step's new tokens."""
    requests = []
    for tokens, new in get_attn_backend().sequences(batch):
        local = one_sequence(tokens)
        with forward_context(ForwardContext(attn_backend=Backend(len(tokens))), forward_batch=local):
            requests.append(whole_sequence(model, local.input_ids, local.positions, local)[-new:])
    return torch.cat(requests)


def attention(runner: ModelRunner) -> None:
    """In the place of `ModelRunner.init_attention_backends`."""
    runner.attn_backend = runner.decode_attn_backend = TokenCache(runner)
    runner.decode_attn_backend_group = []
    runner.prefill_attention_backend_str = runner.decode_attention_backend_str = "torch_native"  # no Triton for a CPU


class AllocExtend:
    """The NPU's kernel for slots of new tokens, called `kernel[grid](...)`: SGLang's own plain version of it."""

    def __getitem__(self, _: tuple[int, ...]) -> Callable[..., None]:
        return self.run

    def run(self, before: Tensor, lengths: Tensor, last: Tensor, pages: Tensor, out: Tensor, *rest: int) -> None:
        alloc_extend_naive(before, lengths, last, pages, out, rest[1], "cpu")


def install() -> None:
    """In the process of a scheduler, before it starts."""
    start.on_gloo()
    allocation.support_triton = lambda _: False  # no Triton for a CPU: SGLang's own fall-back
    sgl_kernel_npu.mem_cache.allocator.alloc_extend_kernel = AllocExtend()
    ModelRunner.init_attention_backends = attention
    DeepseekV2Model.forward = step
