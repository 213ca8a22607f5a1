// The exported ops of attention, for one instruction set.
#include "indexer_preprocess.h"
#include "lightning_indexer_tasks.h"
#include "mla_preprocess.h"
#include "sparse_flash_attention_amx.h"
#include "sparse_flash_attention_tiles.h"

using namespace glm5::GLM5_SET;

int GLM5_NAME(lightning_indexer)(const void* q, int64_t q_token_pitch, int64_t q_head_pitch, int64_t q_dtype,
                                 const void* k_cache, int64_t block_pitch, int64_t row_pitch, int64_t k_dtype,
                                 const float* weights, const float* k_scale, const int64_t* query_start_loc,
                                 const int64_t* visible, const int32_t* block_table, int64_t requests,
                                 int64_t max_blocks, int64_t block_size, int64_t heads, int64_t dims, int64_t topk,
                                 int32_t* out) {
  return guarded([&] {
    lightning_indexer({.q = {q, q_token_pitch, q_head_pitch, q_dtype},
                       .keys = {k_cache, block_pitch, row_pitch, k_dtype},
                       .weights = weights,
                       .key_scale = k_scale,
                       .starts = query_start_loc,
                       .visible = visible,
                       .block_table = block_table,
                       .requests = requests,
                       .max_blocks = max_blocks,
                       .block_size = block_size,
                       .heads = heads,
                       .dims = dims,
                       .topk = topk,
                       .out = out});
  });
}

int GLM5_NAME(sparse_flash_attention)(const void* ql_nope, int64_t nope_token_pitch, int64_t nope_head_pitch,
                                      int64_t nope_dtype, const void* q_pe, int64_t pe_token_pitch,
                                      int64_t pe_head_pitch, int64_t pe_dtype, const void* ckv_cache,
                                      int64_t ckv_block_pitch, int64_t ckv_row_pitch, const void* kpe_cache,
                                      int64_t kpe_block_pitch, int64_t kpe_row_pitch, int64_t cache_dtype,
                                      const int32_t* topk_indices, const int64_t* request, const int64_t* visible,
                                      const int32_t* block_table, int64_t tokens, int64_t heads, int64_t rank,
                                      int64_t rope, int64_t topk, int64_t max_blocks, int64_t block_size, float scale,
                                      int64_t round_probs, void* out, int64_t out_dtype, float* lse) {
  return guarded([&] {
    const Attention op{.nope = {ql_nope, nope_token_pitch, nope_head_pitch, nope_dtype},
                       .pe = {q_pe, pe_token_pitch, pe_head_pitch, pe_dtype},
                       .ckv = {ckv_cache, ckv_block_pitch, ckv_row_pitch, cache_dtype},
                       .kpe = {kpe_cache, kpe_block_pitch, kpe_row_pitch, cache_dtype},
                       .topk_indices = topk_indices,
                       .request = request,
                       .visible = visible,
                       .block_table = block_table,
                       .tokens = tokens,
                       .heads = heads,
                       .rank = rank,
                       .rope = rope,
                       .topk = topk,
                       .max_blocks = max_blocks,
                       .block_size = block_size,
                       .scale = scale,
                       .round_probs = round_probs != 0,
                       .out = {out, heads * rank, rank, out_dtype},
                       .lse = lse};
    if (!tokens || !heads) return;
    if (attends_by_amx(op))
      attend_by_amx(op);
    else
      attend_by_vectors(op);
  });
}

int GLM5_NAME(indexer_preprocess)(const void* q, int64_t q_token_pitch, int64_t q_head_pitch, const void* k,
                                  int64_t k_pitch, const void* norm_weight, int64_t weight_dtype, const void* norm_bias,
                                  int64_t bias_dtype, float eps, const void* cos, int64_t cos_pitch, const void* sin,
                                  int64_t sin_pitch, int64_t angle_dtype, int64_t pairs, int64_t interleaved,
                                  const int64_t* slot_mapping, void* k_cache, int64_t block_pitch, int64_t row_pitch,
                                  int64_t block_size, int64_t tokens, int64_t heads, int64_t dim, int64_t dtype,
                                  void* out) {
  return guarded([&] {
    indexer_preprocess({.q = {q, q_token_pitch, q_head_pitch, dtype},
                        .out = {out, heads * dim, dim, dtype},
                        .k = {k, 0, k_pitch, dtype},
                        .cache = {k_cache, block_pitch, row_pitch, dtype},
                        .weight = norm_weight,
                        .bias = norm_bias,
                        .weight_dtype = weight_dtype,
                        .bias_dtype = bias_dtype,
                        .eps = eps,
                        .angles = {cos, sin, cos_pitch, sin_pitch, angle_dtype, pairs},
                        .interleaved = interleaved != 0,
                        .slots = slot_mapping,
                        .tokens = tokens,
                        .heads = heads,
                        .dim = dim,
                        .block_size = block_size});
  });
}

int GLM5_NAME(mla_latents)(const void* y, int64_t y_pitch, int64_t dtype, const void* q_gamma, int64_t q_gamma_dtype,
                           const void* kv_gamma, int64_t kv_gamma_dtype, float eps, const void* cos, int64_t cos_pitch,
                           const void* sin, int64_t sin_pitch, int64_t angle_dtype, const int64_t* slot_mapping,
                           void* ckv_cache, int64_t ckv_block_pitch, int64_t ckv_row_pitch, void* kpe_cache,
                           int64_t kpe_block_pitch, int64_t kpe_row_pitch, int64_t block_size, int64_t tokens,
                           int64_t q_lora, int64_t rank, int64_t rope, float* q_c, void* rounded_q_c) {
  return guarded([&] {
    mla_latents({.y = {y, 0, y_pitch, dtype},
                 .q_gamma = q_gamma,
                 .kv_gamma = kv_gamma,
                 .q_gamma_dtype = q_gamma_dtype,
                 .kv_gamma_dtype = kv_gamma_dtype,
                 .eps = eps,
                 .angles = {cos, sin, cos_pitch, sin_pitch, angle_dtype, rope / 2},
                 .slots = slot_mapping,
                 .ckv = {ckv_cache, ckv_block_pitch, ckv_row_pitch, dtype},
                 .kpe = {kpe_cache, kpe_block_pitch, kpe_row_pitch, dtype},
                 .q_c = q_c,
                 .rounded_q_c = rounded_q_c,
                 .tokens = tokens,
                 .q_lora = q_lora,
                 .rank = rank,
                 .block_size = block_size});
  });
}

int GLM5_NAME(rotate_queries)(const void* z, int64_t token_pitch, int64_t head_pitch, int64_t dtype, const void* cos,
                              int64_t cos_pitch, const void* sin, int64_t sin_pitch, int64_t angle_dtype,
                              int64_t tokens, int64_t heads, int64_t rope, void* out) {
  return guarded([&] {
    rotate_queries({z, token_pitch, head_pitch, dtype}, {out, heads * rope, rope, dtype},
                   {cos, sin, cos_pitch, sin_pitch, angle_dtype, rope / 2}, tokens, heads);
  });
}
