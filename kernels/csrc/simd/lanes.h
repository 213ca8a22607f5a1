// Sixteen fp32 or int32 lanes as one value on every instruction set: one register of AVX-512, two of AVX2, four of
// NEON.
//
// Sums are added lane by lane, and the lanes in one order (`reduce`): so the bits of a result are the same everywhere.
// A product and a sum are rounded once where `fma` is called, and twice where * and + are written.
#pragma once
#include <cstdint>

#define GLM5_INLINE __attribute__((always_inline)) inline
#define GLM5_INLINED __attribute__((always_inline))  // behind the arguments of a lambda
#include "native.h"

namespace glm5::GLM5_SET {

constexpr int kLanes = 16;
constexpr int kTile = 16;  // rows of a tile of AMX, and its columns of 32 bits
constexpr int kNatives = kLanes / kNative;
// A loop over the registers of a value, unrolled.
#define GLM5_EACH(i) _Pragma("GCC unroll 4") for (int i = 0; i < kNatives; ++i)

struct I32x16 {
  Ints v[kNatives];

  static GLM5_INLINE I32x16 load(const int32_t* p) {
    I32x16 r;
    __builtin_memcpy(&r, p, sizeof r);
    return r;
  }
  GLM5_INLINE void store(int32_t* p) const { __builtin_memcpy(p, this, sizeof *this); }
};
GLM5_INLINE I32x16& operator+=(I32x16& a, I32x16 b) {
  GLM5_EACH(i) a.v[i] += b.v[i];
  return a;
}
GLM5_INLINE int32_t sum(I32x16 x) {
  int32_t lanes[kLanes], total = 0;
  x.store(lanes);
  for (int32_t lane : lanes) total += lane;
  return total;
}

struct F32x16 {
  Floats v[kNatives];

  static GLM5_INLINE F32x16 load(const float* p) {
    F32x16 r;
    GLM5_EACH(i) r.v[i] = native_load(p + kNative * i);
    return r;
  }
  static GLM5_INLINE F32x16 broadcast(float x) {
    F32x16 r;
    GLM5_EACH(i) r.v[i] = native_broadcast(x);
    return r;
  }
  static GLM5_INLINE F32x16 zero() { return broadcast(0.0f); }
  // From the upper halves of fp32.
  static GLM5_INLINE F32x16 load_bf16(const uint16_t* p) {
    F32x16 r;
    GLM5_EACH(i) r.v[i] = (Floats)(native_load_u16(p + kNative * i) << 16);
    return r;
  }
  static GLM5_INLINE F32x16 load_int8(const int8_t* p) {
    F32x16 r;
    GLM5_EACH(i) r.v[i] = __builtin_convertvector(native_load_i8(p + kNative * i), Floats);
    return r;
  }
  GLM5_INLINE void store(float* p) const { GLM5_EACH(i) native_store(p + kNative * i, v[i]); }
};

#define GLM5_LANEWISE(op, assign)                            \
  GLM5_INLINE F32x16 operator op(F32x16 a, F32x16 b) {       \
    GLM5_EACH(i) a.v[i] = a.v[i] op b.v[i];                  \
    return a;                                                \
  }                                                          \
  GLM5_INLINE F32x16& operator assign(F32x16& a, F32x16 b) { \
    a = a op b;                                              \
    return a;                                                \
  }
GLM5_LANEWISE(+, +=)
GLM5_LANEWISE(-, -=)
GLM5_LANEWISE(*, *=)
GLM5_LANEWISE(/, /=)
#undef GLM5_LANEWISE

// a * b + c, rounded once.
GLM5_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  GLM5_EACH(i) c.v[i] = native_fma(a.v[i], b.v[i], c.v[i]);
  return c;
}
// The larger, the smaller of both; b where one is NaN.
GLM5_INLINE F32x16 larger(F32x16 a, F32x16 b) {
  GLM5_EACH(i) a.v[i] = native_larger(a.v[i], b.v[i]);
  return a;
}
GLM5_INLINE F32x16 smaller(F32x16 a, F32x16 b) {
  GLM5_EACH(i) a.v[i] = native_smaller(a.v[i], b.v[i]);
  return a;
}
// To the nearest whole number, ties to even.
GLM5_INLINE F32x16 rint(F32x16 x) {
  GLM5_EACH(i) x.v[i] = native_rint(x.v[i]);
  return x;
}
// x where both are numbers, `other` in lanes where x is NaN.
GLM5_INLINE F32x16 if_number(F32x16 x, F32x16 other) {
  GLM5_EACH(i) {
    const Ints number = (Ints)(x.v[i] == x.v[i]);
    x.v[i] = (Floats)(((Ints)x.v[i] & number) | ((Ints)other.v[i] & ~number));
  }
  return x;
}
// True if a lane of both differs.
GLM5_INLINE bool any_differs(F32x16 a, F32x16 b) {
  int32_t differs = 0;
  GLM5_EACH(i) {
    const Ints lanes = (Ints)(a.v[i] != b.v[i]);
    for (int lane = 0; lane < kNative; ++lane) differs |= lanes[lane];
  }
  return differs != 0;
}
// Whole numbers.
GLM5_INLINE F32x16 to_float(I32x16 x) {
  F32x16 r;
  GLM5_EACH(i) r.v[i] = __builtin_convertvector(x.v[i], Floats);
  return r;
}
GLM5_INLINE I32x16 to_int(F32x16 x) {
  I32x16 r;
  GLM5_EACH(i) r.v[i] = __builtin_convertvector(x.v[i], Ints);
  return r;
}

// To the nearest bf16, ties to even, as fp32; NaN stays.
GLM5_INLINE F32x16 rounded_to_bf16(F32x16 x) {
  F32x16 r;
  GLM5_EACH(i) {
    const Ints bits = (Ints)x.v[i];
    r.v[i] = (Floats)((bits + (((bits >> 16) & 1) + 0x7fff)) & (int32_t)0xffff0000);
  }
  GLM5_EACH(i) {
    const Ints number = (Ints)(x.v[i] == x.v[i]);
    r.v[i] = (Floats)(((Ints)r.v[i] & number) | (~number & 0x7fc00000));
  }
  return r;
}
GLM5_INLINE void store_bf16(uint16_t* p, F32x16 x) {
  const F32x16 r = rounded_to_bf16(x);
  GLM5_EACH(i) native_store_u16(p + kNative * i, ((Ints)r.v[i] >> 16) & 0xffff);
}
GLM5_INLINE void store_int8(int8_t* p, I32x16 x) { GLM5_EACH(i) native_store_i8(p + kNative * i, x.v[i]); }

// All lanes combined: lane i with lane i + 8, then by 4, 2 and 1.
template <class Combine>
GLM5_INLINE float reduce(F32x16 x, const Combine& combine) {
  float lanes[kLanes];
  x.store(lanes);
  for (int distance = kLanes / 2; distance; distance /= 2)
    for (int i = 0; i < distance; ++i) lanes[i] = combine(lanes[i], lanes[i + distance]);
  return lanes[0];
}
// total += the lanes, one after the other, from lane 0 on.
template <class Total>
GLM5_INLINE void add_lanes(F32x16 x, Total& total) {
  float lanes[kLanes];
  x.store(lanes);
  for (float lane : lanes) total += lane;
}
GLM5_INLINE float sum_in_order(F32x16 x) {
  float total = 0;
  add_lanes(x, total);
  return total;
}

}  // namespace glm5::GLM5_SET
