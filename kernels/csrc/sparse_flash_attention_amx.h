// Sparse Flash Attention by AMX: tiles of 128 keys, scores and softmax with heads in columns.
//
//     scores [keys, heads]  = keys [keys, dims] x query [dims, heads]
//     probabilities         : columns of scores, as pairs of bf16 of two keys, transposed to rows of heads
//     mixed [heads, rank]  += probabilities [heads, keys] x values [keys, rank]
//
// Probabilities that are not rounded are the sums of two bf16. The next tile's rows are not prefetched: on Sapphire
// Rapids that took a tenth longer, in decode and prefill.
#pragma once
#include "sparse_flash_attention_vectors.h"

namespace glm5::GLM5_SET {
#if defined(__AMX_BF16__)

// bf16 queries of more than a few heads, in whole sides.
inline bool attends_by_amx(const Attention& op) {
  const bool keys = op.ckv_cache.dtype == kBf16 || packed(op);
  return bf16_queries(op) && keys && op.heads > kFewRows && op.rank % kSide == 0 && op.rope % kSide == 0;
}

// Memory of a thread; H heads in whole sides, R = rank, D = rank + rope. Rows of pairs and mixed are longer than
// needed: a power of two apart they would share sets of a cache.
struct AmxTile : AttentionSums {
  static constexpr int64_t kUnit = kSide;  // heads of a task
  static constexpr int64_t kKeys = 128;    // the more, the fewer times sums are loaded and stored; all fits an L2 cache

  int64_t dims = op.rank + op.rope;
  float* query = arena.take<float>(heads * dims / 2);   // [H / 16, D / 2, 16] pairs
  uint16_t* keys = arena.take<uint16_t>(kKeys * dims);  // [kKeys, D]
  float* pairs = arena.take<float>(kKeys / 2 * pitch);  // [kKeys / 2, R + 16], the columns of two keys
  float* scores =
      arena.take<float>(kKeys * heads);             // [kKeys, H], then probabilities as pairs, their errors in odd rows
  float* probs = arena.take<float>(kKeys * heads);  // [H, 2, kKeys / 2] pairs, the same transposed
  uint16_t* unpacked = arena.take<uint16_t>(2 * op.rank);  // [2, R], of two packed rows

  AmxTile(Arena arena, const Attention& op, int64_t task_heads)
      : AttentionSums{arena, op, round_up(task_heads, kSide), op.rank + kLanes} {}
};

// tile.query <- both parts of the query, transposed; the last head is repeated up to whole sides.
inline void load_query(const Attention& op, const AttentionTask& task, const AmxTile& tile) {
  for (int64_t first = 0; first < tile.heads; first += kTile)
    for (const bool latent : {true, false}) {
      const char* rows[kTile];
      for (int lane = 0; lane < kTile; ++lane)
        rows[lane] =
            row_at(latent ? op.ql_nope : op.q_pe, task.token, task.first_head + min(first + lane, task.heads - 1));
      float* const target = tile.query + (first * tile.dims + (latent ? 0 : op.rank * kTile)) / 2;
      transpose_rows(rows, 0, (latent ? op.rank : op.rope) / 2, kFp32, target, kTile);
    }
}

// Copies two rows of bf16 [dims] to `even` and `odd`; pairs [dims] <- their columns interleaved. dims % 32 == 0.
inline void copy_and_pair(const void* first, const void* second, int64_t dims, uint16_t* even, uint16_t* odd,
                          float* pairs) {
  uint16_t order[64];
  for (int i = 0; i < 64; ++i) order[i] = static_cast<uint16_t>(i / 2 + 32 * (i % 2));
  const __m512i low = _mm512_loadu_si512(order), high = _mm512_loadu_si512(order + 32);
  for (int64_t i = 0; i < dims; i += 32) {
    const __m512i a = _mm512_loadu_si512(static_cast<const uint16_t*>(first) + i);
    const __m512i b = _mm512_loadu_si512(static_cast<const uint16_t*>(second) + i);
    _mm512_storeu_si512(even + i, a);
    _mm512_storeu_si512(odd + i, b);
    _mm512_storeu_si512(pairs + i, _mm512_permutex2var_epi16(a, low, b));
    _mm512_storeu_si512(pairs + i + kLanes, _mm512_permutex2var_epi16(a, high, b));
  }
}

// tile.keys and tile.pairs <- the selected rows from `start` on; the last one is repeated up to `whole` keys.
inline void gather(const Attention& op, int64_t start, int64_t keys, int64_t whole, const AmxTile& tile) {
  for (int64_t key = 0; key < whole; key += 2) {
    uint16_t* const target = tile.keys + key * tile.dims;
    const void* rows[2];
    for (int i = 0; i < 2; ++i) {
      const int64_t row = start + min(key + i, keys - 1);
      rows[i] = tile.ckv[row];
      if (packed(op)) {
        unpack_latents<Bf16>(op, tile.ckv[row], tile.kpe[row], tile.unpacked + i * op.rank);
        rows[i] = tile.unpacked + i * op.rank;
      }
      for (int64_t c = 0; c < op.rope; c += kSide)
        _mm512_storeu_si512(target + i * tile.dims + op.rank + c, _mm512_loadu_si512(tile.kpe[row] + 2 * c));
    }
    copy_and_pair(rows[0], rows[1], op.rank, target, target + tile.dims, tile.pairs + key / 2 * tile.pitch);
  }
}

inline const char* bytes_of(const void* p) { return static_cast<const char*>(p); }

// tile.scores <- query . key, not scaled.
inline void score_tile(int64_t whole, const AmxTile& tile) {
  for (int64_t key = 0; key < whole; key += kSide)
    for (int64_t head = 0; head < tile.heads; head += kSide) {
      const uint16_t* const keys = tile.keys + key * tile.dims;
      const float* const query = tile.query + head * tile.dims / 2;
      multiply_tiles({{bytes_of(keys), bytes_of(keys + kTile * tile.dims)}, {2 * tile.dims, 2 * tile.dims}},
                     {{bytes_of(query), bytes_of(query + kTile * tile.dims / 2)}, 4 * kTile}, tile.dims / kSide, true,
                     tile.scores + key * tile.heads + head, 4 * tile.heads);
    }
}

// Two fp32 as a pair of bf16 in each lane; denormal numbers become 0.
GLM5_INLINE F32x16 rounded_pair(F32x16 even, F32x16 odd) {
  const auto halves = [](F32x16 x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x.v[0])); };
  return {{(Floats)_mm512_or_si512(halves(even), _mm512_slli_epi32(halves(odd), 16))}};
}

