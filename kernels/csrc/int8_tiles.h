// Exact integer products of int8 rows with few tokens, weights read in the order in which they lie in memory.
//
// A thread reads four distant places of memory at once faster than one, because the processor's prefetcher stops at the
// end of a page of 4 KiB. So a task has sixteen weight rows of each quarter of a block, and a tile one row of each:
//
//     block of N rows   | quarter 0 | quarter 1 | quarter 2 | quarter 3 | rest |
//     task t            |  t*16 ..  |  t*16 ..  |  t*16 ..  |  t*16 ..  |        the last task takes the rest
//     sums of a token   [16 of quarter 0, 16 of quarter 1, 16 of quarter 2, 16 of quarter 3]
//
// In a block of INT4 a line of memory holds two rows, row 2i in the low and row 2i + 1 in the high halves of its bytes.
#pragma once
#include <cstring>

#include "parallel.h"
#include "simd/dot.h"

namespace glm5::GLM5_SET {

constexpr int kStep = 64;              // columns of a step; rows of codes are padded to whole steps with zeros
constexpr int kLines = 4;              // lines of a tile
constexpr int kTaskRows = 4 * kLanes;  // weight rows of a task
constexpr int kGroupTokens = 256;      // tokens, at most, that share the weights a task has read
constexpr int kTokenBlock = 16;        // tokens that are multiplied at a time: they and a task's rows stay cached
// Columns of many tokens that are multiplied at a time: those of kTokenBlock tokens and of a tile's lines fill the
// nearest cache.
constexpr int64_t kCached = 2048;
// Bytes that a tile of several tokens requests its lines ahead, at least: such tokens fill the nearest cache, where the
// processor's own prefetcher then reads at half of the rate. A single token is faster without.
constexpr int64_t kAhead = 4096;

// The weights [rows, k] of a linear layer or of an expert, int8 or packed INT4; pitch: bytes from line to line.
struct Block {
  const uint8_t* base;
  int64_t pitch;
  int64_t rows;
  int64_t k;
  bool packed;
};

// `width` rows of a block from `first` on, and as many from each `distance` rows behind; columns of the sums count
// `runs` times `run` neighbouring rows.
struct TaskRows {
  int64_t first, width, distance, runs, run;
};

inline int64_t tasks_of(const Block& block) {
  const int64_t quarter = block.rows / kTaskRows;
  return quarter + (block.rows > quarter * kTaskRows);
}

inline TaskRows task_rows(int64_t task, int64_t rows) {
  const int64_t quarter = rows / kTaskRows * kLanes;
  if (task * kLanes < quarter) return {task * kLanes, kLanes, quarter, kLines, kLanes};
  const int64_t rest = rows - kLines * quarter, width = round_up(ceil_div(rest, kLines), 2);
  return {kLines * quarter, width, width, 1, rest};
}

// step(lines, column of the lines, column of the tokens) for every Dot::kColumns of k columns. The end of a row that is
// no whole step is copied, because what follows need not be readable.
template <class Dot, int kCount, bool kRequests, class Step>
GLM5_INLINE void for_each_step(const uint8_t* const* lines, int64_t k, int64_t ahead, const Step& step) {
  int64_t column = 0;
  for (; column + Dot::kColumns <= k; column += Dot::kColumns) {
    if (kRequests && column % kStep == 0)
      for (int l = 0; l < kCount; ++l) __builtin_prefetch(lines[l] + column + ahead, 0, 2);
    step(lines, column, column);
  }
  if (column == k) return;
  uint8_t copies[kCount][Dot::kColumns] = {};
  const uint8_t* ends[kCount];
  for (int l = 0; l < kCount; ++l) {
    std::memcpy(copies[l], lines[l] + column, static_cast<size_t>(k - column));
    ends[l] = copies[l];
  }
  step(ends, 0, column);
}

// Columns first .. first + k of a product; `adds`: to the sums of the columns before.
struct Columns {
  int64_t first, k;
  bool adds;
};

// The sums of a line's rows, of which those of the columns before may be there.
template <class Total>
GLM5_INLINE void store_sums(Total* sums, const Total* some, int count, bool adds) {
  for (int i = 0; i < count; ++i) sums[i] = adds ? sums[i] + some[i] : some[i];
}

// sums <- kTokens rows of codes times kCount lines of weights: those of token t and line l begin at
// sums[kTaskRows * t + line_pitch * l].
template <class Dot, int kTokens, int kCount>
void tile(const int8_t* const* x, const uint8_t* const* lines, const Columns& part, int64_t ahead,
          typename Dot::Total* sums, int64_t line_pitch) {
  constexpr int kRows = kCount * Dot::kRows;
  typename Dot::Sums total[kTokens][kRows];
#pragma GCC unroll 4
  for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) total[t][r] = Dot::no_sums();
  for_each_step<Dot, kCount, (kTokens > 1)>(
      lines, part.k, ahead, [&](const uint8_t* const* line, int64_t offset, int64_t column) GLM5_INLINED {
        Ints codes[kTokens];
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) codes[t] = Dot::token(x[t] + part.first + column);
#pragma GCC unroll 4
        for (int l = 0; l < kCount; ++l) {
          Ints weights[Dot::kRows];
          Dot::weights(line[l] + offset, weights);
#pragma GCC unroll 4
          for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 2
            for (int r = 0; r < Dot::kRows; ++r) {
              auto& sum = total[t][Dot::kRows * l + r];
              sum = Dot::add(sum, weights[r], codes[t]);
            }
        }
      });
