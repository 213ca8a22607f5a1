// Rows of fp32 or bf16 in memory, read and written as fp32 lanes.
#pragma once
#include "glm5_kernels.h"
#include "simd/lanes.h"

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

// Elements index .. index + count of an array, count < 16, and zeros behind them.
template <class Element>
GLM5_INLINE F32x16 load_some(const void* p, int64_t index, int64_t count) {
  char copy[kLanes * Element::kBytes] = {};
  __builtin_memcpy(copy, static_cast<const char*>(p) + Element::kBytes * index,
                   static_cast<size_t>(Element::kBytes * count));
  return Element::load(copy, 0);
}
template <class Element>
GLM5_INLINE void store_some(void* p, int64_t index, int64_t count, F32x16 x) {
  char copy[kLanes * Element::kBytes];
  Element::store(copy, 0, x);
  __builtin_memcpy(static_cast<char*>(p) + Element::kBytes * index, copy, static_cast<size_t>(Element::kBytes * count));
}

// Up to sixteen columns from `column` on of a row in memory.
template <class Element>
GLM5_INLINE F32x16 load_columns(const void* row, int64_t column, int64_t count) {
  return count >= kLanes ? Element::load(row, column) : load_some<Element>(row, column, count);
}
template <class Element>
GLM5_INLINE void store_columns(void* row, int64_t column, int64_t count, F32x16 x) {
  if (count >= kLanes)
    Element::store(row, column, x);
  else
    store_some<Element>(row, column, count, x);
}

// work(Fp32{}) or work(Bf16{}), as dtype says.
template <class Work>
void with_floats(int64_t dtype, const Work& work) {
  if (dtype == kFp32)
    work(Fp32{});
  else
    work(Bf16{});
}

// The address of row `row`.
template <class Element>
GLM5_INLINE const char* row_of(const void* base, int64_t pitch, int64_t row) {
  return static_cast<const char*>(base) + Element::kBytes * pitch * row;
}
template <class Element>
GLM5_INLINE char* row_of(void* base, int64_t pitch, int64_t row) {
  return static_cast<char*>(base) + Element::kBytes * pitch * row;
}

}  // namespace glm5::GLM5_SET
