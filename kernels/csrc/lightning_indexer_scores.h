// Scores of the Lightning Indexer by vectors: kPanelRows keys at a time, a lane for each head.
//
// A dot product adds its dims in order, a score the heads of a lane in order, then the groups of lanes, then the lanes:
// no bit depends on the other keys and tokens of the call.
#pragma once
#include "lightning_indexer.h"

namespace glm5::GLM5_SET {

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
          uint16_t* const row = reinterpret_cast<uint16_t*>(scratch.keys + lane * width);
          for (int64_t i = 0; i < op.dims; i += kLanes) store_bf16(row + i, Int8::load(rows[lane], i));
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
    if (copies_keys(op)) copy(op, count, scratch.keys);
    fill(rows + count, kKeys - count, rows[count - 1]);
  }

 private:
  void copy(const Indexer& op, int64_t count, float* copies) {
    for (int64_t i = 0; i < count; ++i) {
      float* const row = copies + i * words(op);
      if (by_pairs(op))
        for (int64_t d = 0; d < op.dims; d += kLanes)
          store_bf16(reinterpret_cast<uint16_t*>(row) + d, Int8::load(rows[i], d));
      else
        load_row(rows[i], op.k_cache.dtype, op.dims, row);
      rows[i] = reinterpret_cast<const char*>(row);
    }
  }
};

// Memory to prefetch, `stride` bytes further with every word of every block of lanes: a few lines at a time, because a
// core tracks only ten or so outstanding lines.
struct Ahead {
  const char* address;
  int64_t stride;
};

// out[0:kPanelRows] <- for each key, the sum over heads of weights[h] * relu(query[:, h] . key).
template <class Terms>
inline void score_keys(const char* const* rows, const float* query, const float* weights, const float* mask,
                       int64_t blocks, int64_t words, Ahead ahead, float* out) {
  F32x16 scores[kPanelRows][kPanelGroups];
  for (auto& row : scores)
    for (auto& score : row) score = F32x16::zero();
  for (int64_t block = 0; block < blocks; ++block) {
    F32x16 sums[kPanelRows][kPanelGroups];
    for (auto& row : sums)
      for (auto& sum : row) sum = F32x16::zero();
    for (int64_t word = 0; word < words; word += 2) {
      __builtin_prefetch(ahead.address + ahead.stride * (block * words + word), 0, 2);
      for (int64_t w = word; w < word + 2; ++w) {
        F32x16 columns[kPanelGroups];
        for (int g = 0; g < kPanelGroups; ++g)
          columns[g] = F32x16::load(query + (block * words + w) * kPanelColumns + g * kLanes);
        for (int key = 0; key < kPanelRows; ++key) {
          const F32x16 element = F32x16::broadcast(reinterpret_cast<const float*>(rows[key])[w]);
          for (int g = 0; g < kPanelGroups; ++g) sums[key][g] = Terms::add(element, columns[g], sums[key][g]);
        }
      }
    }
    for (int g = 0; g < kPanelGroups; ++g) {
      const int64_t first = block * kPanelColumns + g * kLanes;
      const F32x16 weight = F32x16::load(weights + first), is_head = F32x16::load(mask + first);
      for (int key = 0; key < kPanelRows; ++key) {  // NaN stays; without the mask 0 * inf of padding would be NaN
        const F32x16 positive = masked(larger(F32x16::zero(), sums[key][g]), is_head);
        scores[key][g] = fma(weight, positive, scores[key][g]);
      }
    }
  }
  F32x16 totals[kPanelRows];
  for (int key = 0; key < kPanelRows; ++key) {
    totals[key] = scores[key][0];
    for (int g = 1; g < kPanelGroups; ++g) totals[key] += scores[key][g];
  }
  sum_each<kPanelRows>(totals, out);
}

// scores [tokens, pitch] <- columns start..stop of a task, start a multiple of kKeys; NaN for a key without a block.
template <class Terms>
inline void score_by_vectors(const Indexer& op, const IndexerTask& task, int64_t start, int64_t stop, float* scores,
                             const IndexerScratch& scratch) {
  constexpr int64_t kKeys = IndexerScratch::kKeys;
  const int64_t width = words(op), lanes = IndexerScratch::lanes(op), blocks = ceil_div(op.heads, kPanelColumns);
  const int64_t row_bytes = op.k_cache.row_pitch * element_bytes(op.k_cache.dtype);
  const int64_t stride = ceil_div(kPanelRows * row_bytes, blocks * width);
  lay_out_heads(op, task, kPanelColumns, scratch);
  for (int64_t first = start; first < stop; first += kKeys) {
    const int64_t count = min(kKeys, stop - first);
    const FoundKeys found(op, task.request, first, count, scratch);
    const char* const ahead = key_at(op, task.request, min(first + kKeysAhead, stop - 1));
    for (int64_t token = task.first; token < task.last; ++token) {
      const int64_t seen = min(count, readable(op, token) - first), row = token - task.first;
      float* const out = scores + row * task.pitch() + first;
      for (int64_t key = 0; key < seen; key += kPanelRows)
        score_keys<Terms>(found.rows + key, scratch.query + row * lanes * width, scratch.weights + row * lanes,
                          scratch.mask, blocks, width, {ahead + key * row_bytes, stride}, out + key);
      for (int64_t key = 0; found.scaled && key < seen; ++key) out[key] *= found.scale[key];
    }
  }
}

}  // namespace glm5::GLM5_SET
