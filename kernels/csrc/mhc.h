// Residual streams (mHC): the output of a half joins the streams, which then make the input of the next half.
//
//               512 columns                        Tasks are first blocks of columns: they join, and are summed with
//            +------+------+- -+                   the maps `fn`, which are larger than the streams of a token. Then
//    streams |      |      |   |  -> 24 sums each  tasks are tokens: the sums of all blocks, in order, are the weights
//            |      |      |   |                   with which the streams are read, written and mixed.
//            +------+------+- -+
#pragma once
#include "exponential.h"
#include "parallel.h"
#include "rms_norm.h"
#include "rows.h"

namespace glm5::GLM5_SET {

constexpr int64_t kStreamColumns = 512, kStreamTokens = 16;
constexpr int64_t kMostStreams = 8;  // whose weights of reading and writing fit sixteen lanes

// Maps of a token: n for reading, n for writing, n * n for mixing; and one sum more, of squares.
inline int64_t maps_of(const Mhc& op) { return op.n * (op.n + 2); }

// Columns column .. column + count of a token's streams joined with the half's output. scratch [n + 1, count]
inline void join_columns(const Mhc& op, int64_t token, int64_t column, int64_t count, float* scratch) {
  for (int64_t row = 0; row <= op.n; ++row) {
    const Rows& rows = row < op.n ? op.streams : op.output;
    const char* const source = row < op.n ? row_at(rows, token, row) : row_at(rows, 0, token);
    load_row(source + column * element_bytes(rows.dtype), rows.dtype, count, scratch + row * count);
  }
  for (int64_t target = 0; target < op.n; ++target) {
    float* const total = op.total + (token * op.n + target) * op.dim + column;
    const F32x16 post = F32x16::broadcast(op.post[token * op.n + target]);
    for (int64_t i = 0; i < count; i += kLanes) {
      F32x16 sum = post * F32x16::load(scratch + op.n * count + i);
      for (int64_t source = 0; source < op.n; ++source)
        sum = fma(F32x16::broadcast(op.comb[(token * op.n + source) * op.n + target]),
                  F32x16::load(scratch + source * count + i), sum);
      sum.store(total + i);
    }
  }
}

// sums [kRows] <- the products of some columns of all streams with kRows rows of fn, which begin at `maps`.
template <int kRows>
[[gnu::noinline]] void multiply_maps(const Mhc& op, const float* streams, const float* maps, int64_t count,
                                     float* sums) {
  F32x16 products[kRows];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) products[row] = F32x16::zero();
  for (int64_t stream = 0; stream < op.n; ++stream)
    for (int64_t i = stream * op.dim; i < stream * op.dim + count; i += kLanes) {
      const F32x16 x = F32x16::load(streams + i);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row)
        products[row] = fma(x, F32x16::load(maps + row * op.n * op.dim + i), products[row]);
    }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) sums[row] = sum_in_order(products[row]);
}

// sums [maps + 1] of some columns of each token begin .. end, `pitch` from one to the next. A few maps for all tokens:
// rows of fn are a power of two apart, and more of them would push each other out of the second cache.
inline void map_columns(const Mhc& op, int64_t begin, int64_t end, int64_t column, int64_t count, float* sums,
                        int64_t pitch) {
  constexpr int kRows = 6;
  const int64_t maps = maps_of(op), row_size = op.n * op.dim;
  int64_t row = 0;
  const auto multiply = [&]<int kCount>() {
    for (int64_t token = begin; token < end; ++token)
      multiply_maps<kCount>(op, op.total + token * row_size + column, op.fn + row * row_size + column, count,
                            sums + (token - begin) * pitch + row);
    row += kCount;
  };
  while (row + kRows <= maps) multiply.template operator()<kRows>();
  while (row < maps) multiply.template operator()<1>();
  for (int64_t token = begin; token < end; ++token) {
    const float* const streams = op.total + token * row_size + column;
    F32x16 squares = F32x16::zero();
    for (int64_t stream = 0; stream < op.n; ++stream)
      for (int64_t i = stream * op.dim; i < stream * op.dim + count; i += kLanes)
        squares += F32x16::load(streams + i) * F32x16::load(streams + i);
    sums[(token - begin) * pitch + maps] = sum_in_order(squares);
  }
}

// Divides each row of a matrix [n, n] by its sum and eps; columns, if `step` is n and `next` 1.
inline void divide_by_sums(float* matrix, int64_t n, int64_t next, int64_t step, float eps) {
  for (int64_t row = 0; row < n; ++row) {
    float sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += matrix[row * next + i * step];
    const float factor = 1.0f / (sum + eps);
    for (int64_t i = 0; i < n; ++i) matrix[row * next + i * step] *= factor;
  }
}

