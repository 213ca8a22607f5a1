// The tile registers of AMX: eight of sixteen rows of 64 bytes.
#pragma once
#include "lanes.h"

#if defined(__AMX_TILE__)
namespace glm5::GLM5_SET {

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

// Sixteen vectors of 32-bit lanes as a matrix, transposed in place.
GLM5_INLINE void transpose(__m512i (&m)[kTile]) {
  __m512i t[kTile];
#pragma GCC unroll 8
  for (int i = 0; i < kTile; i += 2) {
    t[i] = _mm512_unpacklo_epi32(m[i], m[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(m[i], m[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kTile; i += 4) {  // m[i + c]: columns c, c + 4, c + 8, c + 12 of rows i .. i + 3
    m[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    m[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    m[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    m[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm512_shuffle_i32x4(m[c], m[4 + c], 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(m[c], m[4 + c], 0xdd);
    t[8 + c] = _mm512_shuffle_i32x4(m[8 + c], m[12 + c], 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(m[8 + c], m[12 + c], 0xdd);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    m[c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0x88);
    m[8 + c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0xdd);
    m[4 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0x88);
    m[12 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0xdd);
  }
}

}  // namespace glm5::GLM5_SET
#endif
