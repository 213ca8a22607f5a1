// Rows of tensors [A, B, D], such as a paged cache [num_blocks, block_size, D] or queries [T, heads, D], as fp32 lanes.
#pragma once
#include "glm5_kernels.h"
#include "simd/shuffle.h"

namespace glm5::GLM5_SET {

// An element type in memory: its size, and sixteen elements as fp32 lanes from and to element `index` of an array.
struct Fp32 {
  static constexpr int64_t kBytes = 4;
  static GLM5_INLINE F32x16 load(const void* p, int64_t index) {
    return F32x16::load(static_cast<const float*>(p) + index);
  }
  static GLM5_INLINE void store(void* p, int64_t index, F32x16 x) { x.store(static_cast<float*>(p) + index); }
  static GLM5_INLINE F32x16 rounded(F32x16 x) { return x; }
};
struct Bf16 {
  static constexpr int64_t kBytes = 2;
  static GLM5_INLINE F32x16 load(const void* p, int64_t index) {
    return F32x16::load_bf16(static_cast<const uint16_t*>(p) + index);
  }
  static GLM5_INLINE void store(void* p, int64_t index, F32x16 x) { store_bf16(static_cast<uint16_t*>(p) + index, x); }
  static GLM5_INLINE F32x16 rounded(F32x16 x) { return rounded_to_bf16(x); }
};

// A bf16 in memory as fp32.
inline float from_bf16(uint16_t x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x) << 16); }

// Sixteen int8 as fp32 lanes.
struct Int8 {
  static constexpr int64_t kBytes = 1;
  static GLM5_INLINE F32x16 load(const void* p, int64_t index) {
    return F32x16::load_int8(static_cast<const int8_t*>(p) + index);
  }
};

// Up to sixteen columns from `column` on of a row in memory, and zeros behind them.
template <class Element>
GLM5_INLINE F32x16 load_columns(const void* row, int64_t column, int64_t count) {
  if (count >= kLanes) return Element::load(row, column);
  char copy[kLanes * Element::kBytes] = {};
  __builtin_memcpy(copy, static_cast<const char*>(row) + Element::kBytes * column,
                   static_cast<size_t>(Element::kBytes * count));
  return Element::load(copy, 0);
}
template <class Element>
GLM5_INLINE void store_columns(void* row, int64_t column, int64_t count, F32x16 x) {
  if (count >= kLanes) return Element::store(row, column, x);
  char copy[kLanes * Element::kBytes];
  Element::store(copy, 0, x);
  __builtin_memcpy(static_cast<char*>(row) + Element::kBytes * column, copy,
                   static_cast<size_t>(Element::kBytes * count));
}

// The largest |x| of a row [k], of which columns(i, count) gives up to sixteen elements; NaN if an element is NaN. Bits
// of positive floats are in the order of their values.
template <class Columns>
GLM5_INLINE float largest_magnitude(int64_t k, const Columns& columns) {
  I32x16 peak{};
  const auto add = [&](F32x16 value) GLM5_INLINED {
    GLM5_EACH(i) {
      const Ints bits = (Ints)value.v[i] & 0x7fffffff;
      peak.v[i] = bits > peak.v[i] ? bits : peak.v[i];
    }
  };
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) add(columns(i, kLanes));
  if (i < k) add(columns(i, k - i));
  return reduce(__builtin_bit_cast(F32x16, peak), [](float a, float b) { return a != a || a > b ? a : b; });
}
template <class Element>
GLM5_INLINE float largest_magnitude(const void* x, int64_t k) {
  return largest_magnitude(k,
                           [&](int64_t i, int64_t count) GLM5_INLINED { return load_columns<Element>(x, i, count); });
}

// work(Fp32{}) or work(Bf16{}), as dtype says.
template <class Work>
void with_floats(int64_t dtype, const Work& work) {
  if (dtype == kFp32)
    work(Fp32{});
  else
    work(Bf16{});
}

// work(Fp32{}), work(Bf16{}) or work(Int8{}), as dtype says.
template <class Work>
GLM5_INLINE void with_elements(int64_t dtype, const Work& work) {
  if (dtype == kFp32)
    work(Fp32{});
  else if (dtype == kBf16)
    work(Bf16{});
  else
    work(Int8{});
}

GLM5_INLINE int64_t element_bytes(int64_t dtype) { return dtype == kFp32 ? 4 : dtype == kBf16 ? 2 : 1; }

// The address of row (a, b).
GLM5_INLINE char* row_at(const Rows& rows, int64_t a, int64_t b) {
  return static_cast<char*>(rows.base) + (a * rows.block_pitch + b * rows.row_pitch) * element_bytes(rows.dtype);
}

// out fp32 [dims] <- a row of dtype; dims is a multiple of 16.
inline void load_row(const void* row, int64_t dtype, int64_t dims, float* out) {
  with_elements(dtype, [&](auto element) {
    for (int64_t i = 0; i < dims; i += kLanes) decltype(element)::load(row, i).store(out + i);
  });
}
// out fp32 or bf16, as dtype says, <- an fp32 row [dims]; dims is a multiple of 16.
inline void store_row(const float* row, int64_t dtype, int64_t dims, void* out) {
  with_floats(dtype, [&](auto element) {
    for (int64_t i = 0; i < dims; i += kLanes) decltype(element)::store(out, i, F32x16::load(row + i));
  });
}

// Prefetches `bytes` bytes: selected rows are scattered, so no hardware prefetcher finds them.
GLM5_INLINE void prefetch(const void* address, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(address) + i, 0, 2);
}

// out fp32 [dims, 16], `pitch` fp32 from row to row, <- sixteen rows [dims] transposed, each `skipped` bytes after its
// address; dims is a multiple of 16. Pairs of bf16 move like an fp32.
inline void transpose_rows(const char* const* rows, int64_t skipped, int64_t dims, int64_t dtype, float* out,
                           int64_t pitch) {
  with_elements(dtype, [&](auto element) {
    for (int64_t i = 0; i < dims; i += kLanes) {
      F32x16 x[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) x[lane] = decltype(element)::load(rows[lane] + skipped, i);
      transpose(x);
      for (int lane = 0; lane < kLanes; ++lane) x[lane].store(out + (i + lane) * pitch);
    }
  });
}

}  // namespace glm5::GLM5_SET
