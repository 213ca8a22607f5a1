// The positions of the k largest of a row of fp32 scores, lowest position first among equals, without sorting.
#pragma once

#include "simd/lanes.h"

namespace glm5::GLM5_SET {

// The bits of an fp32 as an unsigned integer in the same order; -0.0 and 0.0 are one value, NaN is 0.
inline uint32_t ordered(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value + 0.0f);
  const uint32_t order = bits >> 31 ? ~bits : bits | 0x80000000u;
  return value != value ? 0 : order;
}

struct Kth {
  uint32_t value;
  int64_t ties;  // values equal to it among the k largest
};

// The k-th largest of n > k values. Zeros do not count: with fewer than k others all of these may be taken.
//
// Found bit by bit: passes over whole vectors take less time than one histogram. They end where exactly k values are as
// large as a trial.
inline Kth kth_largest(const uint32_t* values, int64_t n, int64_t k) {
  uint32_t least = 0;
  int64_t larger = 0;  // values above the k-th: the last trial that too few reached is the k-th plus one
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t trial = least | 1u << bit;
    uint32_t count = 0;
    for (int64_t i = 0; i < n; ++i) count += values[i] >= trial;
    if (count == k) return {trial - 1, 0};
    if (count > k)
      least = trial;
    else
      larger = count;
  }
  return least ? Kth{least, k - larger} : Kth{1, k};
}

// out[0:k] <- the positions p < n with the largest scores[p], in ascending order; then -1. NaN is never selected.
// scratch has 2 * n + 1 elements.
inline void best_positions(const float* scores, int64_t n, int32_t* out, int64_t k, uint32_t* scratch) {
  uint32_t *values = scratch, *selected = scratch + n;
  for (int64_t p = 0; p < n; ++p) values[p] = ordered(scores[p]);
  const Kth kth = n > k ? kth_largest(values, n, k) : Kth{1, n};
  int64_t count = 0, equal = 0;
  for (int64_t p = 0; p < n; ++p) {  // no branch: it would be mispredicted at every other candidate
    const bool same = values[p] == kth.value;
    selected[count] = static_cast<uint32_t>(p);
    count += (values[p] > kth.value) | (same & (equal < kth.ties));
    equal += same;
  }
  for (int64_t i = 0; i < k; ++i) out[i] = i < count ? static_cast<int32_t>(selected[i]) : -1;
}

}  // namespace glm5::GLM5_SET
