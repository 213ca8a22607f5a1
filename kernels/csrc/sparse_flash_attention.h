// Sparse Flash Attention: operands, and what its two ways of computing share.
//
// A token's selected rows come in tiles. With the keys k_j = [ckv_j, kpe_j] of a tile, for every head with query q:
//
//     s_j = scale * q . k_j
//     m'  = max(m, max_j s_j),  p_j = exp(s_j - m')
//     l'  = l * exp(m - m') + sum_j p_j
//     o'  = o * exp(m - m') + sum_j p_j * ckv_j
//
// from m = -inf, l = 0, o = 0 on; after the last tile out = o / l and lse = m + log(l).
#pragma once
#include <math.h>

#include "exponential.h"
#include "panel.h"
#include "parallel.h"
#include "rows.h"
#include "simd/amx.h"

namespace glm5::GLM5_SET {

// Latents that share a scale in a packed row: int8 [rank], bf16 [rope], fp32 [rank / 128].
constexpr int64_t kPerScale = 128;

using Attention = SparseFlashAttention;

inline bool packed(const Attention& op) { return op.ckv_cache.dtype == kInt8; }
inline bool bf16_queries(const Attention& op) { return op.ql_nope.dtype == kBf16 && op.q_pe.dtype == kBf16; }

// Some neighbouring heads of a token.
struct AttentionTask {
  int64_t token, first_head, heads;
};

// Divides the heads so that few tokens have a task for each thread, each of whole units but the last.
struct HeadGroups {
  int64_t heads, per_token;

  HeadGroups(const Attention& op, int64_t unit) {
    const int64_t groups = max(1, min(ceil_div(max_threads(), op.tokens), op.heads / unit));
    heads = ceil_div(op.heads, groups * unit) * unit;
    per_token = ceil_div(op.heads, heads);
  }
  AttentionTask task(const Attention& op, int64_t index) const {
    const int64_t first = index % per_token * heads;
    return {index / per_token, first, min(heads, op.heads - first)};
  }
};

// The addresses of a token's selected rows, and the sums of its heads so far.
struct AttentionSums {
  Arena arena;
  const Attention& op;
  int64_t heads, pitch;                             // heads with padding; of a row of mixed
  float* mixed = arena.take<float>(heads * pitch);  // [heads, pitch], the weighted sum of values
  float* peak = arena.take<float>(heads);           // [heads], of the softmax
  float* total = arena.take<float>(heads);
  float* factor = arena.take<float>(heads);
  const char** ckv = arena.take<const char*>(op.topk + kPanelColumns);
  const char** kpe = arena.take<const char*>(op.topk + kPanelColumns);

  void clear() const {
    fill(peak, heads, -kInfinity);
    fill(total, heads, 0.0f);
  }
};

// sums.ckv and kpe <- the addresses of a token's selected rows; their number. The last one is repeated up to a multiple
// of kPanelColumns: padding must be a row that was written.
inline int64_t select_rows(const Attention& op, int64_t token, const AttentionSums& sums) {
  const int32_t *indices = op.topk_indices + token * op.topk,
                *blocks = op.block_table + op.request[token] * op.max_blocks;
  const int64_t visible = op.visible[token], entries = min(op.topk, visible);
  int64_t count = 0;
  for (int64_t column = 0; column < entries; ++column) {
    const int64_t position = indices[column];
    if (position < 0) break;  // the first negative entry ends the list
    const int64_t index = position / op.block_size;
    if (position >= visible || index >= op.max_blocks || blocks[index] < 0) continue;
    sums.ckv[count] = row_at(op.ckv_cache, blocks[index], position - index * op.block_size);
    sums.kpe[count++] = row_at(op.kpe_cache, blocks[index], position - index * op.block_size);
  }
  for (int64_t key = count; count && key < round_up(count, kPanelColumns); ++key) {
    sums.ckv[key] = sums.ckv[count - 1];
    sums.kpe[key] = sums.kpe[count - 1];
  }
  return count;
}

// Prefetches the selected rows start..stop.
inline void prefetch_rows(const Attention& op, int64_t start, int64_t stop, const AttentionSums& sums) {
  const int64_t size = element_bytes(op.ckv_cache.dtype);
  for (int64_t key = start; key < stop; ++key) {
    prefetch(sums.ckv[key], op.rank * size);
    prefetch(sums.kpe[key], op.rope * (packed(op) ? 2 : size));
  }
}

// out <- bf16(int8 * scale), as fp32 or bf16: the latents of a packed row whose rotated part begins at `kpe`.
template <class Element>
inline void unpack_latents(const Attention& op, const char* ckv, const char* kpe, void* out) {
  const char* const scales = kpe + 2 * op.rope;  // any alignment
  for (int64_t run = 0; run < op.rank / kPerScale; ++run) {
    float scale;
    std::memcpy(&scale, scales + 4 * run, sizeof scale);
    for (int64_t i = run * kPerScale; i < (run + 1) * kPerScale; i += kLanes)
      Element::store(out, i, rounded_to_bf16(Int8::load(ckv, i) * F32x16::broadcast(scale)));
  }
}

// Normalises and stores the sums of a task that read `count` rows, and the logarithms.
inline void store_sums(const Attention& op, const AttentionTask& task, int64_t count, const AttentionSums& sums) {
  for (int64_t head = 0; head < task.heads; ++head) {
    float* const row = sums.mixed + head * sums.pitch;
    const F32x16 total = F32x16::broadcast(sums.total[head]);
    for (int64_t i = 0; i < op.rank; i += kLanes)
      (count ? F32x16::load(row + i) / total : F32x16::zero()).store(row + i);
    store_row(row, op.out.dtype, op.rank, row_at(op.out, task.token, task.first_head + head));
    op.lse[task.token * op.heads + task.first_head + head] =
        count ? sums.peak[head] + logf(sums.total[head]) : kInfinity;
  }
}

// A Tile, one for each thread, is the memory of one way of computing: add_tile adds up to
// Tile::kKeys of the selected rows, those from `start` on.
template <class Tile>
void attend(const Attention& op) {
  const HeadGroups groups(op, Tile::kUnit);
  const PerThread<Tile> tiles(op, groups.heads);
  parallel_for(op.tokens * groups.per_token, 1, [&](int64_t first, int64_t last, int thread) {
    const Tile tile = tiles[thread];
    [[maybe_unused]] const Tiles registers;
    for (int64_t index = first; index < last; ++index) {
      const AttentionTask task = groups.task(op, index);
      const int64_t count = select_rows(op, task.token, tile);
      load_query(op, task, tile);
      tile.clear();
      for (int64_t start = 0; start < count; start += Tile::kKeys) add_tile(op, start, count, tile);
      store_sums(op, task, count, tile);
    }
  });
}

}  // namespace glm5::GLM5_SET
