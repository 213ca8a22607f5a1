// A register of AVX2: eight fp32. The functions are those of native_avx512.h.
#pragma once
#include <immintrin.h>

#include "../glm5_kernels.h"

namespace glm5::GLM5_SET {

using Floats = __m256;
using Ints = int32_t __attribute__((vector_size(32)));
constexpr int kNative = 8;

GLM5_INLINE Floats native_load(const float* p) { return _mm256_loadu_ps(p); }
GLM5_INLINE void native_store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
GLM5_INLINE Floats native_broadcast(float x) { return _mm256_set1_ps(x); }
GLM5_INLINE Floats native_fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
GLM5_INLINE Floats native_larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
GLM5_INLINE Floats native_smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
GLM5_INLINE Floats native_rint(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
GLM5_INLINE Ints native_load_u16(const uint16_t* p) {
  return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
}
GLM5_INLINE Ints native_load_i8(const int8_t* p) {
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
}

// The low halves of all lanes, in order.
GLM5_INLINE __m128i low_halves(Ints x) {
  const __m256i halves = _mm256_blend_epi16((__m256i)x, _mm256_setzero_si256(), 0xaa);
  const __m256i packed = _mm256_packus_epi32(halves, halves);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0xd8));
}

GLM5_INLINE void native_store_u16(uint16_t* p, Ints x) { _mm_storeu_si128((__m128i*)p, low_halves(x)); }
GLM5_INLINE void native_store_i8(int8_t* p, Ints x) {
  const __m128i bytes = _mm_and_si128(low_halves(x), _mm_set1_epi16(255));
  _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(bytes, bytes));
}

}  // namespace glm5::GLM5_SET
