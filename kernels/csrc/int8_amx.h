// Exact integer products of many tokens by AMX: 32 weight rows times 32 tokens in four tiles of sums.
//
// The left side are weight rows as they lie in memory, in a panel [32, kColumns] that stays in the nearest cache (INT4
// unpacked). The right side are tokens, packed in groups of 16 once for all weight rows:
//
//     group of 16 tokens: [k / 64] tiles of [16][16 tokens][4 columns], i.e. row r of a tile has columns 4r .. 4r + 3
//     sums              : [32 weight rows][tokens], transposed when they are scaled back
#pragma once
#include "quantize.h"
#include "simd/amx.h"

#if defined(__AMX_INT8__)
namespace glm5::GLM5_SET {

constexpr int64_t kColumns = 256;  // of a panel
// Bytes from row to row of a panel, and elements of sums: rows a power of two apart would share cache sets.
constexpr int64_t kPanelPitch = kColumns + kTileBytes, kSumsPitch = kGroupTokens + kTile;

// Scratch of a thread.
struct AmxScratch {
  alignas(64) uint8_t panel[kSide * kPanelPitch];
  alignas(64) int32_t sums[kSide * kSumsPitch];
};

// Bytes of a packed group of sixteen tokens with rows of `pitch` bytes, whole steps.
inline int64_t group_bytes(int64_t pitch) { return kTile * pitch; }

// out <- the rows of codes of up to sixteen tokens, packed; tokens behind the last one are zeros.
inline void pack_tokens(const int8_t* const* rows, int64_t count, int64_t pitch, int8_t* out) {
  for (int64_t column = 0; column < pitch; column += kTileBytes) {
    F32x16 tile[kTile];  // four codes in each lane
    for (int t = 0; t < kTile; ++t) tile[t] = t < count ? Fp32::load(rows[t] + column, 0) : F32x16::zero();
    transpose(tile);
    for (int r = 0; r < kTile; ++r) Fp32::store(out + kTile * column + kTileBytes * r, 0, tile[r]);
  }
}

// 64 bytes of a line, of which `count` are there.
GLM5_INLINE __m512i load_line(const uint8_t* p, int64_t count) {
  const __mmask64 there = count >= kTileBytes ? ~0ull : (1ull << count) - 1;
  return _mm512_maskz_loadu_epi8(there, p);
}

// panel <- columns column .. column + width of 32 rows of a block from `row` on, unsigned: INT4 plus 8, int8 plus 128.
inline void fill_panel(const Block& block, int64_t row, int64_t column, int64_t width, uint8_t* panel) {
  const int rows_per_line = block.packed ? 2 : 1;
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(block.packed ? 0x88 : 0x80)), low = _mm512_set1_epi8(15);
  for (int64_t r = 0; r < kSide; r += rows_per_line) {
    const uint8_t* const line = block.base + block.pitch * (min(row + r, block.rows - 1) / rows_per_line) + column;
    uint8_t* const target = panel + kPanelPitch * r;
    for (int64_t c = 0; c < width; c += kTileBytes) {
      const __m512i codes = _mm512_xor_si512(load_line(line + c, width - c), sign);
      if (block.packed) {
        _mm512_store_si512(target + c, _mm512_and_si512(codes, low));
        _mm512_store_si512(target + kPanelPitch + c, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low));
      } else {
        _mm512_store_si512(target + c, codes);
      }
    }
  }
}

// Lines of a block, `pitch` bytes apart, from the columns on that are multiplied next.
struct NextLines {
  const uint8_t* first;
  int64_t pitch, lines;
};

// sums, from the earlier panels of these rows on, += `steps` steps of the panel times one or, kTwo, two groups of
// tokens. `stays`: in the tiles, from the first panel to the last one. Each step requests a step of the next lines:
// memory has to work while tiles are multiplied, and a whole panel would be more requests than a core holds.
template <bool kTwo>
void multiply_panel(const uint8_t* panel, const int8_t* first, const int8_t* second, int64_t steps, bool fresh,
                    bool stays, bool last, const NextLines& next, int32_t* sums) {
  constexpr int64_t kPitch = 4 * kSumsPitch;
  flush_stores();
  if (fresh)
    zero_tiles();
  else if (!stays)
    load_tiles(sums, kPitch);
  for (int64_t step = 0; step < steps; ++step) {
    for (int64_t l = 0; l < next.lines; ++l) __builtin_prefetch(next.first + next.pitch * l + kTileBytes * step, 0, 3);
    _tile_loadd(4, panel + kTileBytes * step, kPanelPitch);
    _tile_loadd(5, panel + kTileBytes * step + kTile * kPanelPitch, kPanelPitch);
    _tile_loadd(6, first + kTileSize * step, kTileBytes);
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(2, 5, 6);
    if constexpr (kTwo) {
      _tile_loadd(7, second + kTileSize * step, kTileBytes);
      _tile_dpbusd(1, 4, 7);
      _tile_dpbusd(3, 5, 7);
    }
  }
  if (!stays || last) store_tiles(sums, kPitch);
}

// scratch.sums <- 32 rows of a block from `row` on times `groups` groups of packed tokens (at most kGroupTokens
// tokens).
inline void multiply_32_rows(const Block& block, int64_t row, const int8_t* packed, int64_t groups,
                             AmxScratch& scratch) {
  const int64_t group = group_bytes(round_up(block.k, kStep)), lines = block.packed ? kSide / 2 : kSide;
  const uint8_t* const rows = block.base + block.pitch * (row / (kSide / lines));
  const bool stays = groups <= 2;
  for (int64_t column = 0; column < block.k || column == 0; column += kColumns) {
    const int64_t width = min(kColumns, block.k - column);
    const bool last = column + width >= block.k;
    fill_panel(block, row, column, width, scratch.panel);
    for (int64_t g = 0; g < groups; g += 2) {
      const int8_t* const first = packed + group * g + kTile * column;
      const NextLines next{rows + (last ? block.pitch * lines : column + width), block.pitch, g ? 0 : lines};
      const auto product = g + 1 < groups ? multiply_panel<true> : multiply_panel<false>;
      product(scratch.panel, first, first + group, ceil_div(width, kTileBytes), column == 0, stays, last, next,
              scratch.sums + kTile * g);
    }
  }
}

// The rows of a task times packed tokens: sink(token, column, count, sums) for sixteen columns at a time, of which
// `count` are rows of the block.
template <class Sink>
void multiply_task_by_amx(const Block& block, int64_t task, const int8_t* packed, int64_t tokens, AmxScratch& scratch,
                          const Sink& sink) {
  const int64_t groups = ceil_div(tokens, kTile), stop = min(kTaskRows * task + kTaskRows, block.rows);
  for (int64_t row = kTaskRows * task; row < stop; row += kSide) {
    multiply_32_rows(block, row, packed, groups, scratch);
    for (int64_t first = 0; first < tokens; first += kTile)
      for (int64_t column = row; column < min(row + kSide, stop); column += kTile) {
        F32x16 sums[kTile];  // int32 by their bits
        for (int r = 0; r < kTile; ++r) sums[r] = Fp32::load(scratch.sums + kSumsPitch * (column - row + r) + first, 0);
        transpose(sums);
        for (int64_t t = 0; t < min(kTile, tokens - first); ++t)
          sink(first + t, column, min(kTile, stop - column), __builtin_bit_cast(I32x16, sums[t]));
      }
  }
}

}  // namespace glm5::GLM5_SET
#endif
