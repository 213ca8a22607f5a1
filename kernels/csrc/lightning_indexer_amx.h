// Scores of the Lightning Indexer by AMX: 32 keys by 32 heads at a time, keys in place in the cache.
#pragma once
#include "lightning_indexer.h"
#include "simd/amx.h"

namespace glm5::GLM5_SET {
#if defined(__AMX_BF16__)

// Heads and blocks of keys in whole tiles.
inline bool scores_by_amx(const Indexer& op) {
  return by_pairs(op) && op.heads % kTile == 0 && op.block_size % kTile == 0;
}

// out[0:8] <- for each of 8 keys, the sum over heads of weights[h] * relu(product).
// products: [heads / 32, 32, 32], of which the first 8 rows of each block; groups: of 16 heads.
inline void weigh_heads(const float* products, const float* weights, int64_t groups, float* out) {
  constexpr int kKeys = 8;
  F32x16 scores[kKeys];
  for (auto& score : scores) score = F32x16::zero();
  for (int64_t group = 0; group < groups; ++group) {
    const F32x16 weight = F32x16::load(weights + group * kTile);
    const float* const block = products + group / 2 * kSide * kSide + group % 2 * kTile;
    for (int key = 0; key < kKeys; ++key)  // NaN stays
      scores[key] = fma(weight, larger(F32x16::zero(), F32x16::load(block + key * kSide)), scores[key]);
  }
  sum_each<kKeys>(scores, out);
}

// Scores of some keys, for blocks and heads of whole tiles.
struct AmxScorer {
  static constexpr int kStep = kTile;

  const Indexer& op;
  LeftTiles keys;
  const IndexerScratch& scratch;

  AmxScorer(const Indexer& op, const FoundKeys& found, int64_t count, const char* ahead, const IndexerScratch& scratch)
      : op(op), scratch(scratch) {
    prefetch(ahead, kSide * key_bytes(op));
    for (int tile = 0; tile < 2; ++tile) {  // a tile lies in one block; beyond the last key any tile will do
      keys.rows[tile] = found.rows[tile * kTile < count ? tile * kTile : 0];
      const bool is_missing = keys.rows[tile] == reinterpret_cast<const char*>(scratch.zeros);
      keys.pitch[tile] = is_missing ? 0 : copies_keys(op) ? 4 * words(op) : key_bytes(op);
    }
  }

  void score(int64_t row, int64_t seen, float* out) const {
    const int64_t width = words(op), lanes = IndexerScratch::lanes(op);
    for (int64_t head = 0; head < lanes; head += kSide) {
      const char* const query = reinterpret_cast<const char*>(scratch.query + (row * lanes + head) * width);
      multiply_tiles(keys, {{query, query + 4 * kTile * width}, 4 * kTile}, width / kTile, true,
                     scratch.products + head * kSide, 4 * kSide);
    }
    for (int64_t key = 0; key < seen; key += 8)
      weigh_heads(scratch.products + kSide * key, scratch.weights + row * lanes, op.heads / kTile, out + key);
  }
};

#endif
}  // namespace glm5::GLM5_SET
