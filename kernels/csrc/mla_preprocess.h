// What MLA preprocess does between its products: norms, rotations and the rows of both caches.
#pragma once
#include "arena.h"
#include "rms_norm.h"
#include "rotation.h"

namespace glm5::GLM5_SET {

// x <- x / sqrt(mean(x^2) + eps) * gamma.
inline void norm_row(float* x, int64_t columns, const float* gamma, float eps) {
  F32x16 squares = F32x16::zero();
  for (int64_t i = 0; i < columns; i += kLanes) squares += F32x16::load(x + i) * F32x16::load(x + i);
  const F32x16 factor = F32x16::broadcast(rms_factor(squares, columns, eps));
  for (int64_t i = 0; i < columns; i += kLanes) (F32x16::load(x + i) * factor * F32x16::load(gamma + i)).store(x + i);
}

inline void mla_latents(const MlaLatents& op) {
  constexpr int64_t kTokens = 32;  // of a task
  const int64_t rope = 2 * op.angles.pairs, columns = op.q_lora + op.rank + rope;
  struct Scratch {
    float *row, *gamma, *angles;
  };
  const auto make = [&](Arena& arena) {
    return Scratch{arena.take<float>(columns), arena.take<float>(op.q_lora + op.rank), arena.take<float>(rope)};
  };
  const PerThread scratch(make);
  parallel_for(op.tokens, kTokens, [&](int64_t first, int64_t last, int thread) {
    const Scratch mine = scratch[thread];
    float *const latent = mine.row + op.q_lora, *const rotated = latent + op.rank,
                 *const kv_gamma = mine.gamma + op.q_lora;
    load_row(op.q_gamma.base, op.q_gamma.dtype, op.q_lora, mine.gamma);
    load_row(op.kv_gamma.base, op.kv_gamma.dtype, op.rank, kv_gamma);
    for (int64_t token = first; token < last; ++token) {
      load_row(row_at(op.y, 0, token), op.y.dtype, columns, mine.row);
      norm_row(mine.row, op.q_lora, mine.gamma, static_cast<float>(op.eps));
      store_row(mine.row, kFp32, op.q_lora, writable_row_at(op.q_c, 0, token));
      store_row(mine.row, op.y.dtype, op.q_lora, writable_row_at(op.rounded_q_c, 0, token));
      const int64_t slot = op.slots[token];
      if (slot < 0) continue;
      norm_row(latent, op.rank, kv_gamma, static_cast<float>(op.eps));
      load_angles(op.angles, token, mine.angles);
      rotate(rotated, mine.angles, op.angles.pairs, true);
      store_row(latent, op.ckv_cache.dtype, op.rank,
                writable_row_at(op.ckv_cache, slot / op.block_size, slot % op.block_size));
      store_row(rotated, op.kpe_cache.dtype, rope,
                writable_row_at(op.kpe_cache, slot / op.block_size, slot % op.block_size));
    }
  });
}

inline void rotate_queries(const RotateQueries& op) {
  constexpr int64_t kTokens = 32;
  const int64_t rope = 2 * op.angles.pairs;
  const Buffer<float> scratch(2 * rope * max_threads());
  parallel_for(op.tokens, kTokens, [&](int64_t first, int64_t last, int thread) {
    float *const row = scratch + 2 * rope * thread, *const angles = row + rope;
    for (int64_t token = first; token < last; ++token) {
      load_angles(op.angles, token, angles);
      for (int64_t head = 0; head < op.heads; ++head) {
        load_row(row_at(op.z, token, head), op.z.dtype, rope, row);
        rotate(row, angles, op.angles.pairs, true);
        store_row(row, op.out.dtype, rope, writable_row_at(op.out, token, head));
      }
    }
  });
}

}  // namespace glm5::GLM5_SET
