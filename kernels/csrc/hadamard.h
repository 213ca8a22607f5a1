// Hadamard transform in place: butterflies on sixteen lanes, no product with a matrix but for the core.
//
// Along rows the lanes are sixteen neighbours: the four lowest levels are swaps inside them, the others butterflies
// between them. Along columns the lanes are sixteen columns and every level is a butterfly. Only additions in one
// order: the same bits on every CPU. Runs in the calling thread: the quantizer has several tensors under way.
#pragma once
#include <cmath>

#include "parallel.h"
#include "simd/shuffle.h"

namespace glm5::GLM5_SET {

// x +- the lane at kDistance; the upper one of two lanes is subtracted.
template <int kDistance>
GLM5_INLINE F32x16 swap_level(F32x16 x) {
  F32x16 signs;
  GLM5_EACH(i)
  for (int lane = 0; lane < kNative; ++lane) signs.v[i][lane] = (i * kNative + lane) & kDistance ? -1.0f : 1.0f;
  return fma(x, signs, swapped<kDistance>(x));
}

// Multiplies x [16 * groups] by `weight` and transforms every sixteen neighbours among themselves.
inline void transform_lanes(float* x, const float* weight, int64_t groups) {
  for (int64_t i = 0; i < groups * kLanes; i += kLanes) {
    const F32x16 y = swap_level<2>(swap_level<1>(F32x16::load(x + i) * F32x16::load(weight + i)));
    swap_level<8>(swap_level<4>(y)).store(x + i);
  }
}

// kLevels levels between the groups of lanes i, i + step, i + 2 * step, ... for all i; groups are `pitch` apart.
template <int kLevels>
inline void butterflies(float* x, int64_t groups, int64_t step, int64_t pitch) {
  constexpr int kCount = 1 << kLevels;
  for (int64_t block = 0; block < groups; block += step * kCount)
    for (int64_t first = block; first < block + step; ++first) {
      F32x16 y[kCount];
      for (int i = 0; i < kCount; ++i) y[i] = F32x16::load(x + (first + i * step) * pitch);
      for (int distance = 1; distance < kCount; distance *= 2)
        for (int low = 0; low < kCount; ++low) {
          if (low & distance) continue;
          const F32x16 a = y[low], b = y[low + distance];
          y[low] = a + b;
          y[low + distance] = a - b;
        }
      for (int i = 0; i < kCount; ++i) y[i].store(x + (first + i * step) * pitch);
    }
}

// A core matrix [order, order] of signs, and scratch [order * 16].
struct Core {
  const float* matrix;
  int64_t order;
  float* scratch;
};

// x[a] <- sum over b of matrix[a, b] x[b] between `order` runs of `groups` groups of lanes.
inline void transform_core(float* x, int64_t groups, int64_t pitch, const Core& core) {
  for (int64_t group = 0; group < groups; ++group) {
    float* const first = x + group * pitch;
    for (int64_t a = 0; a < core.order; ++a) {
      F32x16 total = F32x16::zero();
      for (int64_t b = 0; b < core.order; ++b)
        total =
            fma(F32x16::broadcast(core.matrix[a * core.order + b]), F32x16::load(first + b * groups * pitch), total);
      total.store(core.scratch + a * kLanes);
    }
    for (int64_t a = 0; a < core.order; ++a) F32x16::load(core.scratch + a * kLanes).store(first + a * groups * pitch);
  }
}

// All levels between `groups` groups of lanes, `pitch` apart.
inline void transform_groups(float* x, int64_t groups, int64_t pitch, const Core& core) {
  const int64_t size = groups / core.order;
  int64_t step = 1;
  for (; 4 * step <= size; step *= 4) butterflies<2>(x, groups, step, pitch);
  if (2 * step <= size) butterflies<1>(x, groups, step, pitch);
  if (core.order > 1) transform_core(x, size, pitch, core);
}

// target[r, :] <- source[r, :] * weight[r], or without a weight a copy.
inline void scale_rows(const float* source, int64_t source_pitch, const float* weight, int64_t rows, int64_t columns,
                       float* target, int64_t target_pitch) {
  for (int64_t row = 0; row < rows; ++row) {
    const F32x16 factor = F32x16::broadcast(weight ? weight[row] : 1.0f);
    for (int64_t i = 0; i < columns; i += kLanes)
      (F32x16::load(source + row * source_pitch + i) * factor).store(target + row * target_pitch + i);
  }
}

inline void hadamard(const Hadamard& op) {
  constexpr int64_t kPanel = 2 * kLanes;  // columns side by side: whole cache lines, and n of them fit the L2 cache
  const Buffer<float> panel(op.dim ? 0 : op.n * kPanel), scratch(op.order * kLanes);
  const Core core{op.core, op.order, scratch};
  for (int64_t row = 0; row < op.rows; row += op.dim ? 1 : op.n)
    for (int64_t column = 0; column < op.columns; column += op.dim ? op.n : kPanel) {
      float* const x = op.x + row * op.pitch + column;
      if (op.dim) {
        transform_lanes(x, op.weight, op.n / kLanes);
        transform_groups(x, op.n / kLanes, kLanes, core);
        continue;
      }
      const int64_t width = min(kPanel, op.columns - column);
      scale_rows(x, op.pitch, op.weight, op.n, width, panel, kPanel);
      for (int64_t lane = 0; lane < width; lane += kLanes) transform_groups(panel + lane, op.n, kPanel, core);
      scale_rows(panel, kPanel, nullptr, op.n, width, x, op.pitch);
    }
}

}  // namespace glm5::GLM5_SET
