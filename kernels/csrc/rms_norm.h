// RMS norm of rows: one pass over a row in the nearest cache for the sum, one for the result.
#pragma once
#include "parallel.h"
#include "rows.h"

namespace glm5::GLM5_SET {

// 1 / sqrt(mean(x^2) + eps) from sixteen lanes of sums of squares of `columns` elements.
GLM5_INLINE float rms_factor(F32x16 squares, int64_t columns, float eps) {
  return 1.0f / __builtin_sqrtf(sum_in_order(squares) / static_cast<float>(columns) + eps);
}

// out <- sum / rms(sum) * weight, where sum = x + residual, which goes to `total`; without a residual sum = x.
template <class Element>
void rms_norm_row(const void* x, const void* residual, const void* weight, int64_t columns, float eps, void* out,
                  void* total, float* sum) {
  F32x16 squares = F32x16::zero();
  for (int64_t i = 0; i < columns; i += kLanes) {
    F32x16 value = Element::load(x, i);
    if (residual) {
      value += Element::load(residual, i);
      Element::store(total, i, value);
    }
    value.store(sum + i);
    squares += value * value;
  }
  const F32x16 factor = F32x16::broadcast(rms_factor(squares, columns, eps));
  for (int64_t i = 0; i < columns; i += kLanes) {
    const F32x16 quotient = Element::rounded(F32x16::load(sum + i) * factor);
    Element::store(out, i, quotient * Element::load(weight, i));
  }
}

inline void rms_norm(const void* x, int64_t x_pitch, const void* residual, int64_t residual_pitch, const void* weight,
                     int64_t tokens, int64_t columns, int64_t dtype, float eps, void* out, void* total) {
  constexpr int64_t kTokens = 32;  // of a task
  const Buffer<float> sums(columns * max_threads());
  with_floats(dtype, [&](auto element) {
    using Element = decltype(element);
    parallel_for(tokens, kTokens, [&](int64_t first, int64_t last, int thread) {
      for (int64_t token = first; token < last; ++token)
        rms_norm_row<Element>(row_of<Element>(x, x_pitch, token),
                              residual ? row_of<Element>(residual, residual_pitch, token) : nullptr, weight, columns,
                              eps, row_of<Element>(out, columns, token),
                              total ? row_of<Element>(total, columns, token) : nullptr, sums + columns * thread);
    });
  });
}

}  // namespace glm5::GLM5_SET
