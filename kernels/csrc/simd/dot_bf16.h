// Dot products of bf16 rows, summed in fp32. Sizes are bytes.
#pragma once
#include "lanes.h"

namespace glm5::GLM5_SET {

#if defined(__AVX512BF16__)
// VDPBF16PS: odd elements first, then even ones, in sixteen fp32 lanes.
struct Bf16Dot {
  using Sums = __m512;
  using Total = float;
  static constexpr int kColumns = 64, kRows = 1;
  static GLM5_INLINE __m512 no_sums() { return _mm512_setzero_ps(); }
  static GLM5_INLINE Words token(const int8_t* p) { return load_bytes(p); }
  static GLM5_INLINE void weights(const uint8_t* p, Words* rows) { rows[0] = load_bytes(p); }
  static GLM5_INLINE __m512 add(__m512 sums, Words weight, Words x) {
    return _mm512_dpbf16_ps(sums, (__m512bh)x, (__m512bh)weight);
  }
  // Lane i and lane i + 8 of each are added, then by 4, 2 and 1.
  static GLM5_INLINE void store_sums(float* p, __m512 a, __m512 b, __m512 c, __m512 d) {
    const auto four = [](__m512 x) {
      const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
      return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    };
    const __m128 a4 = four(a), b4 = four(b), c4 = four(c), d4 = four(d);
    const __m128 ab = _mm_add_ps(_mm_movelh_ps(a4, b4), _mm_movehl_ps(b4, a4));
    const __m128 cd = _mm_add_ps(_mm_movelh_ps(c4, d4), _mm_movehl_ps(d4, c4));
    _mm_storeu_ps(p, _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd)));
  }
};
#else
// A bf16 is the upper half of an fp32: both factors are widened.
struct Bf16Dot {
  using Sums = Floats;
  using Total = float;
  static constexpr int kColumns = 2 * kNative, kRows = 1;
  static GLM5_INLINE Floats no_sums() { return native_broadcast(0.0f); }
  static GLM5_INLINE Words token(const void* p) {
    return (Words)(native_load_u16(static_cast<const uint16_t*>(p)) << 16);
  }
  static GLM5_INLINE void weights(const uint8_t* p, Words* rows) { rows[0] = token(p); }
  static GLM5_INLINE Floats add(Floats sums, Words weight, Words x) {
    return native_fma((Floats)weight, (Floats)x, sums);
  }
  static GLM5_INLINE void store_sums(float* p, Floats a, Floats b, Floats c, Floats d) {
    const Floats all[] = {a, b, c, d};
    for (int row = 0; row < 4; ++row) {
      float lanes[kNative];
      native_store(lanes, all[row]);
      for (int distance = kNative / 2; distance; distance /= 2)
        for (int i = 0; i < distance; ++i) lanes[i] += lanes[i + distance];
      p[row] = lanes[0];
    }
  }
};
#endif

}  // namespace glm5::GLM5_SET
