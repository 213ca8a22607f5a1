// exp of fp32 lanes, and what is made of it.
#pragma once
#include "simd/lanes.h"

namespace glm5::GLM5_SET {

constexpr float kInfinity = __builtin_inff();

// exp(x) of each lane, error below 2 ULP; 0 below -87. Cephes' expf (S. L. Moshier): with n = rint(x / ln 2) and
// r = x - n ln 2, exp(x) = 2^n (1 + r + r^2 p(r)).
GLM5_INLINE F32x16 softmax_exp(F32x16 x) {
  const auto all = [](float value) { return F32x16::broadcast(value); };
  constexpr float kSmallest = -87.0f;
  const F32x16 y = larger(all(kSmallest), x);
  const F32x16 n = rint(y * all(1.44269504088896341f));
  F32x16 r = fma(n, all(-0.693359375f), y);
  r = fma(n, all(2.12194440e-4f), r);
  F32x16 p = all(1.9875691500e-4f);
  constexpr float kCoefficients[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                                     5.0000001201e-1f};
  for (float coefficient : kCoefficients) p = fma(p, r, all(coefficient));
  p = fma(r * r, p, r + all(1.0f));
  GLM5_EACH(i) {
    const Ints power = (__builtin_convertvector(n.v[i], Ints) + 127) << 23;
    const Ints gone = (Ints)(x.v[i] < kSmallest);
    p.v[i] = (Floats)((Ints)(p.v[i] * (Floats)power) & ~gone);
  }
  return p;
}

// The bits of torch's exp in silu, which are those of SLEEF's expf of 1.0 ULP: exp(x) = 2^n exp(s) with
// n = rint(x / ln 2); ln 2 is subtracted in two parts, exp(s) a polynomial of degree 7.
GLM5_INLINE F32x16 exponential(F32x16 x) {
  const auto all = [](float value) { return F32x16::broadcast(value); };
  const F32x16 n = rint(x * all(1.442695040888963407f));
  const F32x16 s = fma(n, all(-1.428606765330187045e-06f), fma(n, all(-0.693145751953125f), x));
  constexpr float kTerms[] = {0.000198527617612853646278381f, 0.00139304355252534151077271f,
                              0.00833336077630519866943359f,  0.0416664853692054748535156f,
                              0.166666671633720397949219f,    0.5f};
  F32x16 p = all(kTerms[0]);
#pragma GCC unroll 5
  for (int i = 1; i < 6; ++i) p = fma(p, s, all(kTerms[i]));
  p = all(1.0f) + fma(s * s, p, s);
  F32x16 result;
  GLM5_EACH(i) {
    const Ints exponent = __builtin_convertvector(n.v[i], Ints), half = exponent >> 1;
    const Floats scaled = p.v[i] * (Floats)((half + 127) << 23) * (Floats)((exponent - half + 127) << 23);
    const Ints small = (Ints)(x.v[i] < -104.0f), large = (Ints)(x.v[i] > 100.0f),
               infinity = (Ints)native_broadcast(__builtin_inff());
    result.v[i] = (Floats)((((Ints)scaled & ~small) & ~large) | (infinity & large));
  }
  return result;
}

// x / (1 + exp(-x)) with the bits of torch's.
GLM5_INLINE F32x16 silu(F32x16 x) {
  const F32x16 zero = F32x16::zero(), one = F32x16::broadcast(1.0f);
  return x / (one + exponential(zero - x));
}

// silu(gate) * up after gate <= limit and -limit <= up <= limit; NaN stays.
GLM5_INLINE F32x16 swiglu(F32x16 gate, F32x16 up, float limit) {
  const F32x16 most = F32x16::broadcast(limit), least = F32x16::broadcast(-limit);
  return silu(smaller(most, gate)) * larger(least, smaller(most, up));
}

}  // namespace glm5::GLM5_SET
