"""Attention over one sequence in plain torch, where SGLang has its backend and cache: all at once, no pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_on_cpu import start  # isort: skip  # noqa: F401  # before SGLang

import torch
import torch_npu
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from torch import Tensor


class IndexKeys:
    """Keys of the indexer, per layer."""

    start_layer = 0
    index_k_scale_buffer = None

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}

    def set_index_k_buffer(self, layer: int, _: Any, key: Tensor) -> None:
        self.keys[layer] = key.reshape(len(key), -1)

    def get_index_k_buffer(self, layer: int) -> Tensor:
        return self.keys[layer]


class Backend:
    """Sparse attention: every query sees the positions that the indexer chose for it."""

    prefill_attention_backend_str = decode_attention_backend_str = req_to_token_pool = None
    is_draft_worker = False
    page_size = 128

    def __init__(self, tokens: int) -> None:
        self.token_to_kv_pool = IndexKeys()
        length = torch.tensor([tokens])
        self.forward_metadata = SimpleNamespace(
            seq_lens_cpu_int=length, seq_lens=length, actual_seq_lengths_q=None,
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
        )  # fmt: skip

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save: bool = True, *, q_rope: Tensor,
        k_rope: Tensor, topk_indices: Tensor, **_: Any,
    ) -> Tensor:  # fmt: skip
        tokens, width = len(k), k.shape[-1]
        q, latent = q.reshape(tokens, -1, width).float(), k.reshape(tokens, -1).float()
        rotated, key = q_rope.reshape(tokens, q.shape[1], -1).float(), k_rope.reshape(tokens, -1).float()
        score = torch.einsum("thc,sc->ths", q, latent) + torch.einsum("thr,sr->ths", rotated, key)
        topk = topk_indices.reshape(tokens, -1).long()
        seen = torch.zeros(tokens, tokens + 1, dtype=torch.bool)
        seen.scatter_(1, torch.where(topk < 0, tokens, topk), True)
        seen = seen[:, :tokens] & torch.ones(tokens, tokens, dtype=torch.bool).tril()
        weight = (score * layer.scaling).masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        return (weight @ latent).to(k.dtype).reshape(tokens, -1)


def lightning_indexer(
    query: Tensor, key: Tensor, weights: Tensor, sparse_count: int, **_: Any
) -> tuple[Tensor, Tensor]:
    tokens = len(query)
    score = torch.einsum("thd,sd->ths", query.float(), key.float()).relu() * weights.float()[..., None]
    past = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    value, topk = score.sum(1).masked_fill(~past, float("-inf")).topk(min(sparse_count, tokens), -1)
    return torch.where(value.isinf(), -1, topk)[:, None].int(), value


torch_npu.npu_lightning_indexer = lightning_indexer


def one_sequence(tokens: list[int]) -> ForwardBatch:
    """A prefill of a whole sequence."""
    count, length = len(tokens), torch.tensor([len(tokens)])
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND, batch_size=1, input_ids=torch.tensor(tokens),
        req_pool_indices=torch.tensor([0]), seq_lens=length, out_cache_loc=torch.arange(count), seq_lens_sum=count,
    )  # fmt: skip
    batch.positions = torch.arange(count)
    batch.extend_seq_lens, batch.seq_lens_cpu, batch.extend_num_tokens = length, length, count
    batch.extend_prefix_lens = batch.extend_start_loc = torch.tensor([0])
    batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = [count], [0]
    return batch
