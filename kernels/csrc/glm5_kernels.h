// The C interface of the CPU kernels. Python calls it by ctypes (glm5_kernels/native).
//
// The library holds every op once for each instruction set: GLM5_NAME(rms_norm) is glm5_avx2_rms_norm, for example.
// Callers own all memory. Rows are contiguous in their last dimension; a pitch is the distance, in elements, from one
// row to the next. dtype is one of Dtype. Ops run on as many threads as OpenMP would use, which is what torch has set;
// their number changes no bit of a result. Every op returns 0, or kNoMemory when it could not allocate its scratch.
#pragma once
#include <cstdint>

#define GLM5_JOIN(set, op) glm5_##set##_##op
#define GLM5_EXPAND(set, op) GLM5_JOIN(set, op)
#define GLM5_NAME(op) GLM5_EXPAND(GLM5_SET, op)

enum Dtype : int64_t { kFp32 = 0, kBf16 = 1, kInt8 = 2 };
enum Code : int { kDone = 0, kNoMemory = 1 };

#pragma GCC visibility push(default)
extern "C" {
// The instruction sets that this library has and this CPU can run, the fastest one first, separated by spaces.
const char* glm5_instruction_sets();

#ifdef GLM5_SET
// total = x + residual (residual and total may be null), out = total / rms(total) * weight; [tokens, columns] each in
// dtype fp32 or bf16, weight [columns]; columns a multiple of 16; the quotient is rounded to dtype before the product.
int GLM5_NAME(rms_norm)(const void* x, int64_t x_pitch, const void* residual, int64_t residual_pitch,
                        const void* weight, int64_t tokens, int64_t columns, int64_t dtype, float eps, void* out,
                        void* total);

// y [tokens, rows] in y_dtype <- x [tokens, k] in x_dtype, quantized, times weight int8 [rows, k] transposed, times
// scales fp32 [rows]. Rows of x have a scale each, max|x| / 127; or, with the addresses of input_scale and
// input_offset, are round(x / input_scale + input_offset), and bias int32 [rows] is added to the sums.
int GLM5_NAME(int8_linear)(const void* x, int64_t x_pitch, int64_t x_dtype, int64_t tokens, int64_t k,
                           const int8_t* weight, int64_t weight_pitch, int64_t rows, const float* scales,
                           const float* input_scale, const float* input_offset, const int32_t* bias, void* y,
                           int64_t y_dtype);

// The weights of experts: blocks of one shape [rows, k] at `bases`, int8 or, `packed`, INT4 with two rows in a byte;
// pitch: bytes from a line in memory to the next one. scales fp32, one for each row of each expert.
struct ExpertBlocks {
  const void* const* bases;
  int64_t pitch, rows, k, packed;
  const float* scales;
};

// out fp32 [tokens, w2.rows] <- sum over the experts of each token of weight * w2 (silu(gate) * up), where gate and up
// are blocks 2e and 2e + 1 of w13, and activations are quantized per row. ids, weights [tokens, per_token]; negative
// ids are no experts.
int GLM5_NAME(w4a8_moe)(const void* x, int64_t x_pitch, int64_t dtype, int64_t tokens, const int64_t* ids,
                        const float* weights, int64_t per_token, int64_t experts, const ExpertBlocks* w13,
                        const ExpertBlocks* w2, float* out);

// out int32 [tokens, topk] <- the positions with the largest scores of each token, ascending, then -1. q (token, head) and
// k_cache (block, offset) are rows of dims elements, a multiple of 16, fp32, bf16 or int8; weights [tokens, heads];
// k_scale [num_blocks, block_size] or null; query_start_loc [requests + 1]; visible [tokens], the positions that a token
// sees; block_table [requests, max_blocks], negative: no block.
int GLM5_NAME(lightning_indexer)(const void* q, int64_t q_token_pitch, int64_t q_head_pitch, int64_t q_dtype,
                                 const void* k_cache, int64_t block_pitch, int64_t row_pitch, int64_t k_dtype,
                                 const float* weights, const float* k_scale, const int64_t* query_start_loc,
                                 const int64_t* visible, const int32_t* block_table, int64_t requests,
                                 int64_t max_blocks, int64_t block_size, int64_t heads, int64_t dims, int64_t topk,
                                 int32_t* out);

// out [tokens, heads, rank] in fp32 or bf16 and lse [tokens, heads] <- attention over topk_indices [tokens, topk] as the
// op's contract says; request and visible [tokens]. rank a multiple of 32, rope of 16. A cache is fp32 or bf16, or int8:
// then kpe_cache is the rotated part of the packed rows of ckv_cache, and rank a multiple of 128.
int GLM5_NAME(sparse_flash_attention)(const void* ql_nope, int64_t nope_token_pitch, int64_t nope_head_pitch,
                                      int64_t nope_dtype, const void* q_pe, int64_t pe_token_pitch,
                                      int64_t pe_head_pitch, int64_t pe_dtype, const void* ckv_cache,
                                      int64_t ckv_block_pitch, int64_t ckv_row_pitch, const void* kpe_cache,
                                      int64_t kpe_block_pitch, int64_t kpe_row_pitch, int64_t cache_dtype,
                                      const int32_t* topk_indices, const int64_t* request, const int64_t* visible,
                                      const int32_t* block_table, int64_t tokens, int64_t heads, int64_t rank,
                                      int64_t rope, int64_t topk, int64_t max_blocks, int64_t block_size, float scale,
                                      int64_t round_probs, void* out, int64_t out_dtype, float* lse);

// out [tokens, heads, dim] <- the rotated queries; rows of k_cache <- the normed and rotated keys; all in dtype fp32 or
// bf16, dim a multiple of 16. cos and sin [tokens, pairs]; slot_mapping [tokens], negative: written nowhere.
int GLM5_NAME(indexer_preprocess)(const void* q, int64_t q_token_pitch, int64_t q_head_pitch, const void* k,
                                  int64_t k_pitch, const void* norm_weight, int64_t weight_dtype,
                                  const void* norm_bias, int64_t bias_dtype, float eps, const void* cos,
                                  int64_t cos_pitch, const void* sin, int64_t sin_pitch, int64_t angle_dtype,
                                  int64_t pairs, int64_t interleaved, const int64_t* slot_mapping, void* k_cache,
                                  int64_t block_pitch, int64_t row_pitch, int64_t block_size, int64_t tokens,
                                  int64_t heads, int64_t dim, int64_t dtype, void* out);

// Of rows y [tokens, q_lora + rank + rope]: q_c and rounded_q_c (in dtype) [tokens, q_lora] <- the first part normed; rows
// of ckv_cache <- the second one normed; rows of kpe_cache <- the third one rotated. All in dtype fp32 or bf16, sizes
// multiples of 16. cos and sin [tokens, rope / 2]; slot_mapping [tokens], negative: written nowhere.
int GLM5_NAME(mla_latents)(const void* y, int64_t y_pitch, int64_t dtype, const void* q_gamma, int64_t q_gamma_dtype,
                           const void* kv_gamma, int64_t kv_gamma_dtype, float eps, const void* cos, int64_t cos_pitch,
                           const void* sin, int64_t sin_pitch, int64_t angle_dtype, const int64_t* slot_mapping,
                           void* ckv_cache, int64_t ckv_block_pitch, int64_t ckv_row_pitch, void* kpe_cache,
                           int64_t kpe_block_pitch, int64_t kpe_row_pitch, int64_t block_size, int64_t tokens,
                           int64_t q_lora, int64_t rank, int64_t rope, float* q_c, void* rounded_q_c);

// out [tokens, heads, rope] <- the rows z (token, head) of rope elements rotated, both in dtype fp32 or bf16.
int GLM5_NAME(rotate_queries)(const void* z, int64_t token_pitch, int64_t head_pitch, int64_t dtype, const void* cos,
                              int64_t cos_pitch, const void* sin, int64_t sin_pitch, int64_t angle_dtype,
                              int64_t tokens, int64_t heads, int64_t rope, void* out);

// x <- x * weight times the Hadamard matrix of size n along dim, in place; x fp32 [rows, columns], whose size along dim is
// a multiple of n. core [order, order] is the transposed core of n / order = 2^m; along dim 1 2^m is at least 16, along
// dim 0 columns are a multiple of 16. weight [n] includes the factor 1 / sqrt(n).
int GLM5_NAME(hadamard)(float* x, int64_t pitch, int64_t rows, int64_t columns, const float* weight, int64_t n,
                        const float* core, int64_t order, int64_t dim);
#endif
}
#pragma GCC visibility pop
