// Rotary embedding of a row.
#pragma once

#include "paged_rows.h"

namespace glm5::GLM5_SET {

// out [2 * pairs] <- a token's cosines and sines.
inline void load_angles(const Angles& angles, int64_t token, float* out) {
  const auto element = [&](const void* p, int64_t index) {
    if (angles.dtype == kFp32) return static_cast<const float*>(p)[index];
    return __builtin_bit_cast(float, static_cast<uint32_t>(static_cast<const uint16_t*>(p)[index]) << 16);
  };
  for (int64_t i = 0; i < angles.pairs; ++i) {
    out[i] = element(angles.cos, token * angles.cos_pitch + i);
    out[angles.pairs + i] = element(angles.sin, token * angles.sin_pitch + i);
  }
}

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
