// Routed experts: pairs of a token and one of its experts, sorted by expert, some pairs at a time.
//
//     x -> codes                       a row for each token, once
//     hidden = silu(gate) * up         fp32 [pairs, width]: both products of a task's rows
//     hidden -> codes                  a row for each pair
//     y = codes times w2               fp32 [pairs, hidden size]
//     out[token] += y * weight         in the order of the experts
#pragma once
#include "int8_products.h"
#include "silu.h"

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

  Pairs(const int64_t* ids, const float* weights, int64_t tokens, int64_t per_token, int64_t experts)
      : token(tokens * per_token), starts(experts + 2), weight(tokens * per_token) {
    const int64_t all = tokens * per_token;
    std::memset(starts, 0, sizeof(int64_t) * static_cast<size_t>(experts + 2));
    for (int64_t i = 0; i < all; ++i)
      if (ids[i] >= 0) ++starts[ids[i] + 2];
    for (int64_t e = 2; e < experts + 2; ++e) starts[e] += starts[e - 1];
    for (int64_t i = 0; i < all; ++i)
      if (ids[i] >= 0) {
        const int64_t pair = starts[ids[i] + 1]++;  // moves from the expert's first pair to the next one's
        token[pair] = i / per_token;
        weight[pair] = weights[i];
      }
    count = starts[experts];
  }
};

// Pairs begin .. begin + count of one expert, at most kGroupTokens.
struct Group {
  int64_t expert, begin, count;
};

// The rows of codes of some groups of pairs, and packed for AMX those of groups that are multiplied by it.
class GroupedTokens {
 public:
  GroupedTokens(int64_t pairs, int64_t pitch)
      : pitch_(pitch),
        rows_(pairs),
        sums_(pairs),
        scales_(pairs),
        tiles_(kVectorTokens < kGroupTokens ? 2 * pairs * pitch : 0) {}

  // Pair `pair` has row `row` of codes.
  void set(int64_t pair, const Codes& codes, int64_t row) {
    rows_[pair] = codes.row(row);
    sums_[pair] = codes.sums[row];
    scales_[pair] = codes.scales[row];
  }

  void pack(const Group* groups, int64_t count) {
    parallel_for(count, 1, [&](int64_t first, int64_t last, int) {
      for (int64_t g = first; g < last; ++g)
        if (groups[g].count > kVectorTokens)
          for (int64_t t = 0; t < groups[g].count; t += kTile)
            pack_tokens(rows_ + groups[g].begin + t, min(kTile, groups[g].count - t), pitch_, tiles(groups[g], t));
    });
  }

  Tokens of(const Group& group) const {
    const bool by_tiles = group.count > kVectorTokens;
    return {group.count, rows_ + group.begin, sums_ + group.begin, scales_ + group.begin,
            by_tiles ? tiles(group, 0) : nullptr};
  }

 private:
  // More than eight pairs are at most twice as many when they are rounded up to sixteen.
  int8_t* tiles(const Group& group, int64_t token) const { return tiles_ + pitch_ * (2 * group.begin + token); }

  int64_t pitch_;
  Buffer<const int8_t*> rows_;
  Buffer<int32_t> sums_;
  Buffer<float> scales_;
  Buffer<int8_t> tiles_;
};

// work(group, task, scratch) for every task of every group.
template <class Work>
void for_each_group_task(const Group* groups, int64_t count, const Block& block, const Buffer<ProductScratch>& scratch,
                         const Work& work) {
  const int64_t tasks = tasks_of(block);
  parallel_for(count * tasks, kLeastBytes / max(kTaskRows * block.k, 1), [&](int64_t first, int64_t last, int thread) {
    [[maybe_unused]] const Tiles registers;
    for (int64_t task = first; task < last; ++task) work(groups[task / tasks], task % tasks, scratch[thread]);
  });
}

