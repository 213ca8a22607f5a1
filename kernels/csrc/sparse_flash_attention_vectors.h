// Sparse Flash Attention by vectors: tiles of 64 keys.
#pragma once
#include "sparse_flash_attention.h"

namespace glm5::GLM5_SET {

// Columns that the products take as words of 32 bits: fp32, or two neighbouring bf16.
struct TileLayout {
  bool pairs, value_pairs;  // value_pairs: P V multiplies bf16, which is only where P is rounded
  int64_t latent_words, words;

  explicit TileLayout(const Attention& op)
      : pairs(kBf16Pairs && bf16_queries(op) && op.ckv_cache.dtype == kBf16 && op.rank % (2 * kLanes) == 0 &&
              op.rope % (2 * kLanes) == 0),
        value_pairs(pairs && op.round_probs),
        latent_words(op.rank / (pairs ? 2 : 1)),
        words((op.rank + op.rope) / (pairs ? 2 : 1)) {}
};

// Memory of a thread.
struct VectorTile : AttentionSums {
  static constexpr int64_t kUnit = kPanelRows;  // heads of a task
  static constexpr int64_t kKeys = 64;          // of a tile
  // Words of the queries that multiply a tile at a time: with kPanelColumns keys 16 KiB.
  static constexpr int64_t kDepth = 128;

  TileLayout layout{op};
  float* query = arena.take<float>(heads * layout.words);                // [heads, words]
  float* keys = arena.take<float>(kDepth * kPanelColumns);               // [kDepth, kPanelColumns], transposed
  float* values = arena.take<float>(kKeys * kPanelColumns);              // [kKeys, kPanelColumns], some columns
  float* scores = arena.take<float>(heads * kKeys);                      // [heads, kKeys]
  float* latents = arena.take<float>(packed(op) ? kKeys * op.rank : 0);  // [kKeys, rank], unpacked
  float* rotated = arena.take<float>(packed(op) ? kKeys * op.rope : 0);  // [kKeys, rope]
  const char** latent_rows = arena.take<const char*>(kKeys);             // [kKeys], their addresses
  const char** rotated_rows = arena.take<const char*>(kKeys);