// Sixteen columns of scores [whole, pitch], of which `keys` rows count -> unnormalised probabilities. Row 2 i gets
// those of rows 2 i and 2 i + 1 as pairs; with two terms row 2 i + 1 gets their rounding errors. Peak, total and factor
// [16].
inline void softmax_columns(float* scores, int64_t pitch, int64_t keys, int64_t whole, float scale, int terms,
                            float* peak, float* total, float* factor) {
  const F32x16 before = F32x16::load(peak);
  F32x16 highest = before, added = F32x16::zero();
  for (int64_t key = 0; key < keys; ++key) {
    const F32x16 x = F32x16::load(scores + key * pitch) * F32x16::broadcast(scale);
    x.store(scores + key * pitch);
    highest = larger(highest, x);
  }
  for (int64_t key = keys; key < whole; ++key)  // no weight
    F32x16::broadcast(-kInfinity).store(scores + key * pitch);
  for (int64_t key = 0; key < whole; key += 2) {
    float *const even = scores + key * pitch, *const odd = even + pitch;
    const F32x16 p = softmax_exp(F32x16::load(even) - highest), q = softmax_exp(F32x16::load(odd) - highest);
    added = added + p + q;
    const F32x16 rounded = rounded_pair(p, q);
    rounded.store(even);
    if (terms == 2) rounded_pair(p - even_bf16(rounded), q - odd_bf16(rounded)).store(odd);
  }
  const F32x16 shrunk = softmax_exp(before - highest);
  (F32x16::load(total) * shrunk + added).store(total);
  highest.store(peak);
  shrunk.store(factor);
}

// tile.probs <- unnormalised probabilities; updates peak, total and factor.
inline void softmax_tile(const Attention& op, int64_t keys, int64_t whole, int terms, const AmxTile& tile) {
  for (int64_t head = 0; head < tile.heads; head += kTile) {
    float* const scores = tile.scores + head;
    softmax_columns(scores, tile.heads, keys, whole, static_cast<float>(op.scale), terms, tile.peak + head,
                    tile.total + head, tile.factor + head);
    for (int term = 0; term < terms; ++term)
      for (int64_t pair = 0; pair < whole / 2; pair += kLanes) {
        F32x16 x[kLanes];
        for (int i = 0; i < kLanes; ++i) x[i] = F32x16::load(scores + (2 * (pair + i) + term) * tile.heads);
        transpose(x);
        for (int i = 0; i < kLanes; ++i) x[i].store(tile.probs + (2 * (head + i) + term) * (AmxTile::kKeys / 2) + pair);
      }
  }
}

// tile.mixed += probabilities times values, after the earlier sum is rescaled to the new maximum.
inline void add_values(const Attention& op, int64_t whole, int terms, bool fresh, const AmxTile& tile) {
  for (int64_t head = 0; head < tile.heads && !fresh; ++head) {
    float* const row = tile.mixed + head * tile.pitch;
    if (tile.factor[head] != 1.0f)
      for (int64_t i = 0; i < op.rank; i += kLanes)
        (F32x16::load(row + i) * F32x16::broadcast(tile.factor[head])).store(row + i);
  }
  constexpr int64_t kHead = 4 * AmxTile::kKeys;  // bytes of a head's probabilities
  for (int64_t head = 0; head < tile.heads; head += kSide)
    for (int64_t column = 0; column < op.rank; column += kSide) {
      const char* const probs = bytes_of(tile.probs) + kHead * head;
      const float* const pairs = tile.pairs + column;
      multiply_tiles({{probs, probs + kTile * kHead}, {kHead, kHead}, terms, kHead / 2},
                     {{bytes_of(pairs), bytes_of(pairs + kTile)}, 4 * tile.pitch}, whole / kSide, fresh,
                     tile.mixed + head * tile.pitch + column, 4 * tile.pitch);
    }
}

inline void add_tile(const Attention& op, int64_t start, int64_t count, const AmxTile& tile) {
  const int64_t keys = min(AmxTile::kKeys, count - start), whole = round_up(keys, kSide);
  const int terms = op.round_probs ? 1 : 2;
  gather(op, start, keys, whole, tile);
  score_tile(whole, tile);
  softmax_tile(op, keys, whole, terms, tile);
  add_values(op, whole, terms, start == 0, tile);
}

#endif

inline void sparse_flash_attention(const Attention& op) {
  if (!op.tokens || !op.heads) return;
#if defined(__AMX_BF16__)
  if (attends_by_amx(op)) return attend<AmxTile>(op);
#endif
  attend<VectorTile>(op);
}

}  // namespace glm5::GLM5_SET
