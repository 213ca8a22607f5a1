// Dot products of int8 rows on ARM: SDOT of 16 bytes.
#pragma once
#include "lanes.h"

namespace glm5::GLM5_SET {

using Words = int32x4_t;
constexpr int kSums = 16;

GLM5_INLINE Words load_bytes(const void* p) { return vreinterpretq_s32_s8(vld1q_s8(static_cast<const int8_t*>(p))); }
GLM5_INLINE Words sdot(Words sums, Words a, Words b) {
  return vdotq_s32(sums, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b));
}
struct IntegerSums {
  using Sums = Words;
  using Total = int32_t;
  static GLM5_INLINE Words no_sums() { return vdupq_n_s32(0); }
  // Four sums: all lanes of a, of b, of c, of d.
  static GLM5_INLINE void store_sums(int32_t* p, Words a, Words b, Words c, Words d) {
    vst1q_s32(p, vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d)));
  }
};

// Weights of two INT4 in a byte: codes plus 8, 0 to 15, so that -8 times the sum of the token belongs to the sums.
struct Int4Dot : IntegerSums {
  static constexpr int kColumns = 16, kRows = 2, kZero = 8;
  static GLM5_INLINE Words token(const int8_t* p) { return load_bytes(p); }
  static GLM5_INLINE void weights(const uint8_t* p, Words* rows) {
    const uint8x16_t codes = veorq_u8(vld1q_u8(p), vdupq_n_u8(0x88));
    rows[0] = vreinterpretq_s32_u8(vandq_u8(codes, vdupq_n_u8(15)));
    rows[1] = vreinterpretq_s32_u8(vshrq_n_u8(codes, 4));
  }
  static GLM5_INLINE Words add(Words sums, Words weight, Words x) { return sdot(sums, weight, x); }
};

// Weights of int8.
struct Int8Dot : IntegerSums {
  static constexpr int kColumns = 16, kRows = 1, kZero = 0;
  static GLM5_INLINE Words token(const int8_t* p) { return load_bytes(p); }
  static GLM5_INLINE void weights(const uint8_t* p, Words* rows) { rows[0] = load_bytes(p); }
  static GLM5_INLINE Words add(Words sums, Words weight, Words x) { return sdot(sums, weight, x); }
};

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Adds two tokens times two rows, 16 columns of each: [t0 r0, t0 r1, t1 r0, t1 r1] by SMMLA of 8 columns twice.
GLM5_INLINE Words add_two_by_two(Words sums, Words t0, Words t1, Words r0, Words r1) {
  const auto halves = [](Words a, Words b, bool high) {
    const int64x2_t x = vreinterpretq_s64_s32(a), y = vreinterpretq_s64_s32(b);
    return vreinterpretq_s8_s64(high ? vzip2q_s64(x, y) : vzip1q_s64(x, y));
  };
  sums = vmmlaq_s32(sums, halves(t0, t1, false), halves(r0, r1, false));
  return vmmlaq_s32(sums, halves(t0, t1, true), halves(r0, r1, true));
}
#endif

}  // namespace glm5::GLM5_SET
