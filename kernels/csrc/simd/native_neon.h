// A register of NEON: four fp32. The functions are those of native_avx512.h.
#pragma once
#include <arm_neon.h>

#include <cstring>

#include "../glm5_kernels.h"

namespace glm5::GLM5_SET {

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
  std::memcpy(&four, p, sizeof four);
  return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)))));
}
GLM5_INLINE void native_store_u16(uint16_t* p, Ints x) { vst1_u16(p, vmovn_u32(vreinterpretq_u32_s32(x))); }
GLM5_INLINE void native_store_i8(int8_t* p, Ints x) {
  const int16x4_t halves = vmovn_s32(x);
  const int32_t four = vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(halves, halves))), 0);
  std::memcpy(p, &four, sizeof four);
}

}  // namespace glm5::GLM5_SET
