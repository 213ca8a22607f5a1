"""Lightning Indexer: for each query token, the `topk` earlier positions that sparse attention will read.

    score[t, s] = sum_h weights[t, h] * relu(q[t, h, :] . k[s, :])          in fp32
    out[t, :]   = the min(topk, visible) positions s < visible(t) with the largest score, then -1

Arguments (T query tokens of all requests in a row, B requests, H index heads, D index head dim):

    q               [T, H, D]                      rotated; fp32, bf16 or fp16
    k_cache         [num_blocks, block_size, D]    rotated keys, this step's keys already inside
    weights         [T, H]                         any sign; a positive constant factor changes nothing
    batch           PagedBatch                     of B requests and T tokens, see `paged_cache`
    topk            int >= 1
    returns         int32 [T, topk]                positions inside the request, ascending, unused tail -1

Rules: query i of n sees positions 0 .. seq_len - n + i. Equal scores: the lowest position wins, always. A position
that is not visible, whose block is missing, or whose score is NaN, is never returned. Attention does not depend on the
order; the official operators (`npu.py`) return their own.

`lightning_indexer_quant` is the same on int8 keys (LI-C8, half the bytes):

    score[t, s] = k_scale[s] * sum_h weights[t, h] * relu(q_scale[t, h] * (q[t, h, :] . k[s, :]))

    q, k_cache      int8; q_scale [T, H] and k_scale_cache [num_blocks, block_size] positive, fp16 on an NPU
    order           q, k_cache, weights, q_scale, k_scale_cache, batch, topk

`quantize_indexer(x [..., D]) -> int8 [..., D], fp16 [...]` makes both: rotated by the Hadamard matrix of size D, so
that no dimension stands out, then max|x| / 127 per vector. A rotation of q and k alike changes no dot product.

Source: arXiv 2512.02556 (DeepSeek-V3.2), `GlmMoeDsaIndexer` of transformers 5.19, `npu_lightning_indexer`
(sparse_mode 3); for int8 vllm-ascend's `npu_lightning_indexer_quant` and `attention/sfa_v1.py` (Hadamard, scales).
Errors: `KernelInputError` on shapes that do not fit.
"""
