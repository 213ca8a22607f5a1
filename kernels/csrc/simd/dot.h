// Dot products of rows: codes of int8 with weights of int8 or packed INT4, exact, and bf16 with bf16, summed in fp32.
// Sizes are bytes.
#pragma once
#include "shuffle.h"

namespace glm5::GLM5_SET {

GLM5_INLINE Ints load_words(const void* p) {
  Ints words;
  __builtin_memcpy(&words, p, sizeof words);
  return words;
}

// sums += the four products of bytes in each lane of 32 bits.
GLM5_INLINE Ints add_bytes(Ints sums, Ints weights, Ints codes) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)codes);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)codes);
#elif defined(__AVX2__)  // only for weights up to 15: two products of such a byte and an int8 fit 16 bits
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, (__m256i)codes);
  return sums + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  return vdotq_s32(sums, vreinterpretq_s8_s32(weights), vreinterpretq_s8_s32(codes));
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kSums = 8;  // registers of sums that leave room for the operands
#else
constexpr int kSums = 16;
#endif

// Codes and weights of one byte, whose sums are exact. Weights are multiplied as w + kZero.
struct ByteDot {
  using Sums = Ints;
  using Total = int32_t;
  static constexpr int kColumns = sizeof(Ints);
  static GLM5_INLINE Ints no_sums() { return Ints{}; }
  static GLM5_INLINE Ints token(const int8_t* p) { return load_words(p); }
  static GLM5_INLINE Ints add(Ints sums, Ints weights, Ints codes) { return add_bytes(sums, weights, codes); }
};

// Two rows in a byte.
struct Int4Dot : ByteDot {
  static constexpr int kRows = 2, kZero = 8;  // 0 to 15
  static GLM5_INLINE void weights(const uint8_t* p, Ints* rows) {
    const Ints codes = load_words(p) ^ static_cast<int32_t>(0x88888888);
    rows[0] = codes & 0x0f0f0f0f;
    rows[1] = (codes >> 4) & 0x0f0f0f0f;
  }
};

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
// Both factors are widened to 16 bits.
struct Int8Dot : ByteDot {
  static constexpr int kColumns = sizeof(Ints) / 2, kRows = 1, kZero = 0;
  static GLM5_INLINE Ints token(const void* p) {
    return (Ints)_mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  static GLM5_INLINE void weights(const uint8_t* p, Ints* rows) { rows[0] = token(p); }
  static GLM5_INLINE Ints add(Ints sums, Ints weights, Ints codes) {
    return sums + (Ints)_mm256_madd_epi16((__m256i)weights, (__m256i)codes);
  }
};
#else
struct Int8Dot : ByteDot {
#if defined(__AVX2__)
  static constexpr int kRows = 1, kZero = 128;  // unsigned
#else
  static constexpr int kRows = 1, kZero = 0;
#endif
  static GLM5_INLINE void weights(const uint8_t* p, Ints* rows) {
    rows[0] = load_words(p) ^ static_cast<int32_t>(kZero * 0x01010101u);
  }
};
#endif

// bf16, two in a lane where the CPU multiplies these; else widened, as the upper halves of fp32.
struct Bf16Dot {
  using Sums = Floats;
  using Total = float;
  static constexpr int kColumns = (kBf16Pairs ? 4 : 2) * kNative, kRows = 1;
  static GLM5_INLINE Floats no_sums() { return Floats{}; }
  static GLM5_INLINE Ints token(const void* p) {
    return kBf16Pairs ? load_words(p) : native_load_u16(static_cast<const uint16_t*>(p)) << 16;
  }
  static GLM5_INLINE void weights(const uint8_t* p, Ints* rows) { rows[0] = token(p); }
  static GLM5_INLINE Floats add(Floats sums, Ints weights, Ints codes) {
#if defined(__AVX512BF16__)
    return native_bf16_pairs(sums, (Floats)codes, (Floats)weights);
#else
    return native_fma((Floats)weights, (Floats)codes, sums);
#endif
  }
};

}  // namespace glm5::GLM5_SET
