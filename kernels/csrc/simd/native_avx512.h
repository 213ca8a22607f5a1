// A register of AVX-512: sixteen fp32.
#pragma once
#include <immintrin.h>

#include "../glm5_kernels.h"

namespace glm5::GLM5_SET {

using Floats = __m512;
using Ints = int32_t __attribute__((vector_size(64)));
constexpr int kNative = 16;

GLM5_INLINE Floats native_load(const float* p) { return _mm512_loadu_ps(p); }
GLM5_INLINE void native_store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
GLM5_INLINE Floats native_broadcast(float x) { return _mm512_set1_ps(x); }
GLM5_INLINE Floats native_fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
// The larger, the smaller of both; b where one is NaN.
GLM5_INLINE Floats native_larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
GLM5_INLINE Floats native_smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
// To the nearest whole number, ties to even.
GLM5_INLINE Floats native_rint(Floats x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// 16-bit and 8-bit integers, zero- and sign-extended; the low bits of each lane back.
GLM5_INLINE Ints native_load_u16(const uint16_t* p) {
  return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
}
GLM5_INLINE Ints native_load_i8(const int8_t* p) {
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
}
GLM5_INLINE void native_store_u16(uint16_t* p, Ints x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)x));
}
GLM5_INLINE void native_store_i8(int8_t* p, Ints x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x)); }

}  // namespace glm5::GLM5_SET
