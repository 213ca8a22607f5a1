// silu(x) = x / (1 + exp(-x)) with the bits of torch's, which are those of SLEEF's expf of 1.0 ULP.
#pragma once
#include "simd/lanes.h"

namespace glm5::GLM5_SET {

// exp(x) = 2^n exp(s) with n = rint(x / ln 2): ln 2 is subtracted in two parts, exp(s) a polynomial of degree 7.
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
