"""Routed experts with int4 weights and int8 activations (W4A8_DYNAMIC); int8 weights (W8A8_DYNAMIC) alike.

For each token t and each of its experts e, with activations quantized per row (scale max|row| / 127):

    g, u   = (x_q w13[e]^T) * s_x * w13_scale[e]      split in halves: gate, up
    a      = silu(g) * u                              fp32, then quantized per row
    y      = (a_q w2[e]^T) * s_a * w2_scale[e]
    out[t] = sum over its experts of topk_weight * y  fp32, then x's dtype

Arguments (T tokens, D hidden size, I expert width, E experts, k experts per token):

    x             [T, D]
    topk_weights  [T, k]           router weights
    topk_ids      int [T, k]       expert of each slot; negative = no expert (not on this rank)
    w13           int8 [E, 2I, D]  gate rows, then up rows; int4 codes, one per byte (-8..7), or int8 codes
    w13_scale     fp32 [E, 2I]     per output row
    w2            int8 [E, D, I], w2_scale fp32 [E, D]
    returns       [T, D] in x's dtype

The checkpoint's `scale_bias` is not needed: it undoes a +8 shift that only the NPU's unsigned matmul makes.

Source: vllm-ascend `quantization/methods/w4a8.py` (semantics).
Errors: `KernelInputError` on shapes that do not fit.
"""
