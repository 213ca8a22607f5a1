// Lanes that change places: sums of lanes, transposed blocks, and bf16 in pairs (two in the 32 bits of a lane).
#pragma once
#include <cstring>
#include <utility>

#include "lanes.h"

namespace glm5::GLM5_SET {

// Lane i of the result is lane Order::lane(i) of a and b, one after the other.
template <class Order, class Native, std::size_t... I>
GLM5_INLINE Native native_shuffle(Native a, Native b, std::index_sequence<I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Order::lane(I)...);
#else
  return __builtin_shuffle(a, b, Ints{Order::lane(I)...});
#endif
}
template <class Order, class Native>
GLM5_INLINE Native native_shuffle(Native a, Native b) {
  return native_shuffle<Order>(a, b, std::make_index_sequence<kNative>());
}

// Lane i of x from lane i ^ distance.
template <int kDistance>
struct Swap {
  static constexpr int lane(int i) { return i ^ kDistance; }
};
template <int kDistance>
GLM5_INLINE F32x16 swapped(F32x16 x) {
  F32x16 r;
  GLM5_EACH(i) {
    if constexpr (kDistance < kNative)
      r.v[i] = native_shuffle<Swap<kDistance>>(x.v[i], x.v[i]);
    else
      r.v[i] = x.v[i ^ (kDistance / kNative)];
  }
  return r;
}

// The lower or the upper half of each run of kSize lanes of a, then of b.
template <int kSize, bool kUpper>
struct Half {
  static constexpr int lane(int i) { return i / (kSize / 2) * kSize + i % (kSize / 2) + (kUpper ? kSize / 2 : 0); }
};
// x[i] <- the sum of register i of kCount, in lane i % kSize: halves of runs of kSize lanes are added, then of halves.
template <int kSize, int kCount, class Native>
GLM5_INLINE void add_halves(Native* x) {
  if constexpr (kSize > 1) {
    constexpr int kLeft = kCount > 1 ? kCount / 2 : 1;
    for (int i = 0; i < kLeft; ++i) {
      const Native a = x[kCount > 1 ? 2 * i : 0], b = x[kCount > 1 ? 2 * i + 1 : 0];
      x[i] = native_shuffle<Half<kSize, false>>(a, b) + native_shuffle<Half<kSize, true>>(a, b);
    }
    add_halves<kSize / 2, kLeft>(x);
  }
}
// out[0:kCount] <- the sums of the lanes of kCount registers: lane j and lane j + kNative / 2 first, and so on.
template <int kCount, class Native, class Total>
GLM5_INLINE void sum_natives(Native* x, Total* out) {
  add_halves<kNative, kCount>(x);
  std::memcpy(out, x, sizeof(Total) * kCount);
}
// out[i] <- the sum of x[i]: lane j and lane j + 8 first, then by 4, 2 and 1.
template <int kCount>
GLM5_INLINE void sum_each(const F32x16* x, float* out) {
  Floats sums[kCount];
  for (int i = 0; i < kCount; ++i) {
    F32x16 y = x[i];
    for (int half = kNatives / 2; half; half /= 2)
      for (int j = 0; j < half; ++j) y.v[j] += y.v[j + half];
    sums[i] = y.v[0];
  }
  sum_natives<kCount>(sums, out);
}

// The largest lane; a NaN may or may not count.
GLM5_INLINE float largest_lane(F32x16 x) {
  x = larger(x, swapped<8>(x));
  x = larger(x, swapped<4>(x));
  x = larger(x, swapped<2>(x));
  return larger(x, swapped<1>(x)).v[0][0];
}

// Of each block of 2 * kSize lanes in a row pair (a, b): [a0 a1; b0 b1] becomes [a0 b0; a1 b1].
template <int kSize, bool kSecond>
struct Corner {
  static constexpr int lane(int i) {
    return i & kSize ? (kSecond ? i + kNative : i - kSize + kNative) : (kSecond ? i + kSize : i);
  }
};
template <int kSize>
GLM5_INLINE void swap_corners(F32x16* x) {
  for (int row = 0; row < kLanes; ++row) {
    if (row & kSize) continue;
    const F32x16 a = x[row], b = x[row | kSize];
    GLM5_EACH(i) {
      if constexpr (kSize < kNative) {
        x[row].v[i] = native_shuffle<Corner<kSize, false>>(a.v[i], b.v[i]);
        x[row | kSize].v[i] = native_shuffle<Corner<kSize, true>>(a.v[i], b.v[i]);
      } else {
        constexpr int kBlock = kSize / kNative;
        x[row].v[i] = i & kBlock ? b.v[i - kBlock] : a.v[i];
        x[row | kSize].v[i] = i & kBlock ? b.v[i] : a.v[i + kBlock];
      }
    }
  }
}
// Sixteen values as a 16 x 16 matrix, in place.
GLM5_INLINE void transpose(F32x16* x) {
  swap_corners<1>(x);
  swap_corners<2>(x);
  swap_corners<4>(x);
  swap_corners<8>(x);
}

// The even and the odd one of the two bf16 in each lane, as fp32; and the inverse.
GLM5_INLINE F32x16 even_bf16(F32x16 pairs) {
  GLM5_EACH(i) pairs.v[i] = (Floats)((Ints)pairs.v[i] << 16);
  return pairs;
}
GLM5_INLINE F32x16 odd_bf16(F32x16 pairs) {
  GLM5_EACH(i) pairs.v[i] = (Floats)((Ints)pairs.v[i] & (int32_t)0xffff0000);
  return pairs;
}
GLM5_INLINE F32x16 paired_bf16(F32x16 even, F32x16 odd) {
  GLM5_EACH(i) even.v[i] = (Floats)((((Ints)even.v[i] >> 16) & 0xffff) | (Ints)odd.v[i]);
  return even;
}

// Lanes whose mask, an fp32 in name only, has no bit become 0.
GLM5_INLINE F32x16 masked(F32x16 x, F32x16 mask) {
  GLM5_EACH(i) x.v[i] = (Floats)((Ints)x.v[i] & (Ints)mask.v[i]);
  return x;
}

#if defined(__AVX512BF16__)
constexpr bool kBf16Pairs = true;
// total + the products of both bf16 in each lane, the odd ones first.
GLM5_INLINE Floats native_bf16_pairs(Floats total, Floats a, Floats b) {
  return _mm512_dpbf16_ps(total, (__m512bh)a, (__m512bh)b);
}
GLM5_INLINE F32x16 add_bf16_pairs(F32x16 a, F32x16 b, F32x16 total) {
  return {{native_bf16_pairs(total.v[0], a.v[0], b.v[0])}};
}
#else
constexpr bool kBf16Pairs = false;
GLM5_INLINE F32x16 add_bf16_pairs(F32x16 a, F32x16 b, F32x16 total) {
  return fma(even_bf16(a), even_bf16(b), fma(odd_bf16(a), odd_bf16(b), total));
}
#endif

}  // namespace glm5::GLM5_SET
