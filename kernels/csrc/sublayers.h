// Attention and MLP of a decoder layer, composed of the functions that the single ops are.
//
//     attention   norm -> qkv_a -> latents -> q_b -> w_uk -> (indexer) -> attention over latents -> w_uv -> o_proj
//     MLP         norm -> gate_up -> swiglu -> down (+ router -> routed experts)
#pragma once
#include "experts.h"
#include "head_products.h"
#include "int8_linear.h"
#include "lightning_indexer_tasks.h"
#include "preprocess.h"
#include "sparse_flash_attention_amx.h"

namespace glm5::GLM5_SET {

// A matrix [tokens, columns] for the time of a call, bf16 or fp32.
template <class T>
struct Matrix {
  int64_t columns;
  Buffer<T> data;

  Matrix(int64_t tokens, int64_t count) : columns(count), data(tokens * count) {}
  // (0, token), from a column on.
  Rows rows(int64_t first = 0) const { return {data + first, 0, columns, sizeof(T) == 4 ? kFp32 : kBf16}; }
  // (token, head): `width` columns for each head, from the head's column `first` on.
  Rows heads(int64_t width, int64_t first = 0) const { return {data + first, columns, width, rows().dtype}; }
};
using Bf16Matrix = Matrix<uint16_t>;
using Fp32Matrix = Matrix<float>;

// y <- x times the weight transposed; both (0, token), y of bf16.
inline void linear(const Linear& w, const Rows& x, const Rows& y, int64_t tokens) {
  Rows out = y;
  for (const LinearPart& part : w.parts) {
    void* const weight = const_cast<uint8_t*>(part.weight);
    if (part.scales)
      int8_linear({x, out, part.weight, part.pitch, part.scales, part.input_scale, part.input_offset, part.bias, tokens,
                   w.k, part.rows});
    else if (part.rows)
      head_products_by_rows({{x.base, x.row_pitch, 0, kBf16},
                             {weight, 0, part.pitch, kBf16},
                             {out.base, out.row_pitch, 0, kBf16},
                             tokens,
                             1,
                             w.k,
                             part.rows});
    out.base = static_cast<uint16_t*>(out.base) + part.rows;
  }
}

inline void multiply_heads(const HeadProducts& op, bool by_rows) {
  if (by_rows)
    head_products_by_rows(op);
  else
    head_products(op);
}

// Index keys of the step into their cache, and the positions that its tokens attend to.
inline void select_positions(const MlaSublayer& op, const Bf16Matrix& normed, const Bf16Matrix& q_c) {
  const MlaWeights& w = *op.weights;
  const DecodeStep& step = *op.step;
  const int64_t tokens = step.tokens, dim = w.index_dim, heads = op.selects ? w.index_heads : 0;
  const Bf16Matrix k(tokens, dim + w.index_heads), q(tokens, heads * dim), rotated(tokens, heads * dim);
  linear(w.wk_weights, normed.rows(), k.rows(), tokens);
  if (heads) linear(w.wq_b, q_c.rows(), q.rows(), tokens);
  indexer_preprocess({{q.heads(dim), rotated.heads(dim), step.index_angles, w.interleaved, tokens, heads, dim},
                      k.rows(),
                      op.index_keys,
                      w.k_weight,
                      w.k_bias,
                      w.k_eps,
                      step.slots,
                      op.index_block_size});
  if (!heads) return;
  const Fp32Matrix weights(tokens, heads);
  const float scale = static_cast<float>(w.index_scale);
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t head = 0; head < heads; ++head)
      weights.data[token * heads + head] = from_bf16(k.data[token * k.columns + dim + head]) * scale;
  lightning_indexer({rotated.heads(dim), op.index_keys, weights.data, nullptr, step.query_start_loc, step.visible,
                     step.block_table, step.requests, step.max_blocks, op.index_block_size, heads, dim, op.topk,
                     op.topk_indices});
}

