// Products of each head: x [tokens, heads, n] times w [heads, n, r], summed in fp32.
#pragma once
#include "int8_tiles.h"
#include "panel.h"
#include "rows.h"

namespace glm5::GLM5_SET {

// Element pitches of x, w and out, by their first and second dimension.
struct HeadPitches {
  int64_t x[2], w[2], out[2];
};

// Rows of a weight that are converted to fp32 together; tokens that share them; rows that are requested ahead.
constexpr int64_t kDepth = 64, kHeadTokens = 128, kRowsAhead = 48;

// out <- some tokens of a head; x, w and out are those of the head. scratch: [tokens, n], [tokens, r], [kDepth, r].
template <class X, class W>
void multiply_head(const void* x, const void* w, void* out, const HeadPitches& pitch, int64_t tokens, int64_t n,
                   int64_t r, float* scratch) {
  float* const left = scratch;
  float* const total = left + tokens * n;
  float* const panel = total + tokens * r;
  std::memset(total, 0, sizeof(float) * static_cast<size_t>(tokens * r));
  for (int64_t token = 0; token < tokens; ++token) {
    const char* const source = row_of<X>(x, pitch.x[0], token);
    for (int64_t i = 0; i < n; i += kLanes) {
      const int64_t count = min(kLanes, n - i);
      store_columns<Fp32>(left + n * token, i, count, load_columns<X>(source, i, count));
    }
  }
  for (int64_t start = 0; start < n; start += kDepth) {
    const int64_t depth = min(kDepth, n - start);
    for (int64_t k = 0; k < depth; ++k) {
      const char* const source = row_of<W>(w, pitch.w[1], start + k);
      for (int64_t c = 0; c < r; c += kLanes) {
        if (c * W::kBytes % 64 == 0) __builtin_prefetch(source + W::kBytes * (kRowsAhead * pitch.w[1] + c), 0, 2);
        W::load(source, c).store(panel + kDepth * (c - c % kPanelColumns) + kPanelColumns * k + c % kPanelColumns);
      }
    }
    for (int64_t c = 0; c < r; c += kPanelColumns)
      add_panel<Fp32Terms>(panel + kDepth * c, left + start, n, tokens, depth, total + c, r);
  }
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t c = 0; c < r; c += kLanes)
      X::store(row_of<X>(out, pitch.out[0], token), c, F32x16::load(total + r * token + c));
}

inline void head_products(const void* x, int64_t x_dtype, const void* w, int64_t w_dtype, int64_t tokens, int64_t heads,
                          int64_t n, int64_t r, const HeadPitches& pitch, void* out) {
  const int64_t blocks = ceil_div(tokens, kHeadTokens), most = min(kHeadTokens, tokens);
  const int64_t size = round_up(most * n + most * r + kDepth * r, kLanes);
  const Buffer<float> scratch(size * max_threads());
  with_floats(x_dtype, [&](auto x_element) {
    with_floats(w_dtype, [&](auto w_element) {
      using X = decltype(x_element);
      using W = decltype(w_element);
      parallel_for(heads * blocks, 1, [&](int64_t first, int64_t last, int thread) {
        for (int64_t task = first; task < last; ++task) {
          const int64_t head = task / blocks, begin = task % blocks * kHeadTokens;
          multiply_head<X, W>(row_of<X>(row_of<X>(x, pitch.x[1], head), pitch.x[0], begin),
                              row_of<W>(w, pitch.w[0], head),
                              row_of<X>(row_of<X>(out, pitch.out[1], head), pitch.out[0], begin), pitch,
                              min(kHeadTokens, tokens - begin), n, r, scratch + size * thread);
        }
      });
    });
  });
}

// The same in bf16 for up to kTokenBlock tokens from w [heads, r, n], whose rows are read in the order of memory.
inline void head_products_by_rows(const void* x, const void* w, int64_t tokens, int64_t heads, int64_t n, int64_t r,
                                  const HeadPitches& pitch, void* out) {
  const Block shape{nullptr, 2 * pitch.w[1], r, 2 * n, false};
  const int64_t tasks = tasks_of(shape);
  parallel_for(heads * tasks, kLeastBytes / max(kTaskRows * 2 * n, 1), [&](int64_t first, int64_t last, int) {
    const int8_t* rows[kTokenBlock];
    float sums[kTaskRows * kTokenBlock];
    for (int64_t task = first; task < last; ++task) {
      const int64_t head = task / tasks;
      for (int64_t token = 0; token < tokens; ++token)
        rows[token] =
            reinterpret_cast<const int8_t*>(row_of<Bf16>(row_of<Bf16>(x, pitch.x[1], head), pitch.x[0], token));
      Block block = shape;
      block.base = reinterpret_cast<const uint8_t*>(row_of<Bf16>(w, pitch.w[0], head));
      const TaskRows part = task_rows(task % tasks, r);
      multiply_rows<Bf16Dot>(rows, tokens, block, part, sums);
      for (int64_t token = 0; token < tokens; ++token)
        for (int64_t run = 0; run < part.runs; ++run)
          for (int64_t i = 0; i < part.run; i += kLanes)
            store_columns<Bf16>(row_of<Bf16>(row_of<Bf16>(out, pitch.out[1], head), pitch.out[0], token),
                                part.first + part.distance * run + i, min(kLanes, part.run - i),
                                F32x16::load(sums + kTaskRows * token + part.run * run + i));
    }
  });
}

}  // namespace glm5::GLM5_SET
