// Products of bf16 by AMX, 32 by 32 sums at a time: four tiles of 16 x 16 sums, two of each operand.
#pragma once

#include "simd/amx.h"

namespace glm5::GLM5_SET {

#if defined(__AMX_BF16__)

constexpr int kSide = 2 * kTile;  // rows and columns of a product

// 32 rows of bf16 in two tiles. With two terms the rows are sums; the second term is `term_bytes` after the first.
struct LeftTiles {
  const char* rows[2];  // the first row of each tile
  int64_t pitch[2];     // bytes from row to row
  int terms = 1;
  int64_t term_bytes = 0;
};

// 32 columns of bf16 in two tiles, VNNI-packed: a row holds a pair of bf16 for each of 16 columns.
struct RightTiles {
  const char* columns[2];  // the first row of each tile
  int64_t pitch;           // bytes from row to row
};

// out fp32 [32, 32], `pitch` bytes from row to row, (+)= left [32, 32 * steps] times right.
//
// Of each step the even columns' products are added in order, and the odd ones'; then both to the sum before.
inline void multiply_tiles(const LeftTiles& left, const RightTiles& right, int64_t steps, bool fresh, float* out,
                           int64_t pitch) {
  flush_stores();
  if (fresh)
    zero_tiles();
  else
    load_tiles(out, pitch);
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(6, right.columns[0] + step * kTile * right.pitch, right.pitch);
    _tile_loadd(7, right.columns[1] + step * kTile * right.pitch, right.pitch);
    for (int term = 0; term < left.terms; ++term) {
      const int64_t offset = step * 4 * kTile + term * left.term_bytes;
      _tile_loadd(4, left.rows[0] + offset, left.pitch[0]);
      _tile_loadd(5, left.rows[1] + offset, left.pitch[1]);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  store_tiles(out, pitch);
}

#endif
}  // namespace glm5::GLM5_SET
