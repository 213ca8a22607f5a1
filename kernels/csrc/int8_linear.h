// Linear layers with int8 weights: rows quantized, multiplied exactly and scaled back.
#pragma once
#include "int8_products.h"

namespace glm5::GLM5_SET {

// y [tokens, rows] <- x times the weight transposed, scaled back.
template <class Element>
void multiply_layer(const Codes& x, const Block& weight, const float* scales, const int32_t* bias, void* y) {
  const bool by_tiles = x.tokens > kVectorTokens;
  const int64_t blocks = ceil_div(x.tokens, kGroupTokens), tasks = tasks_of(weight);
  const Buffer<const int8_t*> rows(x.tokens);
  for (int64_t token = 0; token < x.tokens; ++token) rows[token] = x.row(token);
  const int64_t groups = by_tiles ? ceil_div(x.tokens, kTile) : 0, size = group_bytes(x.pitch);
  const Buffer<int8_t> tiles(groups * size);
  parallel_for(groups, 1, [&](int64_t first, int64_t last, int) {
    for (int64_t g = first; g < last; ++g)
      pack_tokens(rows + kTile * g, min(kTile, x.tokens - kTile * g), x.pitch, tiles + size * g);
  });
  const Buffer<ProductScratch> scratch(max_threads());
  parallel_for(
      blocks * tasks, kLeastBytes / max(kTaskRows * weight.k, 1), [&](int64_t first, int64_t last, int thread) {
        [[maybe_unused]] const Tiles registers;
        for (int64_t task = first; task < last; ++task) {
          const int64_t begin = task / tasks * kGroupTokens, count = min(kGroupTokens, x.tokens - begin);
          const Tokens tokens{count, rows + begin, x.sums + begin, x.scales + begin,
                              by_tiles ? tiles + x.pitch * begin : nullptr};
          multiply_task(tokens, weight, task % tasks, bias, scales, scratch[thread],
                        [&](int64_t token, int64_t column, int64_t some, F32x16 sums) GLM5_INLINED {
                          store_columns<Element>(row_of<Element>(y, weight.rows, begin + token), column, some, sums);
                        });
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
  with_floats(y_dtype, [&](auto element) { multiply_layer<decltype(element)>(codes, block, scales, bias, y); });
}

}  // namespace glm5::GLM5_SET
