// Linear layers with int8 weights: rows quantized, multiplied exactly and scaled back.
#pragma once
#include "quantize.h"

namespace glm5::GLM5_SET {

// z of weights of one byte, or of packed INT4: they are multiplied as w + z.
inline int32_t zero_of(const Block& block) { return block.packed ? Int4Dot::kZero : Int8Dot::kZero; }

inline void multiply_task(const int8_t* const* x, int64_t count, const Block& block, const TaskRows& rows,
                          int32_t* sums) {
  if (block.packed)
    multiply_rows<Int4Dot>(x, count, block, rows, sums);
  else
    multiply_rows<Int8Dot>(x, count, block, rows, sums);
}

// y [tokens, rows] <- x times the weight transposed, scaled back, by vectors.
template <class Element>
void int8_linear_by_vectors(const Codes& x, const Block& weight, const float* scales, const int32_t* bias, void* y) {
  const Buffer<int32_t> scratch(kTaskRows * x.tokens * max_threads());
  const Buffer<const int8_t*> codes(x.tokens);
  for (int64_t token = 0; token < x.tokens; ++token) codes[token] = x.row(token);
  const int32_t zero = zero_of(weight);
  parallel_for(tasks_of(weight), kLeastBytes / max(kTaskRows * weight.k, 1),
               [&](int64_t first, int64_t last, int thread) {
                 int32_t* const sums = scratch + kTaskRows * x.tokens * thread;
                 for (int64_t task = first; task < last; ++task) {
                   const TaskRows rows = task_rows(task, weight.rows);
                   multiply_task(codes, x.tokens, weight, rows, sums);
                   for (int64_t token = 0; token < x.tokens; ++token)
                     for (int64_t run = 0; run < rows.runs; ++run)
                       scale_row<Element>(sums + kTaskRows * token + rows.run * run, rows.run, -zero * x.sums[token],
                                          x.scales[token], bias, scales, rows.first + rows.distance * run,
                                          row_of<Element>(y, weight.rows, token));
                 }
               });
}

inline void int8_linear(const void* x, int64_t x_pitch, int64_t x_dtype, int64_t tokens, int64_t k,
                        const int8_t* weight, int64_t weight_pitch, int64_t rows, const float* scales,
                        const float* input_scale, const float* input_offset, const int32_t* bias, void* y,
                        int64_t y_dtype) {
  const Block block{reinterpret_cast<const uint8_t*>(weight), weight_pitch, rows, k, false};
  const StaticScale given{input_scale ? *input_scale : 1.0f, input_scale ? *input_offset : 0.0f};
  const Codes codes(tokens, k);
  with_floats(x_dtype, [&](auto element) {
    quantize_rows<decltype(element)>(x, x_pitch, k, input_scale ? &given : nullptr, codes);
  });
  with_floats(y_dtype, [&](auto element) { int8_linear_by_vectors<decltype(element)>(codes, block, scales, bias, y); });
}

}  // namespace glm5::GLM5_SET