#pragma GCC unroll 4
  for (int t = 0; t < kTokens; ++t) {
    constexpr int kFours = (kRows + 3) / 4;
    typename Dot::Sums rows[4 * kFours];
    typename Dot::Total flat[4 * kFours];
#pragma GCC unroll 8
    for (int r = 0; r < 4 * kFours; ++r) rows[r] = r < kRows ? total[t][r] : Dot::no_sums();
    sum_natives<4 * kFours>(rows, flat);
    for (int l = 0; l < kCount; ++l)
      store_sums(sums + kTaskRows * t + line_pitch * l, flat + Dot::kRows * l, Dot::kRows, part.adds);
  }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Adds two tokens times two rows, 16 columns of each: [t0 r0, t0 r1, t1 r0, t1 r1] by SMMLA of 8 columns twice.
GLM5_INLINE Ints add_two_by_two(Ints sums, Ints t0, Ints t1, Ints r0, Ints r1) {
  const auto halves = [](Ints a, Ints b, bool high) {
    const int64x2_t x = vreinterpretq_s64_s32(a), y = vreinterpretq_s64_s32(b);
    return vreinterpretq_s8_s64(high ? vzip2q_s64(x, y) : vzip1q_s64(x, y));
  };
  sums = vmmlaq_s32(sums, halves(t0, t1, false), halves(r0, r1, false));
  return vmmlaq_s32(sums, halves(t0, t1, true), halves(r0, r1, true));
}

