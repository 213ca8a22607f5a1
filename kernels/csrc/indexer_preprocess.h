// Indexer preprocess: one pass over the rows of a token; sums of the norm are added in sixteen lanes.
#pragma once
#include <cmath>

#include "arena.h"
#include "rotation.h"

namespace glm5::GLM5_SET {

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
  const float factor = 1.0f / std::sqrt(sum_in_order(squares) / static_cast<float>(dim) + eps);
  for (int64_t i = 0; i < dim; i += kLanes)
    (F32x16::load(x + i) * F32x16::broadcast(factor) * F32x16::load(weight + i) + F32x16::load(bias + i)).store(x + i);
}

inline void indexer_preprocess(const IndexerPreprocess& op) {
  constexpr int64_t kTokens = 64;  // of a task
  struct Scratch {
    float *row, *weight, *bias, *angles;
  };
  const auto make = [&](Arena& arena) {
    return Scratch{arena.take<float>(op.dim), arena.take<float>(op.dim), arena.take<float>(op.dim),
                   arena.take<float>(2 * op.angles.pairs)};
  };
  const PerThread scratch(make);
  parallel_for(op.tokens, kTokens, [&](int64_t first, int64_t last, int thread) {
    const Scratch mine = scratch[thread];
    load_row(op.weight.base, op.weight.dtype, op.dim, mine.weight);
    load_row(op.bias.base, op.bias.dtype, op.dim, mine.bias);
    for (int64_t token = first; token < last; ++token) {
      load_angles(op.angles, token, mine.angles);
      for (int64_t head = 0; head < op.heads; ++head) {
        load_row(row_at(op.q, token, head), op.q.dtype, op.dim, mine.row);
        rotate(mine.row, mine.angles, op.angles.pairs, op.interleaved);
        store_row(mine.row, op.q.dtype, op.dim, writable_row_at(op.out, token, head));
      }
      const int64_t slot = op.slots[token];
      if (slot < 0) continue;
      load_row(row_at(op.k, 0, token), op.q.dtype, op.dim, mine.row);
      layer_norm(mine.row, op.dim, mine.weight, mine.bias, static_cast<float>(op.eps));
      rotate(mine.row, mine.angles, op.angles.pairs, op.interleaved);
      store_row(mine.row, op.q.dtype, op.dim, writable_row_at(op.k_cache, slot / op.block_size, slot % op.block_size));
    }
  });
}

}  // namespace glm5::GLM5_SET
