"""int8 linear layer: y = x W^T with int8 weights and activations, exact int32 sums, one rounding at the end.

    W8A8_DYNAMIC ("per_token_quant_symm"):     s_x = max|row| / 127;  x_q = round(x / s_x)
                                               y = (x_q W_q^T) * s_x * weight_scale
    W8A8 static ("per_tensor_quant_asymm"):    x_q = round(x / input_scale + input_offset)
                                               y = (x_q W_q^T + quant_bias) * deq_scale

Arguments: x [..., K] float; w `LinearWeights` with int8 weight [N, K]. Returns [..., N] in x's dtype.
x_q saturates at -128..127, ties to even. `no_quant` is accepted and is an ordinary matmul.

Source: vllm-ascend `quantization/methods/w8a8_dynamic.py`, `w8a8_static.py` (semantics).
Errors: `KernelInputError` on missing scales, wrong dtypes or an unknown quant mode.
"""
