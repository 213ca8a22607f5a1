// Pools of index keys: each is computed by its last token, from this step's tokens and the request's ring; then the
// rings take the step's tokens.
#pragma once
#include <cstring>

#include "exponential.h"
#include "parallel.h"
#include "rows.h"

namespace glm5::GLM5_SET {

// out [dim] <- the mean of op.pool keys, each [dim], weighted for each channel by the softmax of gate + ape.
inline void weighted_mean(const IndexerPool& op, const char* const* keys, const char* const* gates, void* out) {
  with_floats(op.k.dtype, [&](auto element) {
    using Element = decltype(element);
    for (int64_t i = 0; i < op.dim; i += kLanes) {
      const auto score = [&](int64_t t) { return Element::load(gates[t], i) + F32x16::load(op.ape + t * op.dim + i); };
      F32x16 most = score(0), total = F32x16::zero(), sum = F32x16::zero();
      for (int64_t t = 1; t < op.pool; ++t) most = larger(most, score(t));
      for (int64_t t = 0; t < op.pool; ++t) {
        const F32x16 weight = exponential(score(t) - most);
        total += weight;
        sum = fma(weight, Element::load(keys[t], i), sum);
      }
      with_floats(op.pool_cache.dtype, [&](auto stored) { decltype(stored)::store(out, i, sum / total); });
    }
  });
}

// Writes the pool whose last token is `token`, if it is one's and has a place; keys, gates [pool].
inline void write_pool(const IndexerPool& op, int64_t token, const char** keys, const char** gates) {
  const int64_t request = op.request[token], end = op.visible[token], number = end / op.pool - 1;
  const int64_t column = op.max_blocks ? number / op.block_size : 0;
  if (end <= 0 || end % op.pool || op.tail_blocks[request] < 0 || column >= op.max_blocks) return;
  const int32_t block = op.block_table[request * op.max_blocks + column];
  if (block < 0) return;
  for (int64_t t = 0; t < op.pool; ++t) {
    const int64_t position = end - op.pool + t, source = token + 1 - op.pool + t;
    const bool now = source >= op.query_start_loc[request];
    const int64_t ring = op.tail_blocks[request], row = position % op.ring;
    keys[t] = now ? row_at(op.k, 0, source) : row_at(op.tail_keys, ring, row);
    gates[t] = now ? row_at(op.gate, 0, source) : row_at(op.tail_gates, ring, row);
  }
  weighted_mean(op, keys, gates, row_at(op.pool_cache, block, number % op.block_size));
}

inline void indexer_pool(const IndexerPool& op) {
  constexpr int64_t kTokens = 64;  // of a task
  const Buffer<const char*> rows(2 * op.pool * max_threads());
  parallel_for(op.tokens, kTokens, [&](int64_t first, int64_t last, int thread) {
    const char** const mine = rows + 2 * op.pool * thread;
    for (int64_t token = first; token < last; ++token) write_pool(op, token, mine, mine + op.pool);
  });
  const auto bytes = static_cast<size_t>(op.dim * element_bytes(op.k.dtype));
  for (int64_t token = 0; token < op.tokens; ++token) {
    const int64_t request = op.request[token], ring = op.tail_blocks[request], position = op.visible[token] - 1;
    if (position < 0 || ring < 0 || token + op.ring < op.query_start_loc[request + 1]) continue;  // written over later
    std::memcpy(row_at(op.tail_keys, ring, position % op.ring), row_at(op.k, 0, token), bytes);
    std::memcpy(row_at(op.tail_gates, ring, position % op.ring), row_at(op.gate, 0, token), bytes);
  }
}

}  // namespace glm5::GLM5_SET
