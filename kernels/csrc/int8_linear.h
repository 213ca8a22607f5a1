// Linear layers with int8 weights: rows quantized, multiplied exactly and scaled back.
#pragma once
#include "int8_products.h"

namespace glm5::GLM5_SET {

inline void int8_linear(const Int8Linear& op) {
  if (op.tokens == 0) return;
  const StaticScale given{op.input_scale ? *op.input_scale : 1.0f, op.input_scale ? *op.input_offset : 0.0f};
  const Codes codes(op.tokens, op.k);
  quantize_rows(op.x, op.k, op.input_scale ? &given : nullptr, codes);
  const int64_t count = ceil_div(op.tokens, kGroupTokens);
  const Buffer<Group> groups(count);
  for (int64_t g = 0; g < count; ++g)
    groups[g] = {0, g * kGroupTokens, min(kGroupTokens, op.tokens - g * kGroupTokens)};
  const GroupedTokens tokens(codes, groups, count, 1, [](int64_t token) { return token; });
  const Block weight{op.weight, op.weight_pitch, op.rows, op.k, false};
  with_floats(op.y.dtype, [&](auto element) {
    for_each_group_task(groups, count, weight, [&](const Group& group, int64_t task, ProductScratch& own) {
      multiply_task(tokens.of(group), weight, task, op.bias, op.scales, own,
                    [&](int64_t token, int64_t column, int64_t n, F32x16 sums) GLM5_INLINED {
                      store_columns<decltype(element)>(row_at(op.y, 0, group.begin + token), column, n, sums);
                    });
    });
  });
}

}  // namespace glm5::GLM5_SET
