// Products of each head: x [tokens, heads, n] times w [heads, n, r], summed in fp32.
#pragma once
#include "int8_tiles.h"
#include "panel.h"
#include "rows.h"

namespace glm5::GLM5_SET {

// Rows of a weight that are converted to fp32 together; tokens that share them; rows that are requested ahead.
constexpr int64_t kDepth = 64, kHeadTokens = 128, kRowsAhead = 48;

// Tokens begin .. begin + tokens of a head. scratch: [tokens, n], [tokens, r], [kDepth, r].
template <class X, class W>
void multiply_head(const HeadProducts& op, int64_t head, int64_t begin, int64_t tokens, float* scratch) {
  const int64_t n = op.n, r = op.r;
  float* const left = scratch;
  float* const total = left + tokens * n;
  float* const panel = total + tokens * r;
  fill(total, tokens * r, 0.0f);
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t i = 0; i < n; i += kLanes) {
      const int64_t count = min(kLanes, n - i);
      store_columns<Fp32>(left + n * token, i, count, load_columns<X>(row_at(op.x, begin + token, head), i, count));
    }
  for (int64_t start = 0; start < n; start += kDepth) {
    const int64_t depth = min(kDepth, n - start);
    for (int64_t k = 0; k < depth; ++k) {
      const char* const source = row_at(op.w, head, start + k);
      for (int64_t c = 0; c < r; c += kLanes) {
        if (c * W::kBytes % 64 == 0) __builtin_prefetch(source + W::kBytes * (kRowsAhead * op.w.row_pitch + c), 0, 2);
        W::load(source, c).store(panel + kDepth * (c - c % kPanelColumns) + kPanelColumns * k + c % kPanelColumns);
      }
    }
    for (int64_t c = 0; c < r; c += kPanelColumns)
      add_panel<Fp32Terms>(panel + kDepth * c, left + start, n, tokens, depth, total + c, r);
  }
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t c = 0; c < r; c += kLanes)
      X::store(row_at(op.out, begin + token, head), c, F32x16::load(total + r * token + c));
}

inline void head_products(const HeadProducts& op) {
  const int64_t blocks = ceil_div(op.tokens, kHeadTokens), most = min(kHeadTokens, op.tokens);
  const int64_t size = round_up(most * op.n + most * op.r + kDepth * op.r, kLanes);
  const Buffer<float> scratch(size * max_threads());
  with_floats(op.x.dtype, [&](auto x) {
    with_floats(op.w.dtype, [&](auto w) {
      parallel_for(op.heads * blocks, 1, [&](int64_t first, int64_t last, int thread) {
        for (int64_t task = first; task < last; ++task) {
          const int64_t begin = task % blocks * kHeadTokens;
          multiply_head<decltype(x), decltype(w)>(op, task / blocks, begin, min(kHeadTokens, op.tokens - begin),
                                                  scratch + size * thread);
        }
      });
    });
  });
}

// In bf16, for up to kTokenBlock tokens; w is read in the order of memory.
inline void head_products_by_rows(const HeadProducts& op) {
  const Block shape{nullptr, 2 * op.w.row_pitch, op.r, 2 * op.n, false};
  const int64_t tasks = tasks_of(shape);
  parallel_for(op.heads * tasks, kLeastBytes / max(kTaskRows * 2 * op.n, 1), [&](int64_t first, int64_t last, int) {
    const int8_t* rows[kTokenBlock];
    float sums[kTaskRows * kTokenBlock];
    for (int64_t task = first; task < last; ++task) {
      const int64_t head = task / tasks;
      for (int64_t token = 0; token < op.tokens; ++token)
        rows[token] = reinterpret_cast<const int8_t*>(row_at(op.x, token, head));
      Block block = shape;
      block.base = reinterpret_cast<const uint8_t*>(row_at(op.w, head, 0));
      const TaskRows part = task_rows(task % tasks, op.r);
      multiply_rows<Bf16Dot>(rows, op.tokens, block, part, sums);
      for (int64_t token = 0; token < op.tokens; ++token)
        for (int64_t run = 0; run < part.runs; ++run)
          for (int64_t i = 0; i < part.run; i += kLanes)
            store_columns<Bf16>(row_at(op.out, token, head), part.first + part.distance * run + i,
                                min(kLanes, part.run - i), F32x16::load(sums + kTaskRows * token + part.run * run + i));
    }
  });
}

}  // namespace glm5::GLM5_SET