// The same by SMMLA, two tokens by two rows, for two to four tokens and lines of four rows.
template <class Dot, int kTokens, int kCount>
void matrix_tile(const int8_t* const* x, const uint8_t* const* lines, const Columns& part, int64_t ahead, int32_t* sums,
                 int64_t line_pitch) {
  static_assert(kCount * Dot::kRows == 4);
  constexpr int kPairs = (kTokens + 1) / 2;
  Ints total[kPairs][2];
  for (auto& pair : total) pair[0] = pair[1] = Dot::no_sums();
  for_each_step<Dot, kCount, (kTokens > 1)>(
      lines, part.k, ahead, [&](const uint8_t* const* line, int64_t offset, int64_t column) GLM5_INLINED {
        Ints weights[4];
#pragma GCC unroll 4
        for (int l = 0; l < kCount; ++l) Dot::weights(line[l] + offset, weights + Dot::kRows * l);
#pragma GCC unroll 2
        for (int p = 0; p < kPairs; ++p) {
          const int64_t at = part.first + column;
          const Ints first = Dot::token(x[2 * p] + at);
          const Ints second = 2 * p + 1 < kTokens ? Dot::token(x[2 * p + 1] + at) : first;
          total[p][0] = add_two_by_two(total[p][0], first, second, weights[0], weights[1]);
          total[p][1] = add_two_by_two(total[p][1], first, second, weights[2], weights[3]);
        }
      });
  for (int t = 0; t < kTokens; ++t) {
    int32_t flat[8];
    vst1q_s32(flat, total[t / 2][0]);
    vst1q_s32(flat + 4, total[t / 2][1]);
    const int32_t rows[4] = {flat[t % 2 * 2], flat[t % 2 * 2 + 1], flat[t % 2 * 2 + 4], flat[t % 2 * 2 + 5]};
    for (int l = 0; l < kCount; ++l)
      store_sums(sums + kTaskRows * t + line_pitch * l, rows + Dot::kRows * l, Dot::kRows, part.adds);
  }
}
#endif

// The same for all four lines of a tile, as many at a time as the registers hold sums of.
template <class Dot, int kTokens>
void whole_tile(const int8_t* const* x, const uint8_t* const* lines, const Columns& part, int64_t ahead,
                typename Dot::Total* sums, int64_t line_pitch) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  constexpr bool kMatrix = kTokens > 1 && std::is_same_v<typename Dot::Total, int32_t>;
#else
  constexpr bool kMatrix = false;
#endif
  constexpr int kFit = kMatrix ? 4 / Dot::kRows : kSums / (kTokens * Dot::kRows);
  constexpr int kCount = kFit >= kLines ? kLines : kFit >= 2 ? 2 : 1;
  for (int l = 0; l < kLines; l += kCount) {
    typename Dot::Total* const some = sums + line_pitch * l;
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (kMatrix)
      matrix_tile<Dot, kTokens, kCount>(x, lines + l, part, ahead, some, line_pitch);
    else
#endif
      tile<Dot, kTokens, kCount>(x, lines + l, part, ahead, some, line_pitch);
  }
}

// sums [count, kTaskRows] <- rows of codes times the rows of a task; int8 weights count as w + Dot::kZero. Many tokens
// are multiplied by kCached columns of int8 at a time: not of INT4, whose rows are half as long in memory, and not of
// floats, whose sums have one order.
template <class Dot>
void multiply_rows(const int8_t* const* x, int64_t count, const Block& block, const TaskRows& rows,
                   typename Dot::Total* sums) {
  constexpr bool kSplits = std::is_same_v<typename Dot::Total, int32_t> && Dot::kRows == 1;
  const int64_t ahead = max(block.pitch, kAhead), last = block.rows - 1;
  const int64_t width = kSplits && count > kTokenBlock ? kCached : max(block.k, 1);
  for (int64_t start = 0; start < count; start += kTokenBlock) {
    const int64_t stop = min(start + kTokenBlock, count);
    for (int64_t column = 0; column == 0 || column < block.k; column += width) {
      const Columns part{column, min(width, block.k - column), column > 0};
      for (int64_t row = 0; row < rows.width; row += Dot::kRows) {
        const uint8_t* lines[kLines];
        for (int l = 0; l < kLines; ++l)  // a row behind the last one is the last one; its sums are not used
          lines[l] = block.base + block.pitch * (min(rows.first + rows.distance * l + row, last) / Dot::kRows) + column;
        for (int64_t token = start; token < stop; token += kLines) {
          constexpr decltype(&whole_tile<Dot, 1>) kTiles[] = {whole_tile<Dot, 1>, whole_tile<Dot, 2>,
                                                              whole_tile<Dot, 3>, whole_tile<Dot, 4>};
          kTiles[min(stop - token, kLines) - 1](x + token, lines, part, ahead, sums + kTaskRows * token + row,
                                                rows.width);
        }
      }
    }
  }
}

}  // namespace glm5::GLM5_SET
