// The tile registers of AMX: eight of sixteen rows of 64 bytes.
#pragma once
#include "lanes.h"

namespace glm5::GLM5_SET {
#if defined(__AMX_TILE__)

constexpr int kTileBytes = 4 * kTile;  // of a row
constexpr int kTileSize = kTile * kTileBytes;
constexpr int kSide = 2 * kTile;  // rows and columns of a product: four tiles of sums, two of each operand

// Stores before it reach memory: gcc 12's _tile_loadd and _tile_loadconfig do not say that they read it.
GLM5_INLINE void flush_stores() { __asm__ volatile("" ::: "memory"); }

// While it lives, this thread's tile registers have their full size; cleared after it, as other code expects them.
class Tiles {
 public:
  Tiles() {
    alignas(64) uint8_t config[64] = {1};  // palette 1; bytes of a row from 16 on; rows from 48 on
    for (int tile = 0; tile < 8; ++tile) {
      config[16 + 2 * tile] = kTileBytes;
      config[48 + tile] = kTile;
    }
    flush_stores();
    _tile_loadconfig(config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// 32 x 32 sums of 32 bits in tiles 0 to 3: two for the upper rows, two for the lower ones. pitch: bytes from row to
// row.
GLM5_INLINE void zero_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
GLM5_INLINE void load_tiles(const void* upper, int64_t pitch) {
  const char *const first = static_cast<const char*>(upper), *const lower = first + kTile * pitch;
  _tile_loadd(0, first, pitch);
  _tile_loadd(1, first + kTileBytes, pitch);
  _tile_loadd(2, lower, pitch);
  _tile_loadd(3, lower + kTileBytes, pitch);
}
GLM5_INLINE void store_tiles(void* upper, int64_t pitch) {
  char *const first = static_cast<char*>(upper), *const lower = first + kTile * pitch;
  _tile_stored(0, first, pitch);
  _tile_stored(1, first + kTileBytes, pitch);
  _tile_stored(2, lower, pitch);
  _tile_stored(3, lower + kTileBytes, pitch);
}

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

#else
struct Tiles {};
#endif
}  // namespace glm5::GLM5_SET
