"""MLA preprocess: everything between a layer's input and the operands of sparse attention, in one op.

Arguments (T tokens, D hidden size, H heads, Rq = q_lora_rank, R = kv_lora_rank, N/P = qk nope/rope head dim):

    hidden_states   [T, D]          after input_layernorm
    cos, sin        [T, P / 2]      of each token's position; rotation pairs are interleaved: (0,1), (2,3), ...
    qkv_a           LinearWeights   N = Rq + R + P, rows  q | kv latent | k_pe  (vLLM's fused_qkv_a_proj)
    q_b             LinearWeights   N = H * (N + P), each head's rows  nope | rope
    w_uk_t          [H, N, R]       kv_b_proj's key half, per head: absorbs q_nope into the latent space
    q_a_gamma       [Rq]            RMSNorm weights; kv_a_gamma [R] likewise
    slot_mapping    int [T]         cache row of each token (block * block_size + offset); negative = skip
    ckv_cache       [num_blocks, block_size, R]     written; kpe_cache [num_blocks, block_size, P] likewise;
                                    both may be strided views of one fused 576-wide cache
    eps             float           of both norms (HF 5.19: 1e-6, vLLM: rms_norm_eps, the NPU kernel: 1e-6)
    returns         ql_nope [T, H, R], q_pe [T, H, P], q_c [T, Rq], all in hidden_states' dtype

The 13 steps (`reference.steps` gives what each yields):

    1-3   y = qkv_a(hidden_states)            quantize, multiply, scale back
    4     y -> q | kv | k_pe
    5     q_c = RMSNorm(q) * q_a_gamma        fp32; a copy in the activation dtype is returned
    6-8   z = q_b(q_c) as [T, H, N + P]       quantize the fp32 q_c, multiply, scale back
    9     ql_nope = z[..., :N] @ w_uk_t       per head
    10    q_pe = rope(z[..., N:])
    11    ckv = RMSNorm(kv) * kv_a_gamma
    12    kpe = rope(k_pe)
    13    ckv_cache[slot], kpe_cache[slot] = ckv, kpe

qkv_a and q_b each have their own quant mode: "no_quant", "per_token_quant_symm" (W8A8_DYNAMIC) or
"per_tensor_quant_asymm" (W8A8 static). no_quant multiplies in the activation dtype.

On purpose unlike the NPU kernel `_C_ascend.mla_preprocess`: rows are q | kv | k_pe, not kv | k_pe | q; rope is
interleaved in and out, not half-split on permuted weights; quantization divides in fp32, not fp16; no q_a beta.

Source: vllm-ascend `csrc/mla_preprocess` (semantics), vLLM `model_executor/layers/mla.py`.
Errors: `KernelInputError` on shapes, dtypes or quant modes that do not fit.
"""
