// The Lightning Indexer: scores of a request's keys, read in place in the paged cache, and the best positions.
//
//     score[t, s] = key_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s])
//
// Query tokens of a request share the keys that were read: a task is up to 64 of them. All threads score parts of the
// keys of some tasks, then select (lightning_indexer_tasks.h). A lane is a head (lightning_indexer_vectors.h); with AMX
// 32 keys multiply 32 heads at a time (lightning_indexer_amx.h).
#pragma once

#include "panel.h"
#include "parallel.h"
#include "rows.h"

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

// From a key to the next one.
inline int64_t key_bytes(const Indexer& op) { return op.k_cache.row_pitch * element_bytes(op.k_cache.dtype); }

// Keys are prefetched this many keys ahead: memory answers after some thousand cycles.
constexpr int64_t kKeysAhead = 96;

// Query tokens first..last of a request; the last one sees `length` positions. Scores begin at `offset` of a batch's.
struct IndexerTask {
  int64_t request, first, last, length, offset;
  int64_t pitch() const { return round_up(length, 2 * kLanes); }  // scores of a token
  int64_t scores() const { return (last - first) * pitch(); }
};

// Memory of a thread. Words have 32 bits: fp32 or two bf16.
struct IndexerScratch {
  static constexpr int64_t kTokens = 64;        // query tokens of a task, at most
  static constexpr int64_t kKeys = 2 * kLanes;  // keys that are found together

  static int64_t lanes(const Indexer& op) { return round_up(op.heads, 2 * kLanes); }

  Arena arena;
  const Indexer& op;
  int64_t tokens;
  // [tokens, lanes / step, words, step], a lane for each head: `lay_out_heads`
  float* query = arena.take<float>(tokens * lanes(op) * words(op));
  float* weights = arena.take<float>(tokens * lanes(op));       // [tokens, lanes], 0 in lanes without a head
  float* mask = arena.take<float>(lanes(op));                   // [lanes], all bits of lanes with a head
  float* keys = arena.take<float>(kKeys * words(op));           // [kKeys, words], keys that are not read in place
  float* zeros = arena.take<float>(words(op));                  // [words], the key of a missing block
  float* products = arena.take<float>(lanes(op) * 2 * kLanes);  // of AMX: [lanes / 32, 32, 32]
};

// out [dims] <- int8 as bf16, whole vectors.
inline void int8_as_bf16(const char* row, int64_t dims, void* out) {
  for (int64_t i = 0; i < dims; i += kLanes) Bf16::store(out, i, Int8::load(row, i));
}

// scratch.query <- the query's rows with a lane for each head, `step` heads side by side; weights and mask likewise.
//
//     [token][head / step][word][head % step]
inline void lay_out_heads(const Indexer& op, const IndexerTask& task, int64_t step, const IndexerScratch& scratch) {
  const int64_t lanes = IndexerScratch::lanes(op), width = words(op);
  fill(scratch.zeros, width, 0.0f);
  for (int64_t lane = 0; lane < lanes; ++lane)
    scratch.mask[lane] = __builtin_bit_cast(float, lane < op.heads ? ~0u : 0u);
  for (int64_t token = task.first; token < task.last; ++token) {
    const int64_t first_lane = (token - task.first) * lanes;
    for (int64_t lane = 0; lane < lanes; ++lane)
      scratch.weights[first_lane + lane] = lane < op.heads ? op.weights[token * op.heads + lane] : 0.0f;
    for (int64_t first = 0; first < lanes; first += kLanes) {
      const char* rows[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) rows[lane] = row_at(op.q, token, min(first + lane, op.heads - 1));
      if (by_pairs(op) && op.q.dtype == kInt8)
        for (int lane = 0; lane < kLanes; ++lane) {
          float* const row = scratch.keys + lane * width;
          int8_as_bf16(rows[lane], op.dims, row);
          rows[lane] = reinterpret_cast<const char*>(row);
        }
      float* const target = scratch.query + (first_lane + first / step * step) * width + first % step;
      transpose_rows(rows, 0, width, by_pairs(op) ? kFp32 : op.q.dtype, target, step);
    }
  }
}

// Keys of a request from a position on, and their scales; a key without a block is zeros, and its scale NaN.
struct FoundKeys {
  static constexpr int64_t kKeys = IndexerScratch::kKeys;
  const char* rows[kKeys];
  float scale[kKeys];
  bool scaled = false;

  // The last one is repeated up to kKeys. Keys that are not read in place are copied: int8 as bf16, others as fp32.
  FoundKeys(const Indexer& op, int64_t request, int64_t first, int64_t count, const IndexerScratch& scratch) {
    const int32_t* const table = op.block_table + request * op.max_blocks;
    int64_t index = first / op.block_size, offset = first % op.block_size;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t block = table[index];
      if (block >= 0) {
        rows[i] = row_at(op.k_cache, block, offset);
        scale[i] = op.k_scale ? op.k_scale[block * op.block_size + offset] : 1.0f;
      } else {
        rows[i] = reinterpret_cast<const char*>(scratch.zeros);
        scale[i] = __builtin_nanf("");
      }
      scaled |= block < 0 || op.k_scale;
      if (++offset == op.block_size) {
        ++index;
        offset = 0;
      }
    }
    for (int64_t i = 0; i < count && copies_keys(op); ++i) {
      float* const row = scratch.keys + i * words(op);
      if (by_pairs(op))
        int8_as_bf16(rows[i], op.dims, row);
      else
        load_row(rows[i], op.k_cache.dtype, op.dims, row);
      rows[i] = reinterpret_cast<const char*>(row);
    }
    fill(rows + count, kKeys - count, rows[count - 1]);
  }
};

// scores [tokens, pitch] <- columns start..stop of a task, start a multiple of kKeys; NaN for a key without a block. A
// Scorer multiplies some keys by a token's query.
template <class Scorer>
inline void score(const Indexer& op, const IndexerTask& task, int64_t start, int64_t stop, float* scores,
                  const IndexerScratch& scratch) {
  lay_out_heads(op, task, Scorer::kStep, scratch);
  for (int64_t first = start; first < stop; first += FoundKeys::kKeys) {
    const int64_t count = min(FoundKeys::kKeys, stop - first);
    const FoundKeys found(op, task.request, first, count, scratch);
    const Scorer scorer(op, found, count, key_at(op, task.request, min(first + kKeysAhead, stop - 1)), scratch);
    for (int64_t token = task.first; token < task.last; ++token) {
      const int64_t seen = min(count, readable(op, token) - first), row = token - task.first;
      float* const out = scores + row * task.pitch() + first;
      if (seen > 0) scorer.score(row, seen, out);
      for (int64_t key = 0; found.scaled && key < seen; ++key) out[key] *= found.scale[key];
    }
  }
}

}  // namespace glm5::GLM5_SET
