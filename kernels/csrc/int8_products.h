// Groups of rows of codes times the weights of each: the product of linear layers and of experts.
#pragma once
#include "int8_amx.h"
#include "quantize.h"

namespace glm5::GLM5_SET {

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

// sink(token, column, count, floats) for the rows of a task: `count` columns at a time. floats: (sums + bias) * scale
// of the token * scales, the bits of glm5_kernels.int8; bias may be null.
template <class Sink>
void multiply_task(const Tokens& x, const Block& block, int64_t task, const int32_t* bias, const float* scales,
                   ProductScratch& scratch, const Sink& sink) {
  const int32_t zero = block.packed ? Int4Dot::kZero : Int8Dot::kZero;
  const auto scaled = [&](int64_t token, int64_t column, int64_t count, I32x16 sums) GLM5_INLINED {
    GLM5_EACH(i) sums.v[i] -= zero * x.sums[token];
    if (bias) sums += __builtin_bit_cast(I32x16, load_columns<Fp32>(bias, column, count));
    const F32x16 scale = load_columns<Fp32>(scales, column, count);
    sink(token, column, count, to_float(sums) * F32x16::broadcast(x.scales[token]) * scale);
  };
#if defined(__AMX_INT8__)
  if (x.tiles) return multiply_task_by_amx(block, task, x.tiles, x.count, scratch.amx, scaled);
#endif
  const TaskRows rows = task_rows(task, block.rows);
  int32_t* const sums = scratch.sums;
  if (block.packed)
    multiply_rows<Int4Dot>(x.rows, x.count, block, rows, sums);
  else
    multiply_rows<Int8Dot>(x.rows, x.count, block, rows, sums);
  for (int64_t token = 0; token < x.count; ++token)
    for (int64_t run = 0; run < rows.runs; ++run)
      for (int64_t i = 0; i < rows.run; i += kLanes)
        scaled(token, rows.first + rows.distance * run + i, min(kLanes, rows.run - i),
               I32x16::load(sums + kTaskRows * token + rows.run * run + i));
}

#if defined(__AMX_INT8__)
// More tokens than these are multiplied by AMX: a tile of sixteen takes as long as so many by vectors.
constexpr int64_t kVectorTokens = 8;
#else
constexpr int64_t kVectorTokens = INT64_MAX;
inline void pack_tokens(const int8_t* const*, int64_t, int64_t, int8_t*) {}
#endif

// Rows begin .. begin + count of codes, at most kGroupTokens, that are multiplied by one weight: `expert`.
struct Group {
  int64_t expert, begin, count;
};

// The rows of codes of some groups, and packed for AMX those of groups that are multiplied by it.
class GroupedTokens {
 public:
  // Row i of the groups is row row_of(i) of codes. spread: 1 if groups begin at multiples of sixteen rows, 2 if they
  // begin anywhere: more than eight rows are at most twice as many when they are rounded up to sixteen.
  template <class RowOf>
  GroupedTokens(const Codes& codes, const Group* groups, int64_t count, int64_t spread, const RowOf& row_of)
      : pitch_(codes.pitch),
        spread_(spread),
        size_(groups[count - 1].begin + groups[count - 1].count),
        rows_(size_),
        sums_(size_),
        scales_(size_),
        tiles_(kVectorTokens < kGroupTokens ? spread * round_up(size_, kTile) * pitch_ : 0) {
    for (int64_t i = 0; i < size_; ++i) {
      const int64_t row = row_of(i);
      rows_[i] = codes.row(row);
      sums_[i] = codes.sums[row];
      scales_[i] = codes.scales[row];
    }
    constexpr int64_t kTiles = kGroupTokens / kTile;  // of a group
    parallel_for(count * kTiles, 1, [&](int64_t first, int64_t last, int) {
      for (int64_t tile = first; tile < last; ++tile) {
        const Group& group = groups[tile / kTiles];
        const int64_t token = tile % kTiles * kTile;
        if (group.count > kVectorTokens && token < group.count)
          pack_tokens(rows_ + group.begin + token, min(kTile, group.count - token), pitch_, tiles(group, token));
      }
    });
  }

  Tokens of(const Group& group) const {
    return {group.count, rows_ + group.begin, sums_ + group.begin, scales_ + group.begin,
            group.count > kVectorTokens ? tiles(group, 0) : nullptr};
  }

 private:
  int8_t* tiles(const Group& group, int64_t token) const { return tiles_ + pitch_ * (spread_ * group.begin + token); }

  int64_t pitch_, spread_, size_;
  Buffer<const int8_t*> rows_;
  Buffer<int32_t> sums_;
  Buffer<float> scales_;
  Buffer<int8_t> tiles_;
};

// work(group, task, scratch) for every task of every group.
template <class Work>
void for_each_group_task(const Group* groups, int64_t count, const Block& block, const Work& work) {
  const int64_t tasks = tasks_of(block);
  const Buffer<ProductScratch> scratch(max_threads());
  parallel_for(count * tasks, kLeastBytes / max(kTaskRows * block.k, 1), [&](int64_t first, int64_t last, int thread) {
    [[maybe_unused]] const Tiles registers;
    for (int64_t task = first; task < last; ++task) work(groups[task / tasks], task % tasks, scratch[thread]);
  });
}

}  // namespace glm5::GLM5_SET
