// What MLA preprocess does between its products: norms, rotations and the rows of both caches.
#pragma once
#include "arena.h"
#include "rms_norm.h"
#include "rotation.h"

namespace glm5::GLM5_SET {

// Rows of the first product, [query | latent | key to be rotated], and where their parts go.
struct Latents {
  Rows y;                          // (0, token), [q_lora + rank + rope]
  const void *q_gamma, *kv_gamma;  // of the norms, [q_lora] and [rank]
  int64_t q_gamma_dtype, kv_gamma_dtype;
  float eps;
  Angles angles;
  const int64_t* slots;  // rows of the caches, negative: written nowhere
  Rows ckv, kpe;         // (block, offset), [rank] and [rope]
  float* q_c;            // [tokens, q_lora]
  void* rounded_q_c;     // the same in y's dtype
  int64_t tokens, q_lora, rank, block_size;

  int64_t rope() const { return 2 * angles.pairs; }
};

// x <- x / sqrt(mean(x^2) + eps) * gamma.
inline void norm_row(float* x, int64_t columns, const float* gamma, float eps) {
  F32x16 squares = F32x16::zero();
  for (int64_t i = 0; i < columns; i += kLanes) squares += F32x16::load(x + i) * F32x16::load(x + i);
  const F32x16 factor = F32x16::broadcast(rms_factor(squares, columns, eps));
  for (int64_t i = 0; i < columns; i += kLanes) (F32x16::load(x + i) * factor * F32x16::load(gamma + i)).store(x + i);
}

inline void mla_latents(const Latents& op) {
  constexpr int64_t kTokens = 32;  // of a task
  const int64_t columns = op.q_lora + op.rank + op.rope();
  struct Scratch {
    float *row, *gamma, *angles;
  };
  const auto make = [&](Arena& arena) {
    return Scratch{arena.take<float>(columns), arena.take<float>(op.q_lora + op.rank), arena.take<float>(op.rope())};
  };
  const PerThread scratch(make);
  parallel_for(op.tokens, kTokens, [&](int64_t first, int64_t last, int thread) {
    const Scratch mine = scratch[thread];
    float *const latent = mine.row + op.q_lora, *const rotated = latent + op.rank,
                 *const kv_gamma = mine.gamma + op.q_lora;
    load_row(op.q_gamma, op.q_gamma_dtype, op.q_lora, mine.gamma);
    load_row(op.kv_gamma, op.kv_gamma_dtype, op.rank, kv_gamma);
    for (int64_t token = first; token < last; ++token) {
      load_row(op.y.at(0, token), op.y.dtype, columns, mine.row);
      norm_row(mine.row, op.q_lora, mine.gamma, op.eps);
      store_row(mine.row, kFp32, op.q_lora, op.q_c + token * op.q_lora);
      const Rows rounded(op.rounded_q_c, 0, op.q_lora, op.y.dtype);
      store_row(mine.row, op.y.dtype, op.q_lora, rounded.writable(0, token));
      const int64_t slot = op.slots[token];
      if (slot < 0) continue;
      norm_row(latent, op.rank, kv_gamma, op.eps);
      op.angles.load(token, mine.angles);
      rotate(rotated, mine.angles, op.angles.pairs, true);
      store_row(latent, op.ckv.dtype, op.rank, op.ckv.writable(slot / op.block_size, slot % op.block_size));
      store_row(rotated, op.kpe.dtype, op.rope(), op.kpe.writable(slot / op.block_size, slot % op.block_size));
    }
  });
}

// out (token, head) [rope] <- the rotated parts of the queries z (token, head).
inline void rotate_queries(const Rows& z, const Rows& out, const Angles& angles, int64_t tokens, int64_t heads) {
  constexpr int64_t kTokens = 32;
  const int64_t rope = 2 * angles.pairs;
  const auto make = [&](Arena& arena) { return arena.take<float>(2 * rope); };
  const PerThread scratch(make);
  parallel_for(tokens, kTokens, [&](int64_t first, int64_t last, int thread) {
    float *const row = scratch[thread], *const mine = row + rope;
    for (int64_t token = first; token < last; ++token) {
      angles.load(token, mine);
      for (int64_t head = 0; head < heads; ++head) {
        load_row(z.at(token, head), z.dtype, rope, row);
        rotate(row, mine, angles.pairs, true);
        store_row(row, out.dtype, rope, out.writable(token, head));
      }
    }
  });
}

}  // namespace glm5::GLM5_SET
