// A register: sixteen fp32 of AVX-512, eight of AVX2, four of NEON. Integers are zero- or sign-extended; what is stored
// of them are the low bits of each lane.
#pragma once
#if defined(__AVX2__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

#include "../glm5_kernels.h"

namespace glm5::GLM5_SET {
#if defined(__AVX512F__)

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

#elif defined(__AVX2__)

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

#else

using Floats = float32x4_t;
using Ints = int32x4_t;
constexpr int kNative = 4;

GLM5_INLINE Floats native_load(const float* p) { return vld1q_f32(p); }
GLM5_INLINE void native_store(float* p, Floats x) { vst1q_f32(p, x); }
GLM5_INLINE Floats native_broadcast(float x) { return vdupq_n_f32(x); }
GLM5_INLINE Floats native_fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
GLM5_INLINE Floats native_larger(Floats a, Floats b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
GLM5_INLINE Floats native_smaller(Floats a, Floats b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
GLM5_INLINE Floats native_rint(Floats x) { return vrndnq_f32(x); }
GLM5_INLINE Ints native_load_u16(const uint16_t* p) { return vreinterpretq_s32_u32(vmovl_u16(vld1_u16(p))); }
GLM5_INLINE Ints native_load_i8(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, sizeof four);
  return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)))));
}
GLM5_INLINE void native_store_u16(uint16_t* p, Ints x) { vst1_u16(p, vmovn_u32(vreinterpretq_u32_s32(x))); }
GLM5_INLINE void native_store_i8(int8_t* p, Ints x) {
  const int16x4_t halves = vmovn_s32(x);
  const int32_t four = vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(halves, halves))), 0);
  __builtin_memcpy(p, &four, sizeof four);
}

#endif
}  // namespace glm5::GLM5_SET
