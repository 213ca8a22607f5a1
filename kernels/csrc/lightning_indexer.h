// The Lightning Indexer: scores of a request's keys, read in place in the paged cache, and the best positions.
//
//     score[t, s] = key_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s])
//
// Query tokens of a request share the keys that were read: a task is up to 64 of them. Where there are fewer tasks than
// threads, all threads score parts of the keys of one task. A lane is a head (lightning_indexer_vectors.h); with AMX 32
// keys multiply 32 heads at a time (lightning_indexer_amx.h).
#pragma once

#include "arena.h"
#include "paged_rows.h"
#include "panel.h"
#include "topk.h"

namespace glm5::GLM5_SET {

using Indexer = LightningIndexer;

// Positions of a token that have a column in the table.
inline int64_t readable(const Indexer& op, int64_t token) {
  return min(op.visible[token], op.max_blocks * op.block_size);
}
// Both sides are bf16, or int8, which bf16 holds exactly: two of them fill a word, the 32 bits of a lane.
inline bool by_pairs(const Indexer& op) {
  return kBf16Pairs && op.q.dtype != kFp32 && op.k_cache.dtype != kFp32 && op.dims % (2 * kLanes) == 0;
}
inline int64_t words(const Indexer& op) { return by_pairs(op) ? op.dims / 2 : op.dims; }
inline bool copies_keys(const Indexer& op) {
  return op.k_cache.dtype != kFp32 && !(by_pairs(op) && op.k_cache.dtype == kBf16);
}
// The address of a key, to prefetch it; of any one if its block is missing.
inline const char* key_at(const Indexer& op, int64_t request, int64_t position) {
  const int64_t block = op.block_table[request * op.max_blocks + position / op.block_size];
  return row_at(op.k_cache, max(block, 0), position % op.block_size);
}

// Keys are prefetched this many keys ahead: memory answers after some thousand cycles.
constexpr int64_t kKeysAhead = 96;

// Query tokens first..last of a request; the last one sees `length` positions.
struct IndexerTask {
  int64_t request, first, last, length;
  int64_t pitch() const { return round_up(length, 2 * kLanes); }  // scores of a token
  int64_t scores() const { return (last - first) * pitch(); }
};

// Memory of a thread. Words have 32 bits: fp32 or two bf16.
struct IndexerScratch {
  static constexpr int64_t kTokens = 64;        // query tokens of a task, at most
  static constexpr int64_t kKeys = 2 * kLanes;  // keys that are found together

  float* query;     // [tokens, lanes / step, words, step], a lane for each head: `lay_out_heads`
  float* weights;   // [tokens, lanes], 0 in lanes without a head
  float* mask;      // [lanes], all bits of lanes with a head
  float* keys;      // [kKeys, words], keys that are not read in place
  float* zeros;     // [words], the key of a missing block
  float* products;  // of AMX: [lanes / 32, 32, 32]

  static int64_t lanes(const Indexer& op) { return round_up(op.heads, 2 * kLanes); }
  IndexerScratch(Arena& arena, const Indexer& op, int64_t tokens)
      : query(arena.take<float>(tokens * lanes(op) * words(op))),
        weights(arena.take<float>(tokens * lanes(op))),
        mask(arena.take<float>(lanes(op))),
        keys(arena.take<float>(kKeys * words(op))),
        zeros(arena.take<float>(words(op))),
        products(arena.take<float>(lanes(op) * 2 * kLanes)) {}
};

}  // namespace glm5::GLM5_SET