  VectorTile(Arena arena, const Attention& op, int64_t task_heads)
      : AttentionSums{arena, op, round_up(task_heads, kFewRows), op.rank} {}
};

// tile.query <- both parts of every head's query; zeros after the last head.
inline void load_query(const Attention& op, const AttentionTask& task, const VectorTile& tile) {
  const TileLayout& layout = tile.layout;
  const int64_t nope_dtype = layout.pairs ? kFp32 : op.ql_nope.dtype, pe_dtype = layout.pairs ? kFp32 : op.q_pe.dtype;
  for (int64_t head = 0; head < task.heads; ++head) {
    float* const row = tile.query + head * layout.words;
    load_row(row_at(op.ql_nope, task.token, task.first_head + head), nope_dtype, layout.latent_words, row);
    load_row(row_at(op.q_pe, task.token, task.first_head + head), pe_dtype, layout.words - layout.latent_words,
             row + layout.latent_words);
  }
  fill(tile.query + task.heads * layout.words, (tile.heads - task.heads) * layout.words, 0.0f);
}

// tile.latents and rotated <- packed rows start .. start + keys as fp32.
inline void unpack_rows(const Attention& op, int64_t start, int64_t keys, const VectorTile& tile) {
  for (int64_t key = 0; key < keys; ++key) {
    float *const latents = tile.latents + key * op.rank, *const rotated = tile.rotated + key * op.rope;
    unpack_latents<Fp32>(op, tile.ckv[start + key], tile.kpe[start + key], latents);
    load_row(tile.kpe[start + key], kBf16, op.rope, rotated);
    tile.latent_rows[key] = reinterpret_cast<const char*>(latents);
    tile.rotated_rows[key] = reinterpret_cast<const char*>(rotated);
  }
}

inline void multiply_panel(bool pairs, const float* panel, const float* left, int64_t left_pitch, int64_t rows,
                           int64_t depth, float* out, int64_t out_pitch) {
  if (kBf16Pairs && pairs)
    add_panel<Bf16Pairs>(panel, left, left_pitch, rows, depth, out, out_pitch);
  else
    add_panel<Fp32Terms>(panel, left, left_pitch, rows, depth, out, out_pitch);
}

// tile.scores[:, :keys] <- query . key, not scaled, of whole steps of rows. kPanelColumns keys and kDepth words at a
// time: transposed, they stay in the L1 cache for all heads. The columns of a key are added in order.
inline void score_tile(const Attention& op, const char* const* ckv, const char* const* kpe, int64_t keys,
                       const VectorTile& tile) {
  const TileLayout& layout = tile.layout;
  const int64_t dtype = layout.pairs || packed(op) ? kFp32 : op.ckv_cache.dtype, size = dtype == kFp32 ? 4 : 2;
  fill(tile.scores, tile.heads * VectorTile::kKeys, 0.0f);
  for (int64_t key = 0; key < keys; key += kPanelColumns)
    for (int64_t word = 0, depth; word < layout.words; word += depth) {
      const bool latent = word < layout.latent_words;
      const int64_t first = latent ? word : word - layout.latent_words;
      depth = min(VectorTile::kDepth, (latent ? layout.latent_words : layout.words) - word);
      for (int64_t lane = 0; lane < kPanelColumns; lane += kLanes)
        transpose_rows((latent ? ckv : kpe) + key + lane, size * first, depth, dtype, tile.keys + lane, kPanelColumns);
      multiply_panel(layout.pairs, tile.keys, tile.query + word, layout.words, tile.heads, depth, tile.scores + key,
                     VectorTile::kKeys);
    }
}

// row [keys] <- exp(scale * row - peak), rounded to bf16 if `round`, and their sum, whole vectors; peak <- the larger
// of it and the largest scaled score. A NaN may or may not count for the peak, but makes the sum one.
inline float exponentiate_row(float* row, int64_t keys, float scale, bool round, float& peak) {
  F32x16 highest = F32x16::broadcast(-kInfinity);
  for (int64_t i = 0; i < keys; i += kLanes) {
    const F32x16 x = F32x16::load(row + i) * F32x16::broadcast(scale);
    x.store(row + i);
    highest = larger(highest, x);
  }
  const float largest = largest_lane(highest);
  if (largest > peak) peak = largest;
  F32x16 sum = F32x16::zero();
  for (int64_t i = 0; i < keys; i += kLanes) {
    const F32x16 p = softmax_exp(F32x16::load(row + i) - F32x16::broadcast(peak));
    sum += p;
    (round ? rounded_to_bf16(p) : p).store(row + i);
  }
  float total;
  sum_each<1>(&sum, &total);
  return total;
}

// Each two neighbours of a row of bf16 numbers in fp32 as one pair, from the row's start on; keys a multiple of 32.
inline void pair_row(float* row, int64_t keys) {
  for (int64_t i = 0; i < keys; i += 2 * kLanes) {
    uint16_t halves[2 * kLanes];
    store_bf16(halves, F32x16::load(row + i));
    store_bf16(halves + kLanes, F32x16::load(row + i + kLanes));
    std::memcpy(row + i / 2, halves, sizeof halves);
  }
}

// tile.scores <- unnormalised probabilities of `keys` rows, 0 up to `whole`; the earlier sums are rescaled to the new
// maximum.
inline void softmax_tile(const Attention& op, int64_t keys, int64_t whole, const VectorTile& tile) {
  for (int64_t head = 0; head < tile.heads; ++head) {
    float *const row = tile.scores + head * VectorTile::kKeys, *const mixed = tile.mixed + head * tile.pitch;
    fill(row + keys, whole - keys, -kInfinity);
    const float before = tile.peak[head];
    const float added = exponentiate_row(row, whole, static_cast<float>(op.scale), op.round_probs, tile.peak[head]);
    const float factor = expf(before - tile.peak[head]);
    tile.total[head] = tile.total[head] * factor + added;
    if (factor != 1.0f)
      for (int64_t i = 0; i < op.rank; i += kLanes)
        (F32x16::load(mixed + i) * F32x16::broadcast(factor)).store(mixed + i);
    if (tile.layout.value_pairs) pair_row(row, whole);
  }
}

// tile.mixed += probabilities times values, kPanelColumns columns of the rows at a time, which fit the L1 cache.
inline void add_values(const Attention& op, const char* const* ckv, int64_t keys, const VectorTile& tile) {
  const bool fp32 = packed(op) || op.ckv_cache.dtype == kFp32, pairs = tile.layout.value_pairs;
  for (int64_t column = 0; column < op.rank; column += kPanelColumns) {
    if (pairs)
      for (int64_t key = 0; key < keys; key += 2)
        for (int64_t i = 0; i < kPanelColumns; i += kLanes)
          paired_bf16(Bf16::load(ckv[key], column + i), Bf16::load(ckv[key + 1], column + i))
              .store(tile.values + key / 2 * kPanelColumns + i);
    else
      for (int64_t key = 0; key < keys; ++key)
        for (int64_t i = 0; i < kPanelColumns; i += kLanes)
          (fp32 ? Fp32::load(ckv[key], column + i) : Bf16::load(ckv[key], column + i))
              .store(tile.values + key * kPanelColumns + i);
    multiply_panel(pairs, tile.values, tile.scores, VectorTile::kKeys, tile.heads, pairs ? keys / 2 : keys,
                   tile.mixed + column, tile.pitch);
  }
}

inline void add_tile(const Attention& op, int64_t start, int64_t count, const VectorTile& tile) {
  const int64_t keys = min(VectorTile::kKeys, count - start), whole = round_up(keys, kPanelColumns);
  const char **ckv = tile.ckv + start, **kpe = tile.kpe + start;
  prefetch_rows(op, start + keys, min(start + 2 * VectorTile::kKeys, count), tile);
  if (start == 0) fill(tile.mixed, tile.heads * tile.pitch, 0.0f);
  if (packed(op)) {
    unpack_rows(op, start, whole, tile);
    ckv = tile.latent_rows;
    kpe = tile.rotated_rows;
  }
  score_tile(op, ckv, kpe, whole, tile);
  softmax_tile(op, keys, whole, tile);
  add_values(op, ckv, whole, tile);
}

}  // namespace glm5::GLM5_SET
