// exp of fp32 lanes.
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

}  // namespace glm5::GLM5_SET
