"""Sparse Flash Attention: absorbed MLA over the positions the indexer chose.

    J(t)      = usable entries of topk_indices[t]
    s[h, j]   = (ql_nope[t, h] . ckv[j] + q_pe[t, h] . kpe[j]) * scale       fp32, j in J(t)
    out[t, h] = sum_j softmax_j(s)[h, j] * ckv[j]                           fp32 accumulate, query dtype out
    lse[t, h] = logsumexp_j(s[h, j])                                        fp32

T query tokens, H heads, R = kv_lora_rank, P = qk_rope_head_dim, K selected positions.

Usable entries (the NPU kernel's rule): with visible(t) positions in sight, look at the first min(K, visible)
entries; the first negative one ends the list; entries >= visible are skipped, and so is a position whose block is
missing. No usable entry: out row 0, lse +inf. Repeated positions are undefined.

Source: vllm-ascend's contracts of `npu_sparse_flash_attention` and `npu_kv_quant_sparse_flash_attention`
(sparse_mode 3, sparse_block_size 1, tile_size 128, scales in the row).
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from glm5_kernels.contract import require_shape
from glm5_kernels.errors import KernelInputError
from glm5_kernels.paged_cache import PagedBatch, check_blocks

#: Latents that share a scale in a packed row.
TILE = 128


class SparseFlashAttention(NamedTuple):
    """Absorbed attention over the chosen positions: out [T, H, R] and lse fp32 [T, H].

    round_probs rounds the probabilities to the query dtype before P @ V, as the NPU kernel does; no effect in fp32.
    """

    ql_nope: Annotated[Tensor, "float [T, H, R]"]  # q_nope absorbed with W_UK
    q_pe: Annotated[Tensor, "float [T, H, P]"]  # rotated
    ckv_cache: Annotated[Tensor, "float [num_blocks, block_size, R]"]  # normalised; may be a view of a fused cache
    kpe_cache: Annotated[Tensor, "float [num_blocks, block_size, P]"]  # rotated keys
    topk_indices: Annotated[Tensor, "int [T, K]"]  # positions inside the request, -1 = end of list
    batch: PagedBatch
    scale: float  # (nope + rope head dim) ** -0.5
    round_probs: bool = False

    def check_values(self) -> None:
        check_blocks(self.batch, *self.ckv_cache.shape[:2])


class SparseFlashAttentionQuant(NamedTuple):
    """`SparseFlashAttention` on one int8 cache of packed rows (SFA-C8, 656 bytes for GLM-5; see `pack_latents`).

    A row holds R int8 latents, P bf16 rotated keys, and an fp32 scale per 128 latents: ckv[j] = bf16(int8 * scale).
    """

    ql_nope: Annotated[Tensor, "float [T, H, R]"]
    q_pe: Annotated[Tensor, "float [T, H, P]"]
    kv_cache: Annotated[Tensor, "int8 [num_blocks, block_size, bytes]"]
    topk_indices: Annotated[Tensor, "int [T, K]"]
    batch: PagedBatch
    scale: float
    round_probs: bool = False

    def rules(self) -> None:
        rank, rope, blocks = self.ql_nope.shape[2], self.q_pe.shape[2], self.kv_cache.shape[:2]
        if rank % TILE:
            raise KernelInputError(f"kv_lora_rank is {rank}, packed rows need a multiple of {TILE}")
        require_shape("kv_cache", self.kv_cache, (*blocks, rank + 2 * rope + 4 * rank // TILE))

    def check_values(self) -> None:
        check_blocks(self.batch, *self.kv_cache.shape[:2])
