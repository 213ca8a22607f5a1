"""Sparse Flash Attention: absorbed MLA over the positions the indexer chose.

    J(t)      = usable entries of topk_indices[t]
    s[h, j]   = (ql_nope[t, h] . ckv[j] + q_pe[t, h] . kpe[j]) * scale       fp32, j in J(t)
    out[t, h] = sum_j softmax_j(s)[h, j] * ckv[j]                           fp32 accumulate, query dtype out
    lse[t, h] = logsumexp_j(s[h, j])                                        fp32

Arguments (T query tokens, B requests, H heads, R = kv_lora_rank, P = qk_rope_head_dim):

    ql_nope         [T, H, R]                      q_nope absorbed with W_UK
    q_pe            [T, H, P]                      rotated
    ckv_cache       [num_blocks, block_size, R]    normalised latents; may be a strided view of a fused cache
    kpe_cache       [num_blocks, block_size, P]    rotated keys
    topk_indices    int32 [T, K]                   positions inside the request, -1 = end of list
    batch           PagedBatch                     of B requests and T tokens, see `paged_cache`
    scale           float                          (nope + rope head dim) ** -0.5
    round_probs     bool                           round the probabilities to the query dtype before P @ V, as the
                                                   NPU kernel does; no effect in fp32
    returns         out [T, H, R], lse fp32 [T, H]

Usable entries (the NPU kernel's rule): with visible(t) positions in sight, look at the first min(K, visible)
entries; the first negative one ends the list; entries >= visible are skipped, and so is a position whose block is
missing. No usable entry: out row 0, lse +inf. Repeated positions are undefined.

`sparse_flash_attention_quant` reads one int8 cache of packed rows instead (SFA-C8, 656 bytes for GLM-5):

    kv_cache        int8 [num_blocks, block_size, R + 2 P + 4 R / 128]
                    R int8 latents | P bf16 rotated keys | an fp32 scale per 128 latents
    ckv[j]          = bf16(int8 * scale), then as above
    order           ql_nope, q_pe, kv_cache, topk_indices, batch, scale, round_probs

`pack_latents(ckv [..., R], kpe [..., P])` makes such rows: max|x| / 127 per 128 latents. R is a multiple of 128.

Source: vllm-ascend's contracts of `npu_sparse_flash_attention` and `npu_kv_quant_sparse_flash_attention`
(sparse_mode 3, sparse_block_size 1, tile_size 128, scales in the row).
Errors: `KernelInputError` on shapes that do not fit.
"""
