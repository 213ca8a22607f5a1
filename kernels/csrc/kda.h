// Kimi Delta Attention: the recurrence of the contract, token by token, for prompts as for single tokens.
//
//            V
//        +---+---+- -+
//        |   |   |   |    A task is a head of a sequence. Columns of a state are independent: 32 of them are taken
//     D  |   |   |   |    through up to sixteen tokens before the next 32, so that they stay in the first cache and
//        |   |   |   |    memory is read and written once.
//        +---+---+- -+
//
// A sum over key channels is added in their order, so a sequence has the same bits in every cut into steps.
#pragma once
#include <cmath>

#include "exponential.h"
#include "parallel.h"
#include "rows.h"

namespace glm5::GLM5_SET {

constexpr int64_t kKdaTokens = 16;
// A loop over the groups of sixteen columns, unrolled so that sums stay in registers.
#define GLM5_GROUPS(g) _Pragma("GCC unroll 2") for (int g = 0; g < kGroups; ++g)

// A head's next tokens: queries, keys and decays [tokens, D], values and outputs [tokens, V]. And a state that is in no
// slot: its columns in blocks [D, 32], the last one may be [D, 16].
struct KdaScratch {
  Arena arena;
  int64_t keys, values;
  float* q = arena.take<float>(kKdaTokens * keys);
  float* k = arena.take<float>(kKdaTokens * keys);
  float* decay = arena.take<float>(kKdaTokens * keys);
  float* reader = arena.take<float>(kKdaTokens * keys);  // decayed keys
  float* v = arena.take<float>(kKdaTokens * values);
  float* out = arena.take<float>(kKdaTokens * values);
  float* state = arena.take<float>(keys * values);
};

// x [dims] <- x / sqrt(sum(x^2) + 1e-6) * scale.
inline void kda_unit(float* x, int64_t dims, float scale) {
  F32x16 squares = F32x16::zero();
  for (int64_t i = 0; i < dims; i += kLanes) squares += F32x16::load(x + i) * F32x16::load(x + i);
  const F32x16 factor = F32x16::broadcast(scale / std::sqrt(sum_in_order(squares) + 1e-6f));
  for (int64_t i = 0; i < dims; i += kLanes) (F32x16::load(x + i) * factor).store(x + i);
}

// Rows t of the scratch <- token `token` of a head.
inline void load_kda_token(const Kda& op, int64_t token, int64_t head, int64_t t, const KdaScratch& mine) {
  float *const q = mine.q + t * op.keys, *const k = mine.k + t * op.keys;
  load_row(row_at(op.q, token, head), op.q.dtype, op.keys, q);
  load_row(row_at(op.k, token, head), op.k.dtype, op.keys, k);
  load_row(row_at(op.v, token, head), op.v.dtype, op.values, mine.v + t * op.values);
  kda_unit(q, op.keys, 1.0f / std::sqrt(static_cast<float>(op.keys)));
  kda_unit(k, op.keys, 1.0f);
  for (int64_t i = 0; i < op.keys; i += kLanes) {
    const F32x16 decay = exponential(Fp32::load(row_at(op.g, token, head), i));
    decay.store(mine.decay + t * op.keys + i);
    (decay * F32x16::load(k + i)).store(mine.reader + t * op.keys + i);
  }
}

// Some columns of a state, rows [16 * kGroups] of key channels.
struct KdaColumns {
  float* base;
  int64_t pitch;
};

// One token, for 16 * kGroups columns: target <- source, which may be one, with row t of the scratch. Meanwhile as many
// elements are prefetched from `ahead` on, if any.
template <int kGroups>
inline void kda_columns(const KdaScratch& mine, int64_t keys, int64_t t, float beta, const float* v, KdaColumns source,
                        KdaColumns target, const float* ahead, float* out_columns) {
  const float *const q = mine.q + t * keys, *const k = mine.k + t * keys, *const decay = mine.decay + t * keys,
                     *const reader = mine.reader + t * keys;
  const auto at = [](KdaColumns columns, int64_t row, int g)
                      GLM5_INLINED { return columns.base + row * columns.pitch + kLanes * g; };
  F32x16 change[kGroups], odd[kGroups], out[kGroups];
  GLM5_GROUPS(g) change[g] = odd[g] = out[g] = F32x16::zero();
  for (int64_t row = 0; row < keys; row += 2) {  // two sums, because one alone would wait for itself
    if (ahead) prefetch(ahead + kLanes * row, 128);
    const F32x16 even_key = F32x16::broadcast(reader[row]), odd_key = F32x16::broadcast(reader[row + 1]);
    GLM5_GROUPS(g) {
      change[g] = fma(even_key, F32x16::load(at(source, row, g)), change[g]);
      odd[g] = fma(odd_key, F32x16::load(at(source, row + 1, g)), odd[g]);
    }
  }
  GLM5_GROUPS(g)
  change[g] = F32x16::broadcast(beta) * (F32x16::load(v + kLanes * g) - (change[g] + odd[g]));
  for (int64_t row = 0; row < keys; ++row) {
    const F32x16 query = F32x16::broadcast(q[row]), key = F32x16::broadcast(k[row]),
                 kept = F32x16::broadcast(decay[row]);
    if (ahead) prefetch(ahead + kLanes * (keys + row), 64);
    GLM5_GROUPS(g) {
      const F32x16 learnt = fma(key, change[g], kept * F32x16::load(at(source, row, g)));
      learnt.store(at(target, row, g));
      out[g] = fma(query, learnt, out[g]);
    }
  }
  GLM5_GROUPS(g) out[g].store(out_columns + kLanes * g);
}

// Tokens first .. first + count of a head, whose rows are in the scratch: 16 * kGroups columns from `column` on.
// `slot`: of the state before them, negative: the thread's own.
template <int kGroups>
inline void kda_tokens(const Kda& op, int64_t first, int64_t count, int64_t head, int64_t slot, int64_t column,
                       const KdaScratch& mine) {
  const KdaColumns own{mine.state + column * op.keys, kLanes * kGroups};
  const auto columns_of = [&](int64_t state) {
    return state < 0 ? own
                     : KdaColumns{op.states + state * op.slot_pitch + head * op.keys * op.values + column, op.values};
  };
  for (int64_t t = 0; t < count; ++t) {
    const int64_t next = op.state_slots[first + t], offset = t * op.values + column;
    const KdaColumns source = columns_of(slot);
    // The next head follows in memory: at the first token all columns together prefetch it in its order.
    const float* const ahead = slot < 0 || t > 0 ? nullptr : source.base - column + op.keys * (op.values + column);
    kda_columns<kGroups>(mine, op.keys, t, op.beta[(first + t) * op.heads + head], mine.v + offset, source,
                         columns_of(next), ahead, mine.out + offset);
    slot = next;
  }
}

// The tokens of a sequence, for one head.
inline void kda_head(const Kda& op, int64_t sequence, int64_t head, const KdaScratch& mine) {
  int64_t slot = op.initial_slots[sequence];
  if (slot < 0) fill(mine.state, op.keys * op.values, 0.0f);
  const int64_t end = op.query_start_loc[sequence + 1];
  for (int64_t first = op.query_start_loc[sequence]; first < end; first += kKdaTokens) {
    const int64_t count = min(kKdaTokens, end - first);
    for (int64_t t = 0; t < count; ++t) load_kda_token(op, first + t, head, t, mine);
    int64_t column = 0;
    for (; column + 2 * kLanes <= op.values; column += 2 * kLanes)
      kda_tokens<2>(op, first, count, head, slot, column, mine);
    if (column < op.values) kda_tokens<1>(op, first, count, head, slot, column, mine);
    slot = op.state_slots[first + count - 1];
    for (int64_t t = 0; t < count; ++t)
      store_row(mine.out + t * op.values, op.out.dtype, op.values, row_at(op.out, first + t, head));
  }
}

inline void kda(const Kda& op) {
  const PerThread<KdaScratch> scratch(op.keys, op.values);
  const int64_t state_bytes = 8 * op.keys * op.values;  // read and written
  parallel_for(op.sequences * op.heads, kLeastBytes / state_bytes, [&](int64_t first, int64_t last, int thread) {
    for (int64_t task = first; task < last; ++task) kda_head(op, task / op.heads, task % op.heads, scratch[thread]);
  });
}

#undef GLM5_GROUPS

}  // namespace glm5::GLM5_SET
