"""Value up-projection of absorbed MLA: what attention gives in the latent space becomes each head's values.

    out[t, h] = latent[t, h] W_UV[h]

Arguments: latent [T, H, kv_lora_rank]; w_uv [H, kv_lora_rank, v_head_dim], of the same dtype (fp32, bf16 or fp16).
Returns [T, H * v_head_dim] in that dtype, summed in fp32 and rounded once.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; vLLM `MLACommonBaseImpl` (`_v_up_proj`).
Errors: `KernelInputError` on shapes or dtypes that do not fit each other.
"""
