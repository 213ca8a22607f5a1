// Routed experts: pairs of a token and one of its experts, sorted by expert, some pairs at a time.
//
//     x -> codes                       a row for each token, once
//     hidden = silu(gate) * up         fp32 [pairs, width]: both products of a task's rows
//     hidden -> codes                  a row for each pair
//     y = codes times w2               fp32 [pairs, hidden size]
//     out[token] += y * weight         in the order of the experts
#pragma once
#include "exponential.h"
#include "int8_products.h"

namespace glm5::GLM5_SET {

constexpr int64_t kPairs = 1024;  // at a time, about: results of a size that the allocator keeps for the next ones

inline Block block_of(const ExpertBlocks& blocks, int64_t index) {
  return {static_cast<const uint8_t*>(blocks.bases[index]), blocks.pitch, blocks.rows, blocks.k, blocks.packed != 0};
}

// The pairs with an expert (id >= 0) in the order of their experts; those of an expert in the order of the tokens.
struct Pairs {
  int64_t count;
  Buffer<int64_t> token, starts;  // [count]; [experts + 1]: where the pairs of each expert begin
  Buffer<float> weight;           // of the router

  explicit Pairs(const W4a8Moe& op)
      : token(op.tokens * op.per_token), starts(op.experts + 2), weight(op.tokens * op.per_token) {
    const int64_t all = op.tokens * op.per_token;
    std::memset(starts, 0, sizeof(int64_t) * static_cast<size_t>(op.experts + 2));
    for (int64_t i = 0; i < all; ++i)
      if (op.ids[i] >= 0) ++starts[op.ids[i] + 2];
    for (int64_t e = 2; e < op.experts + 2; ++e) starts[e] += starts[e - 1];
    for (int64_t i = 0; i < all; ++i)
      if (op.ids[i] >= 0) {
        const int64_t pair = starts[op.ids[i] + 1]++;  // moves from the expert's first pair to the next one's
        token[pair] = i / op.per_token;
        weight[pair] = op.weights[i];
      }
    count = starts[op.experts];
  }
};

// The experts' share of the output of `count` groups, of pairs from `begin` on: y fp32 [pairs, w2.rows].
inline void multiply_groups(const W4a8Moe& op, const Group* groups, int64_t count, const Pairs& pairs, const Codes& x,
                            float* y) {
  const int64_t begin = groups[0].begin, width = op.w13.rows, columns = op.w2.rows;
  const int64_t total = groups[count - 1].begin + groups[count - 1].count - begin;
  const Buffer<Group> local(count);  // pairs count from `begin` on
  for (int64_t g = 0; g < count; ++g) local[g] = {groups[g].expert, groups[g].begin - begin, groups[g].count};
  const Buffer<float> hidden(total * width);
  const GroupedTokens tokens(x, local, count, 2, [&](int64_t pair) { return pairs.token[begin + pair]; });
  for_each_group_task(local, count, block_of(op.w13, 0), [&](const Group& group, int64_t task, ProductScratch& own) {
    const Tokens some = tokens.of(group);
    const float* const scales = op.w13.scales + 2 * width * group.expert;
    const float limit = static_cast<float>(op.limit);
    const auto row = [&](int64_t token) GLM5_INLINED { return hidden + width * (group.begin + token); };
    multiply_task(some, block_of(op.w13, 2 * group.expert), task, nullptr, scales, own,
                  [&](int64_t token, int64_t column, int64_t n, F32x16 gate)
                      GLM5_INLINED { store_columns<Fp32>(row(token), column, n, gate); });
    multiply_task(some, block_of(op.w13, 2 * group.expert + 1), task, nullptr, scales + width, own,
                  [&](int64_t token, int64_t column, int64_t n, F32x16 up) GLM5_INLINED {
                    float* const target = row(token);
                    const F32x16 gate = load_columns<Fp32>(target, column, n);
                    store_columns<Fp32>(target, column, n, swiglu(gate, up, limit));
                  });
  });
  const Codes codes(total, width);
  quantize_rows({hidden, 0, width, kFp32}, width, nullptr, codes);
  const GroupedTokens rows(codes, local, count, 2, [](int64_t pair) { return pair; });
  for_each_group_task(local, count, block_of(op.w2, 0), [&](const Group& group, int64_t task, ProductScratch& own) {
    multiply_task(rows.of(group), block_of(op.w2, group.expert), task, nullptr, op.w2.scales + columns * group.expert,
                  own, [&](int64_t token, int64_t column, int64_t n, F32x16 sums) GLM5_INLINED {
                    store_columns<Fp32>(y + columns * (group.begin + token), column, n, sums);
                  });
  });
}

// out[token] += y * weight for the pairs begin .. end, in their order.
inline void add_outputs(const Pairs& pairs, int64_t begin, int64_t end, const float* y, int64_t columns, float* out) {
  constexpr int64_t kPart = 512;  // columns of a task
  parallel_for(ceil_div(columns, kPart), 1, [&](int64_t first, int64_t last, int) {
    const int64_t start = kPart * first, stop = min(kPart * last, columns);
    for (int64_t pair = begin; pair < end; ++pair) {
      const float* const source = y + columns * (pair - begin);
      float* const target = out + columns * pairs.token[pair];
      const float weight = pairs.weight[pair];
      for (int64_t column = start; column < stop; ++column) target[column] += source[column] * weight;
    }
  });
}

inline void w4a8_moe(const W4a8Moe& op) {
  if (op.tokens == 0) return;  // out may be null
  const Pairs pairs(op);
  const Codes x(op.tokens, op.w13.k);
  quantize_rows(op.x, op.w13.k, nullptr, x);
  std::memset(op.out, 0, sizeof(float) * static_cast<size_t>(op.tokens * op.w2.rows));
  const Buffer<Group> groups(min(op.experts, pairs.count) + pairs.count / kGroupTokens + 1);
  int64_t count = 0;
  for (int64_t e = 0; e < op.experts; ++e)
    for (int64_t pair = pairs.starts[e]; pair < pairs.starts[e + 1]; pair += kGroupTokens)
      groups[count++] = {e, pair, min(kGroupTokens, pairs.starts[e + 1] - pair)};
  const Buffer<float> y(min(pairs.count, kPairs + kGroupTokens) * op.w2.rows);
  for (int64_t first = 0, last; first < count; first = last) {
    const int64_t begin = groups[first].begin;
    for (last = first + 1; last < count && groups[last].begin - begin < kPairs;) ++last;
    multiply_groups(op, groups + first, last - first, pairs, x, y);
    add_outputs(pairs, begin, groups[last - 1].begin + groups[last - 1].count, y, op.w2.rows, op.out);
  }
}

}  // namespace glm5::GLM5_SET
