// Products in fp32 by panels: kPanelColumns columns of a matrix, all its rows, multiply a few rows of the other at a
// time.
//
//              depth                kPanelColumns
//          +-----------+         +---------+
//     rows |   left    |   depth |  panel  |   ->  out [rows, kPanelColumns]; the terms of a sum are added in order
//          +-----------+         +---------+
#pragma once
#include "simd/shuffle.h"

namespace glm5::GLM5_SET {

// Sums of kPanelRows rows times kPanelGroups groups of lanes, the groups and a broadcast fit the 32 or 16 registers.
#if defined(__AVX512F__)
constexpr int kPanelRows = 8, kPanelGroups = 2;
#else
constexpr int kPanelRows = 4, kPanelGroups = 1;
#endif
constexpr int kPanelColumns = kLanes * kPanelGroups;
// Rows are padded to a multiple of this.
constexpr int kFewRows = kPanelRows / 2;

// A term of a sum: fp32 numbers, or two bf16 in the 32 bits of each lane.
struct Fp32Terms {
  static GLM5_INLINE F32x16 add(F32x16 a, F32x16 b, F32x16 total) { return fma(a, b, total); }
};
struct Bf16Pairs {
  static GLM5_INLINE F32x16 add(F32x16 a, F32x16 b, F32x16 total) { return add_bf16_pairs(a, b, total); }
};

// out[r, 0:kPanelColumns] += sum over k < depth of left[r, k] * panel[k, :] for kCount rows; pitches in elements of 32
// bits. Inlined in a large function, gcc would keep the sums in memory.
template <class Terms, int kCount>
[[gnu::noinline]] void add_rows(const float* panel, const float* left, int64_t left_pitch, int64_t depth, float* out,
                                int64_t out_pitch) {
  F32x16 sums[kCount][kPanelGroups];
  for (int r = 0; r < kCount; ++r)
    for (int g = 0; g < kPanelGroups; ++g) sums[r][g] = F32x16::load(out + r * out_pitch + g * kLanes);
  for (int64_t k = 0; k < depth; ++k) {
    F32x16 columns[kPanelGroups];
    for (int g = 0; g < kPanelGroups; ++g) columns[g] = F32x16::load(panel + k * kPanelColumns + g * kLanes);
    for (int r = 0; r < kCount; ++r) {
      const F32x16 factor = F32x16::broadcast(left[r * left_pitch + k]);
      for (int g = 0; g < kPanelGroups; ++g) sums[r][g] = Terms::add(factor, columns[g], sums[r][g]);
    }
  }
  for (int r = 0; r < kCount; ++r)
    for (int g = 0; g < kPanelGroups; ++g) sums[r][g].store(out + r * out_pitch + g * kLanes);
}

// `add_rows` for any number of rows. With sixteen registers six rows fill them: twelve sums, two halves of a panel's
// row and a broadcast. Fewer than twelve sums wait for each other, so a rest of eight rows is made of fours.
template <class Terms>
inline void add_panel(const float* panel, const float* left, int64_t left_pitch, int64_t rows, int64_t depth,
                      float* out, int64_t out_pitch) {
  constexpr int kMost = kPanelRows == 8 ? 8 : 6;
  while (rows) {
    const auto add = [&]<int kCount>() {
      add_rows<Terms, kCount>(panel, left, left_pitch, depth, out, out_pitch);
      left += kCount * left_pitch;
      out += kCount * out_pitch;
      rows -= kCount;
    };
    if (rows >= kMost && (kMost == 8 || rows != 8))
      add.template operator()<kMost>();
    else if (rows >= 4)
      add.template operator()<4>();
    else if (rows >= 2)
      add.template operator()<2>();
    else
      add.template operator()<1>();
  }
}

}  // namespace glm5::GLM5_SET
