// The tile registers of AMX: eight of sixteen rows of 64 bytes.
#pragma once
#include "lanes.h"

namespace glm5::GLM5_SET {
#if defined(__AMX_TILE__)

constexpr int kTileBytes = 4 * kTile;  // of a row
constexpr int kTileSize = kTile * kTileBytes;

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

#else
struct Tiles {};
#endif
}  // namespace glm5::GLM5_SET
