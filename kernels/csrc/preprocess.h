// What MLA and the indexer do between their products: norms, rotations and the rows of the caches.
#pragma once
#include "rms_norm.h"
#include "rows.h"

namespace glm5::GLM5_SET {

// out [2 * pairs] <- a token's cosines and sines.
inline void load_angles(const Angles& angles, int64_t token, float* out) {
  const auto element = [&](const void* p, int64_t index) {
    if (angles.dtype == kFp32) return static_cast<const float*>(p)[index];
    return from_bf16(static_cast<const uint16_t*>(p)[index]);
  };
  for (int64_t i = 0; i < angles.pairs; ++i) {
    out[i] = element(angles.cos, token * angles.cos_pitch + i);
    out[angles.pairs + i] = element(angles.sin, token * angles.sin_pitch + i);
  }
}

// Rotates the pairs (0, 1), (2, 3), ... of x, or (0, pairs), (1, pairs + 1), ..., by angles [2 * pairs], in place.
inline void rotate(float* x, const float* angles, int64_t pairs, bool interleaved) {
  const int64_t step = interleaved ? 2 : 1, distance = interleaved ? 1 : pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    const float cos = angles[i], sin = angles[pairs + i], a = x[step * i], b = x[step * i + distance];
    x[step * i] = a * cos - b * sin;
    x[step * i + distance] = b * cos + a * sin;
  }
}

// x <- x / sqrt(mean(x^2) + eps) * gamma.
inline void norm_row(float* x, int64_t columns, const float* gamma, float eps) {
  F32x16 squares = F32x16::zero();
  for (int64_t i = 0; i < columns; i += kLanes) squares += F32x16::load(x + i) * F32x16::load(x + i);
  const F32x16 factor = F32x16::broadcast(rms_factor(squares, columns, eps));
  for (int64_t i = 0; i < columns; i += kLanes) (F32x16::load(x + i) * factor * F32x16::load(gamma + i)).store(x + i);
}

// x <- (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias.
inline void layer_norm(float* x, int64_t dim, const float* weight, const float* bias, float eps) {
  F32x16 sums = F32x16::zero(), squares = F32x16::zero();
  for (int64_t i = 0; i < dim; i += kLanes) sums += F32x16::load(x + i);
  const F32x16 mean = F32x16::broadcast(sum_in_order(sums) / static_cast<float>(dim));
  for (int64_t i = 0; i < dim; i += kLanes) {
    const F32x16 y = F32x16::load(x + i) - mean;
    y.store(x + i);
    squares += y * y;
  }
  const float factor = 1.0f / __builtin_sqrtf(sum_in_order(squares) / static_cast<float>(dim) + eps);
  for (int64_t i = 0; i < dim; i += kLanes)
    (F32x16::load(x + i) * F32x16::broadcast(factor) * F32x16::load(weight + i) + F32x16::load(bias + i)).store(x + i);
}

// A row [columns] to its slot of a paged cache.
inline void store_in_slot(const float* row, int64_t columns, const Rows& cache, int64_t slot, int64_t block_size) {
  store_row(row, cache.dtype, columns, row_at(cache, slot / block_size, slot % block_size));
}

constexpr int64_t kPreprocessed = 32;  // tokens of a task

inline void mla_latents(const MlaLatents& op) {
  const int64_t rope = 2 * op.angles.pairs, columns = op.q_lora + op.rank + rope, size = 2 * columns;
  const float eps = static_cast<float>(op.eps);
  const Buffer<float> scratch(size * max_threads());
  parallel_for(op.tokens, kPreprocessed, [&](int64_t first, int64_t last, int thread) {
    float *const row = scratch + size * thread, *const latent = row + op.q_lora, *const rotated = latent + op.rank,
                 *const q_gamma = row + columns, *const kv_gamma = q_gamma + op.q_lora,
                 *const angles = kv_gamma + op.rank;
    load_row(op.q_gamma.base, op.q_gamma.dtype, op.q_lora, q_gamma);
    load_row(op.kv_gamma.base, op.kv_gamma.dtype, op.rank, kv_gamma);
    for (int64_t token = first; token < last; ++token) {
      load_row(row_at(op.y, 0, token), op.y.dtype, columns, row);
      norm_row(row, op.q_lora, q_gamma, eps);
      store_row(row, kFp32, op.q_lora, row_at(op.q_c, 0, token));
      store_row(row, op.y.dtype, op.q_lora, row_at(op.rounded_q_c, 0, token));
      const int64_t slot = op.slots[token];
      if (slot < 0) continue;
      norm_row(latent, op.rank, kv_gamma, eps);
      load_angles(op.angles, token, angles);
      rotate(rotated, angles, op.angles.pairs, true);
      store_in_slot(latent, op.rank, op.ckv_cache, slot, op.block_size);
      store_in_slot(rotated, rope, op.kpe_cache, slot, op.block_size);
    }
  });
}

inline void rotate_queries(const RotateQueries& op) {
  const int64_t size = op.dim + 2 * op.angles.pairs;
  const Buffer<float> scratch(size * max_threads());
  parallel_for(op.tokens, kPreprocessed, [&](int64_t first, int64_t last, int thread) {
    float *const row = scratch + size * thread, *const angles = row + op.dim;
    for (int64_t token = first; token < last; ++token) {
      load_angles(op.angles, token, angles);
      for (int64_t head = 0; head < op.heads; ++head) {
        load_row(row_at(op.q, token, head), op.q.dtype, op.dim, row);
        rotate(row, angles, op.angles.pairs, op.interleaved);
        store_row(row, op.out.dtype, op.dim, row_at(op.out, token, head));
      }
    }
  });
}

inline void indexer_preprocess(const IndexerPreprocess& op) {
  const RotateQueries& queries = op.queries;
  rotate_queries(queries);
  const int64_t dim = queries.dim, pairs = queries.angles.pairs, size = round_up(3 * dim + 2 * pairs, kLanes);
  const Buffer<float> scratch(size * max_threads());
  parallel_for(queries.tokens, kPreprocessed, [&](int64_t first, int64_t last, int thread) {
    float *const row = scratch + size * thread, *const weight = row + dim, *const bias = weight + dim,
                 *const angles = bias + dim;
    load_row(op.weight.base, op.weight.dtype, dim, weight);
    load_row(op.bias.base, op.bias.dtype, dim, bias);
    for (int64_t token = first; token < last; ++token) {
      const int64_t slot = op.slots[token];
      if (slot < 0) continue;
      load_row(row_at(op.k, 0, token), op.k.dtype, dim, row);
      layer_norm(row, dim, weight, bias, static_cast<float>(op.eps));
      load_angles(queries.angles, token, angles);
      rotate(row, angles, pairs, queries.interleaved);
      store_in_slot(row, dim, op.k_cache, slot, op.block_size);
    }
  });
}

}  // namespace glm5::GLM5_SET
