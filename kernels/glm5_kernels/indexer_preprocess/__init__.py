"""Indexer preprocess: what lies between the indexer's projections and the Lightning Indexer, in one op.

    q'[t, h] = rope(q[t, h])                    the first P of its D dims; the others stay
    k'[t]    = rope(LayerNorm(k[t]))            LayerNorm(k) = (k - mean) / sqrt(var + eps) * weight + bias
    k_cache[slot_mapping[t]] = k'[t]

Arguments (T tokens, H index heads, D index_head_dim, P rotated dims):

    q             [T, H, D]     wq_b's output; k [T, D] wk's, of the same dtype (fp32, bf16 or fp16)
    norm_weight   [D]           k_norm's; norm_bias [D] likewise; eps of the same norm (1e-6)
    cos, sin      [T, P / 2]    of each token's position
    interleaved   bool          rotation pairs are (0, 1), (2, 3), ... (GLM-5), else (0, P / 2), (1, P / 2 + 1), ...
    slot_mapping  int [T]       cache row of each token (block * block_size + offset); negative = skip
    k_cache       [num_blocks, block_size, D]     written
    returns       q' [T, H, D]

Norm and rotation are in fp32 and rounded once.

Source: transformers `GlmMoeDsaIndexer.forward`; vLLM `model_executor/models/deepseek_v2.py`, `Indexer.forward`.
Errors: `KernelInputError` on shapes, dtypes or slots that do not fit.
"""
