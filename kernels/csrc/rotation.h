// Rotary embedding of a row.
#pragma once

#include "paged_rows.h"

namespace glm5::GLM5_SET {

// The cosines and sines of each token's position, [T, pairs] of dtype fp32 or bf16.
struct Angles {
  const void *cos, *sin;
  int64_t cos_pitch, sin_pitch, dtype, pairs;

  // Writes a token's cosines and sines to out [2 * pairs].
  void load(int64_t token, float* out) const {
    for (int64_t i = 0; i < pairs; ++i) {
      out[i] = element(cos, token * cos_pitch + i);
      out[pairs + i] = element(sin, token * sin_pitch + i);
    }
  }

 private:
  float element(const void* p, int64_t index) const {
    if (dtype == kFp32) return static_cast<const float*>(p)[index];
    return __builtin_bit_cast(float, static_cast<uint32_t>(static_cast<const uint16_t*>(p)[index]) << 16);
  }
};

// Rotates the pairs (0, 1), (2, 3), ... of x, or (0, pairs), (1, pairs + 1), ..., by angles [2 * pairs], in place.
inline void rotate(float* x, const float* angles, int64_t pairs, bool interleaved) {
  const int64_t step = interleaved ? 2 : 1, distance = interleaved ? 1 : pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    const float cos = angles[i], sin = angles[pairs + i], a = x[step * i], b = x[step * i + distance];
    x[step * i] = a * cos - b * sin;
    x[step * i + distance] = b * cos + a * sin;
  }
}

}  // namespace glm5::GLM5_SET