inline void mla_sublayer(const MlaSublayer& op) {
  const MlaWeights& w = *op.weights;
  const DecodeStep& step = *op.step;
  const int64_t tokens = step.tokens, heads = w.heads, width = w.nope + w.rope;
  const Bf16Matrix normed(tokens, w.hidden), y(tokens, w.q_lora + w.rank + w.rope), rounded(tokens, w.q_lora);
  const Bf16Matrix q(tokens, heads * width), q_pe(tokens, heads * w.rope), ql_nope(tokens, heads * w.rank);
  const Bf16Matrix latent(tokens, heads * w.rank), attended(tokens, heads * w.values);
  const Fp32Matrix q_c(tokens, w.q_lora), lse(tokens, heads);
  rms_norm({op.x, op.residual, w.norm, normed.rows(), op.total, w.norm_eps, tokens, w.hidden});
  linear(w.qkv_a, normed.rows(), y.rows(), tokens);
  mla_latents({y.rows(), w.q_gamma, w.kv_gamma, w.latent_eps, step.angles, step.slots, op.ckv_cache, op.kpe_cache,
               q_c.rows(), rounded.rows(), tokens, w.q_lora, w.rank, op.block_size});
  linear(w.q_b, w.q_b.parts[0].scales ? q_c.rows() : rounded.rows(), q.rows(), tokens);
  rotate_queries({q.heads(width, w.nope), q_pe.heads(w.rope), step.angles, 1, tokens, heads, w.rope});
  multiply_heads({q.heads(width), w.w_uk, ql_nope.heads(w.rank), tokens, heads, w.nope, w.rank}, w.uk_by_rows);
  if (w.index_heads) select_positions(op, normed, rounded);
  sparse_flash_attention({ql_nope.heads(w.rank), q_pe.heads(w.rope), op.ckv_cache, op.kpe_cache, op.topk_indices,
                          step.request, step.visible, step.block_table, tokens, heads, w.rank, w.rope, op.topk,
                          step.max_blocks, op.block_size, w.scale, 1, latent.heads(w.rank), lse.data});
  *op.undefined = 0;
  for (int64_t i = 0; i < tokens * heads; ++i)
    if (__builtin_isnan(lse.data[i])) *op.undefined = 1;
  multiply_heads({latent.heads(w.rank), w.w_uv, attended.heads(w.values), tokens, heads, w.rank, w.values},
                 w.uv_by_rows);
  linear(w.o_proj, attended.rows(), op.out, tokens);
}

// ids and weights [per_token] <- the experts of a token with the largest sigmoid(logit) + bias, and their sigmoids.
inline void route(const MlpWeights& w, const uint16_t* logits, float* scores, int64_t* ids, float* weights) {
  for (int64_t e = 0; e < w.experts; e += kLanes) {
    const int64_t count = min(kLanes, w.experts - e);
    const F32x16 one = F32x16::broadcast(1.0f), x = load_columns<Bf16>(logits, e, count);
    const F32x16 score = one / (one + exponential(F32x16::zero() - x));
    store_columns<Fp32>(scores, e, count, score);
    store_columns<Fp32>(scores + w.experts, e, count, score + load_columns<Fp32>(w.correction_bias, e, count));
  }
  float* const keys = scores + w.experts;
  float sum = 0;
  for (int64_t i = 0; i < w.per_token; ++i) {
    int64_t best = -1;
    for (int64_t e = 0; e < w.experts; ++e) {
      bool taken = false;
      for (int64_t j = 0; j < i; ++j) taken |= ids[j] == e;
      if (!taken && (best < 0 || keys[e] > keys[best])) best = e;
    }
    ids[i] = best;
    sum += weights[i] = scores[best];
  }
  for (int64_t i = 0; w.renormalizes && i < w.per_token; ++i) weights[i] /= sum;
}

// out += routed_scale * the routed experts' share, each rounded to bf16 as the model's tensors are.
inline void add_routed_experts(const MlpSublayer& op, const Bf16Matrix& normed) {
  const MlpWeights& w = *op.weights;
  const int64_t tokens = op.tokens;
  const Bf16Matrix logits(tokens, w.experts);
  const Buffer<float> scores(2 * w.experts), weights(tokens * w.per_token);
  const Buffer<int64_t> ids(tokens * w.per_token);
  linear(w.router, normed.rows(), logits.rows(), tokens);
  for (int64_t token = 0; token < tokens; ++token)
    route(w, logits.data + token * w.experts, scores, ids + token * w.per_token, weights + token * w.per_token);
  const Fp32Matrix routed(tokens, w.hidden);
  w4a8_moe({normed.rows(), ids, weights, w.w13, w.w2, w.limit, tokens, w.per_token, w.experts, routed.data});
  const F32x16 scale = F32x16::broadcast(static_cast<float>(w.routed_scale));
  for (int64_t token = 0; token < tokens; ++token) {
    char* const out = row_at(op.out, 0, token);
    for (int64_t i = 0; i < w.hidden; i += kLanes) {
      const F32x16 share = Bf16::rounded(Fp32::load(routed.data + token * w.hidden, i));
      Bf16::store(out, i, Bf16::load(out, i) + Bf16::rounded(share * scale));
    }
  }
}

inline void mlp_sublayer(const MlpSublayer& op) {
  const MlpWeights& w = *op.weights;
  const int64_t tokens = op.tokens;
  const Bf16Matrix normed(tokens, w.hidden), gate_up(tokens, 2 * w.width);
  rms_norm({op.x, op.residual, w.norm, normed.rows(), op.total, w.norm_eps, tokens, w.hidden});
  linear(w.gate_up, normed.rows(), gate_up.rows(), tokens);
  for (int64_t token = 0; token < tokens; ++token) {
    uint16_t* const gate = gate_up.data + token * gate_up.columns;
    for (int64_t i = 0; i < w.width; i += kLanes)
      Bf16::store(gate, i, swiglu(Bf16::load(gate, i), Bf16::load(gate + w.width, i), __builtin_inff()));
  }
  linear(w.down, gate_up.rows(), op.out, tokens);
  if (w.experts) add_routed_experts(op, normed);
}

}  // namespace glm5::GLM5_SET
