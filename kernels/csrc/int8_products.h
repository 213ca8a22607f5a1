// Groups of rows of codes times the weights of each: the product of linear layers and of experts.
#pragma once
#include "int8_amx.h"
#include "quantize.h"

namespace glm5::GLM5_SET {

// z of weights of one byte, or of packed INT4: they are multiplied as w + z.
inline int32_t zero_of(const Block& block, bool by_tiles) {
  if (block.packed) return Int4Dot::kZero;
  return by_tiles ? 0 : Int8Dot::kZero;
}

// Up to kGroupTokens rows of codes, by their addresses, with the sum and the scale of each; `tiles`: packed for AMX.
struct Tokens {
  int64_t count;
  const int8_t* const* rows;
  const int32_t* sums;
  const float* scales;
  const int8_t* tiles;  // null: multiplied by vectors
};

// Scratch of a thread.
struct ProductScratch {
  alignas(64) int32_t sums[kTaskRows * kGroupTokens];
#if defined(__AMX_INT8__)
  AmxScratch amx;
#endif
};

// sink(token, column, count, floats) for the rows of a task: `count` columns at a time, scaled back.
template <class Sink>
void multiply_task(const Tokens& x, const Block& block, int64_t task, const int32_t* bias, const float* scales,
                   ProductScratch& scratch, const Sink& sink) {
  const int32_t zero = zero_of(block, x.tiles);
  const auto scaling = [&](int64_t token)
                           GLM5_INLINED { return Scaling{-zero * x.sums[token], x.scales[token], bias, scales}; };
#if defined(__AMX_INT8__)
  if (x.tiles) {
    multiply_task_by_amx(block, task, x.tiles, x.count, scratch.amx,
                         [&](int64_t token, int64_t column, int64_t count, I32x16 sums)
                             GLM5_INLINED { sink(token, column, count, scaled(sums, scaling(token), column, count)); });
    return;
  }
#endif
  const TaskRows rows = task_rows(task, block.rows);
  int32_t* const sums = scratch.sums;
  if (block.packed)
    multiply_rows<Int4Dot>(x.rows, x.count, block, rows, sums);
  else
    multiply_rows<Int8Dot>(x.rows, x.count, block, rows, sums);
  for (int64_t token = 0; token < x.count; ++token) {
    const Scaling by = scaling(token);
    for (int64_t run = 0; run < rows.runs; ++run)
      for (int64_t i = 0; i < rows.run; i += kLanes) {
        const int64_t column = rows.first + rows.distance * run + i, count = min(kLanes, rows.run - i);
        sink(token, column, count,
             scaled(I32x16::load(sums + kTaskRows * token + rows.run * run + i), by, column, count));
      }
  }
}

#if defined(__AMX_INT8__)
// More tokens than these are multiplied by AMX: a tile of sixteen takes as long as so many by vectors.
constexpr int64_t kVectorTokens = 8;
#else
constexpr int64_t kVectorTokens = INT64_MAX;
struct Tiles {};
inline int64_t group_bytes(int64_t) { return 0; }
inline void pack_tokens(const int8_t* const*, int64_t, int64_t, int8_t*) {}
#endif

}  // namespace glm5::GLM5_SET
