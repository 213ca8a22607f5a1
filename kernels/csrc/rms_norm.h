// RMS norm of rows: one pass over a row in the nearest cache for the sum, one for the result.
#pragma once
#include "parallel.h"
#include "rows.h"

namespace glm5::GLM5_SET {

// 1 / sqrt(mean(x^2) + eps) from sixteen lanes of sums of squares of `columns` elements.
GLM5_INLINE float rms_factor(F32x16 squares, int64_t columns, float eps) {
  return 1.0f / __builtin_sqrtf(sum_in_order(squares) / static_cast<float>(columns) + eps);
}

// The results of a token; sum [columns].
template <class Element>
void rms_norm_row(const RmsNorm& op, int64_t token, float* sum) {
  const char *const x = row_at(op.x, 0, token), *const residual = row_at(op.residual, 0, token);
  char *const out = row_at(op.out, 0, token), *const total = row_at(op.total, 0, token);
  const int64_t columns = op.columns;
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
  const F32x16 factor = F32x16::broadcast(rms_factor(squares, columns, static_cast<float>(op.eps)));
  for (int64_t i = 0; i < columns; i += kLanes) {
    const F32x16 quotient = Element::rounded(F32x16::load(sum + i) * factor);
    Element::store(out, i, quotient * Element::load(op.weight.base, i));
  }
}

inline void rms_norm(const RmsNorm& op) {
  constexpr int64_t kTokens = 32;  // of a task
  const Buffer<float> sums(op.columns * max_threads());
  with_floats(op.x.dtype, [&](auto element) {
    parallel_for(op.tokens, kTokens, [&](int64_t first, int64_t last, int thread) {
      for (int64_t token = first; token < last; ++token)
        rms_norm_row<decltype(element)>(op, token, sums + op.columns * thread);
    });
  });
}

}  // namespace glm5::GLM5_SET
