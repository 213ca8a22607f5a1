// Dot products of int8 rows on x86: VPDPBUSD of 64 or 32 bytes, or AVX2's multiplications of 16-bit integers.
#pragma once
#include <immintrin.h>

#include "lanes.h"

namespace glm5::GLM5_SET {

#if defined(__AVX512VNNI__)
using Words = __m512i;
GLM5_INLINE Words load_bytes(const void* p) { return _mm512_loadu_si512(p); }
GLM5_INLINE Words bytes(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
GLM5_INLINE Words bit_and(Words a, Words b) { return _mm512_and_si512(a, b); }
GLM5_INLINE Words bit_xor(Words a, Words b) { return _mm512_xor_si512(a, b); }
GLM5_INLINE Words upper_nibbles(Words a) { return bit_and(_mm512_srli_epi16(a, 4), bytes(15)); }
GLM5_INLINE Ints dot(Ints sums, Words unsigned_bytes, Words signed_bytes) {
  return (Ints)_mm512_dpbusd_epi32((Words)sums, unsigned_bytes, signed_bytes);
}
// Four sums: all lanes of a, of b, of c, of d.
GLM5_INLINE __m128i sum_each(Words a, Words b, Words c, Words d) {
  const Words ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const Words cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const Words all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}
constexpr int kSums = 16;  // registers of sums that leave room for the operands
#else
using Words = __m256i;
GLM5_INLINE Words load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
GLM5_INLINE Words bytes(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
GLM5_INLINE Words bit_and(Words a, Words b) { return _mm256_and_si256(a, b); }
GLM5_INLINE Words bit_xor(Words a, Words b) { return _mm256_xor_si256(a, b); }
GLM5_INLINE Words upper_nibbles(Words a) { return bit_and(_mm256_srli_epi16(a, 4), bytes(15)); }
GLM5_INLINE __m128i sum_each(Words a, Words b, Words c, Words d) {
  const Words all = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
  return _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}
constexpr int kSums = 8;
#if defined(__AVXVNNI__)
GLM5_INLINE Ints dot(Ints sums, Words unsigned_bytes, Words signed_bytes) {
  return (Ints)_mm256_dpbusd_avx_epi32((Words)sums, unsigned_bytes, signed_bytes);
}
#else
// Only for unsigned bytes up to 15: two products of such a byte and an int8 fit 16 bits.
GLM5_INLINE Ints dot(Ints sums, Words unsigned_bytes, Words signed_bytes) {
  const Words pairs = _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
  return sums + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#endif
#endif

// Sums are int32 lanes by their type, too: gcc copies a register where it changes from one type of lanes to another.
struct IntegerSums {
  using Sums = Ints;
  using Total = int32_t;
  static GLM5_INLINE Ints no_sums() { return (Ints)bytes(0); }
  static GLM5_INLINE void store_sums(int32_t* p, Ints a, Ints b, Ints c, Ints d) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), sum_each((Words)a, (Words)b, (Words)c, (Words)d));
  }
};

// Weights of two INT4 in a byte: codes plus 8, 0 to 15, so that -8 times the sum of the token belongs to the sums.
struct Int4Dot : IntegerSums {
  static constexpr int kColumns = sizeof(Words), kRows = 2, kZero = 8;
  static GLM5_INLINE Words token(const int8_t* p) { return load_bytes(p); }
  static GLM5_INLINE void weights(const uint8_t* p, Words* rows) {
    const Words codes = bit_xor(load_bytes(p), bytes(0x88));
    rows[0] = bit_and(codes, bytes(15));
    rows[1] = upper_nibbles(codes);
  }
  static GLM5_INLINE Ints add(Ints sums, Words weight, Words x) { return dot(sums, weight, x); }
};

// Weights of int8.
struct Int8Dot : IntegerSums {
  static constexpr int kRows = 1;
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  static constexpr int kColumns = sizeof(Words), kZero = 128;  // weights plus 128, unsigned
  static GLM5_INLINE Words token(const int8_t* p) { return load_bytes(p); }
  static GLM5_INLINE void weights(const uint8_t* p, Words* rows) { rows[0] = bit_xor(load_bytes(p), bytes(128)); }
  static GLM5_INLINE Ints add(Ints sums, Words weight, Words x) { return dot(sums, weight, x); }
#else
  static constexpr int kColumns = sizeof(Words) / 2, kZero = 0;
  static GLM5_INLINE Words token(const void* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  static GLM5_INLINE void weights(const uint8_t* p, Words* rows) { rows[0] = token(p); }
  static GLM5_INLINE Ints add(Ints sums, Words weight, Words x) { return sums + (Ints)_mm256_madd_epi16(weight, x); }
#endif
};

}  // namespace glm5::GLM5_SET