// The experts' share of the output of `count` groups, of pairs from `begin` on: y fp32 [pairs, w2.rows].
inline void multiply_groups(const Group* groups, int64_t count, const Pairs& pairs, const Codes& x,
                            const ExpertBlocks& w13, const ExpertBlocks& w2, const Buffer<ProductScratch>& scratch,
                            float* y) {
  const int64_t begin = groups[0].begin, width = w13.rows, columns = w2.rows;
  const int64_t total = groups[count - 1].begin + groups[count - 1].count - begin;
  const Buffer<Group> local(count);  // pairs count from `begin` on
  for (int64_t g = 0; g < count; ++g) local[g] = {groups[g].expert, groups[g].begin - begin, groups[g].count};
  const Buffer<float> hidden(total * width);
  GroupedTokens tokens(total, x.pitch);
  for (int64_t pair = 0; pair < total; ++pair) tokens.set(pair, x, pairs.token[begin + pair]);
  tokens.pack(local, count);
  for_each_group_task(
      local, count, block_of(w13, 0), scratch, [&](const Group& group, int64_t task, ProductScratch& own) {
        const Tokens some = tokens.of(group);
        const float* const scales = w13.scales + 2 * width * group.expert;
        const float limit = static_cast<float>(w13.limit);
        const auto row = [&](int64_t token) GLM5_INLINED { return hidden + width * (group.begin + token); };
        multiply_task(some, block_of(w13, 2 * group.expert), task, nullptr, scales, own,
                      [&](int64_t token, int64_t column, int64_t n, F32x16 gate)
                          GLM5_INLINED { store_columns<Fp32>(row(token), column, n, gate); });
        multiply_task(some, block_of(w13, 2 * group.expert + 1), task, nullptr, scales + width, own,
                      [&](int64_t token, int64_t column, int64_t n, F32x16 up) GLM5_INLINED {
                        float* const target = row(token);
                        const F32x16 gate = load_columns<Fp32>(target, column, n);
                        store_columns<Fp32>(target, column, n, swiglu(gate, up, limit));
                      });
      });
  const Codes codes(total, width);
  quantize_rows<Fp32>(hidden, width, width, nullptr, codes);
  GroupedTokens rows(total, codes.pitch);
  for (int64_t pair = 0; pair < total; ++pair) rows.set(pair, codes, pair);
  rows.pack(local, count);
  for_each_group_task(
      local, count, block_of(w2, 0), scratch, [&](const Group& group, int64_t task, ProductScratch& own) {
        multiply_task(rows.of(group), block_of(w2, group.expert), task, nullptr, w2.scales + columns * group.expert,
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

// out fp32 [x.tokens, w2.rows] <- the experts' share of every token.
inline void all_experts(const Codes& x, const Pairs& pairs, int64_t experts, const ExpertBlocks& w13,
                        const ExpertBlocks& w2, float* out) {
  std::memset(out, 0, sizeof(float) * static_cast<size_t>(x.tokens * w2.rows));
  const Buffer<Group> groups(min(experts, pairs.count) + pairs.count / kGroupTokens + 1);
  int64_t count = 0;
  for (int64_t e = 0; e < experts; ++e)
    for (int64_t pair = pairs.starts[e]; pair < pairs.starts[e + 1]; pair += kGroupTokens)
      groups[count++] = {e, pair, min(kGroupTokens, pairs.starts[e + 1] - pair)};
  const Buffer<float> y(min(pairs.count, kPairs + kGroupTokens) * w2.rows);
  const Buffer<ProductScratch> scratch(max_threads());
  for (int64_t first = 0, last; first < count; first = last) {
    const int64_t begin = groups[first].begin;
    for (last = first + 1; last < count && groups[last].begin - begin < kPairs;) ++last;
    multiply_groups(groups + first, last - first, pairs, x, w13, w2, scratch, y);
    add_outputs(pairs, begin, groups[last - 1].begin + groups[last - 1].count, y, w2.rows, out);
  }
}

inline void w4a8_moe(const void* x, int64_t x_pitch, int64_t dtype, int64_t tokens, const int64_t* ids,
                     const float* weights, int64_t per_token, int64_t experts, const ExpertBlocks& w13,
                     const ExpertBlocks& w2, float* out) {
  if (tokens == 0) return;  // out may be null
  const Pairs pairs(ids, weights, tokens, per_token, experts);
  const Codes codes(tokens, w13.k);
  with_floats(dtype, [&](auto element) { quantize_rows<decltype(element)>(x, x_pitch, w13.k, nullptr, codes); });
  all_experts(codes, pairs, experts, w13, w2, out);
}

}  // namespace glm5::GLM5_SET
