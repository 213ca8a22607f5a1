// Scores of the Lightning Indexer by vectors: kPanelRows keys at a time, a lane for each head.
//
// A dot product adds its dims in order, a score the heads of a lane in order, then the groups of lanes, then the lanes:
// no bit depends on the other keys and tokens of the call.
#pragma once
#include "lightning_indexer.h"

namespace glm5::GLM5_SET {

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

// Scores of some keys by vectors.
template <class Terms>
struct VectorScorer {
  static constexpr int kStep = kPanelColumns;

  const Indexer& op;
  const FoundKeys& found;
  const char* ahead;
  const IndexerScratch& scratch;

  VectorScorer(const Indexer& op, const FoundKeys& found, int64_t, const char* ahead, const IndexerScratch& scratch)
      : op(op), found(found), ahead(ahead), scratch(scratch) {}

  void score(int64_t row, int64_t seen, float* out) const {
    const int64_t width = words(op), lanes = IndexerScratch::lanes(op), blocks = ceil_div(op.heads, kPanelColumns);
    const int64_t row_bytes = key_bytes(op), stride = ceil_div(kPanelRows * row_bytes, blocks * width);
    for (int64_t key = 0; key < seen; key += kPanelRows)
      score_keys<Terms>(found.rows + key, scratch.query + row * lanes * width, scratch.weights + row * lanes,
                        scratch.mask, blocks, width, {ahead + key * row_bytes, stride}, out + key);
  }
};

}  // namespace glm5::GLM5_SET