// matrix [n, n] <- doubly stochastic, by Sinkhorn's steps from the softmax of its rows.
inline void sinkhorn(float* matrix, int64_t n, int64_t iterations, float eps) {
  for (int64_t row = 0; row < n; ++row) {
    float most = matrix[row * n];
    for (int64_t i = 1; i < n; ++i) most = most > matrix[row * n + i] ? most : matrix[row * n + i];
    for (int64_t i = 0; i < n; ++i) matrix[row * n + i] -= most;
  }
  for (int64_t i = 0; i < n * n; i += kLanes) exponential(F32x16::load(matrix + i)).store(matrix + i);
  divide_by_sums(matrix, n, n, 1, 0.0f);
  for (int64_t i = 0; i < n * n; ++i) matrix[i] += eps;
  divide_by_sums(matrix, n, 1, n, eps);
  for (int64_t step = 1; step < iterations; ++step) {
    divide_by_sums(matrix, n, n, 1, eps);
    divide_by_sums(matrix, n, 1, n, eps);
  }
}

// A token's weights from sums [blocks, maps + 1]: of reading into `reading`, the others into the op's results.
inline void stream_weights(const Mhc& op, int64_t token, const float* sums, int64_t blocks, float* reading) {
  const int64_t maps = maps_of(op), n = op.n;
  const auto total = [&](int64_t map) {
    float sum = 0;
    for (int64_t block = 0; block < blocks; ++block) sum += sums[block * (maps + 1) + map];
    return sum;
  };
  const float mean = total(maps) / static_cast<float>(n * op.dim);
  const float factor = 1.0f / __builtin_sqrtf(mean + static_cast<float>(op.rms_eps));
  float gates[kLanes] = {}, among[kMostStreams * kMostStreams] = {};
  for (int64_t map = 0; map < maps; ++map) {
    const float scale = op.scale[map < n ? 0 : map < 2 * n ? 1 : 2];
    (map < 2 * n ? gates[map] : among[map - 2 * n]) = total(map) * factor * scale + op.base[map];
  }
  const F32x16 one = F32x16::broadcast(1.0f);
  (one / (one + exponential(F32x16::zero() - F32x16::load(gates)))).store(gates);
  sinkhorn(among, n, op.iterations, static_cast<float>(op.hc_eps));
  for (int64_t stream = 0; stream < n; ++stream) {
    reading[stream] = gates[stream] + static_cast<float>(op.hc_eps);
    op.post_out[token * n + stream] = 2.0f * gates[n + stream];
  }
  for (int64_t i = 0; i < n * n; ++i) op.comb_out[token * n * n + i] = among[i];
}

// A token's input of the half: its streams, added with the weights `reading`, normed. mixed [dim]
inline void read_streams(const Mhc& op, int64_t token, const float* reading, float* mixed) {
  F32x16 squares = F32x16::zero();
  for (int64_t i = 0; i < op.dim; i += kLanes) {
    F32x16 sum = F32x16::zero();
    for (int64_t stream = 0; stream < op.n; ++stream)
      sum = fma(F32x16::broadcast(reading[stream]), F32x16::load(op.total + (token * op.n + stream) * op.dim + i), sum);
    sum.store(mixed + i);
    squares += sum * sum;
  }
  const F32x16 factor = F32x16::broadcast(rms_factor(squares, op.dim, static_cast<float>(op.norm_eps)));
  with_floats(op.weight.dtype, [&](auto element) {
    using Element = decltype(element);
    for (int64_t i = 0; i < op.dim; i += kLanes)
      Element::store(row_at(op.input, 0, token), i,
                     F32x16::load(mixed + i) * factor * Element::load(op.weight.base, i));
  });
}

inline void mhc(const Mhc& op) {
  const int64_t blocks = ceil_div(op.dim, kStreamColumns), runs = ceil_div(op.tokens, kStreamTokens),
                sums_of_token = blocks * (maps_of(op) + 1), block_bytes = 4 * maps_of(op) * op.n * kStreamColumns;
  const Buffer<float> sums(op.tokens * sums_of_token);
  const int64_t size = max((op.n + 1) * kStreamColumns, op.dim);
  const Buffer<float> scratch(size * max_threads());
  parallel_for(blocks * runs, kLeastBytes / block_bytes, [&](int64_t first, int64_t last, int thread) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t block = task % blocks, column = block * kStreamColumns, begin = task / blocks * kStreamTokens,
                    count = min(kStreamColumns, op.dim - column);
      const int64_t end = min(begin + kStreamTokens, op.tokens);
      for (int64_t token = begin; op.comb && token < end; ++token)
        join_columns(op, token, column, count, scratch + size * thread);
      map_columns(op, begin, end, column, count, sums + begin * sums_of_token + block * (maps_of(op) + 1),
                  sums_of_token);
    }
  });
  parallel_for(op.tokens, kLeastBytes / (4 * op.n * op.dim), [&](int64_t first, int64_t last, int thread) {
    for (int64_t token = first; token < last; ++token) {
      float reading[kMostStreams];
      stream_weights(op, token, sums + token * sums_of_token, blocks, reading);
      read_streams(op, token, reading, scratch + size * thread);
    }
  });
}

}  // namespace glm5::GLM5_SET
