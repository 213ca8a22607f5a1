// GPTQ: the lanes are sixteen rows of the weight, and eight columns share a pass over the carried error.
//
// The error that the rows carry on each input is read once for eight columns. Within these, a column's error reaches
// the next ones through the products of their inputs and factors, which all rows share. Arrays of sixteen rows are
// [columns][16] and [inputs][16]; inputs and factors of a group of eight columns are [inputs][8].
#pragma once
#include <cstring>

#include "weight_rounding.h"

namespace glm5::GLM5_SET {

constexpr int64_t kGroup = 8;      // columns of a pass: their sums fit the registers
constexpr int64_t kRowBlocks = 8;  // blocks of sixteen rows that share a pass: their carried error stays in a cache
constexpr int64_t kCopied = 128;   // columns of sixteen rows that are transposed together: 8 KiB
constexpr int64_t kGroupLanes = kGroup * kLanes;

// out[c] <- sum over i of carried[i] * group[i][c].
inline void dots(const float* carried, const float* group, int64_t n, float* out) {
  F32x16 sums[kGroup];
  for (auto& sum : sums) sum = F32x16::zero();
  for (int64_t i = 0; i < n; ++i) {
    const F32x16 row = F32x16::load(carried + kLanes * i);
#pragma GCC unroll 8
    for (int c = 0; c < kGroup; ++c) sums[c] = fma(row, F32x16::broadcast(group[kGroup * i + c]), sums[c]);
  }
  for (int c = 0; c < kGroup; ++c) sums[c].store(out + kLanes * c);
}

// carried[i] += sum over c of group[i][c] * factors[c], c in order.
inline void add(float* carried, const float* group, int64_t n, const float* factors) {
  F32x16 columns[kGroup];
  for (int c = 0; c < kGroup; ++c) columns[c] = F32x16::load(factors + kLanes * c);
  for (int64_t i = 0; i < n; ++i) {
    F32x16 total = F32x16::load(carried + kLanes * i);
#pragma GCC unroll 8
    for (int c = 0; c < kGroup; ++c) total = fma(columns[c], F32x16::broadcast(group[kGroup * i + c]), total);
    total.store(carried + kLanes * i);
  }
}

struct Gptq {
  const GptqRound& in;
  int64_t padded;  // columns in whole groups
  Range range;

  explicit Gptq(const GptqRound& in) : in(in), padded(kGroup * in.groups), range(in.largest) {}
  const float* x(int64_t group) const { return in.x + kGroup * in.n * group; }
  const float* hinv(int64_t group) const { return in.hinv + kGroup * in.n * group; }

  // Integers q and errors of a group's columns, each with the compensation of the columns before it.
  void round_group(const float* w, const float* compensation, const float* coupling, F32x16 scale, float* q,
                   float* errors) const {
    F32x16 error[kGroup];
#pragma GCC unroll 8
    for (int c = 0; c < kGroup; ++c) {
      F32x16 value = F32x16::load(w + kLanes * c) + F32x16::load(compensation + kLanes * c);
      for (int before = 0; before < c; ++before)
        value += error[before] * F32x16::broadcast(coupling[kGroup * before + c]);
      const F32x16 whole = range.rounded(value / scale);
      error[c] = value - whole * scale;
      whole.store(q + kLanes * c);
      error[c].store(errors + kLanes * c);
    }
  }

  // Round every column of `blocks` blocks of rows once; carried [blocks][n][16] is their error on the inputs.
  void first_pass(int64_t blocks, const float* w, float* q, const float* scales, float* carried) const {
    alignas(64) float compensation[kGroupLanes], errors[kGroupLanes];
    std::memset(carried, 0, sizeof(float) * static_cast<size_t>(blocks * in.n * kLanes));
    for (int64_t group = 0; group < in.groups; ++group)
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = kLanes * (padded * block + kGroup * group);
        float* const own = carried + kLanes * in.n * block;
        dots(own, x(group), in.n, compensation);
        round_group(w + first, compensation, in.coupling + kGroup * kGroup * group,
                    F32x16::load(scales + kLanes * block), q + first, errors);
        add(own, hinv(group), in.n, errors);
      }
  }

  // out [n][16] <- sixteen rows times the inputs.
  void outputs(const float* rows, float* out) const {
    std::memset(out, 0, sizeof(float) * static_cast<size_t>(in.n * kLanes));
    for (int64_t group = 0; group < in.groups; ++group) add(out, x(group), in.n, rows + kGroupLanes * group);
  }

  // The scale with the least cost for the integers; a row without a positive one keeps its scale.
  void refit(const float* w, const float* q, const float* want, const float* got, float* scale) const {
    const float damping = static_cast<float>(in.damping);
    double numerator[kLanes] = {}, denominator[kLanes] = {};
    for (int64_t i = 0; i < in.n * kLanes; ++i) {
      numerator[i % kLanes] += static_cast<double>(got[i] * want[i]);
      denominator[i % kLanes] += static_cast<double>(got[i] * got[i]);
    }
    for (int64_t i = 0; i < padded * kLanes; ++i) {
      numerator[i % kLanes] += static_cast<double>(damping * w[i] * q[i]);
      denominator[i % kLanes] += static_cast<double>(damping * q[i] * q[i]);
    }
    for (int lane = 0; lane < kLanes; ++lane)
      if (numerator[lane] > 0 && denominator[lane] > 0)
        scale[lane] = static_cast<float>(numerator[lane] / denominator[lane]);
  }

  // Move every column once to its best integer; residual [n][16] is the error of the outputs.
  void descend(const float* w, float* q, F32x16 scale, float* residual) const {
    alignas(64) float gradients[kGroupLanes], moves[kGroupLanes];
    const F32x16 damping = F32x16::broadcast(static_cast<float>(in.damping));
    for (int64_t group = 0; group < in.groups; ++group) {
      dots(residual, x(group), in.n, gradients);
      bool moved = false;
      for (int c = 0; c < kGroup; ++c) {
        const int64_t k = kGroup * group + c;
        const F32x16 before = F32x16::load(q + kLanes * k);
        F32x16 gradient =
            F32x16::load(gradients + kLanes * c) + damping * (F32x16::load(w + kLanes * k) - before * scale);
        for (int other = 0; other < c; ++other)
          gradient +=
              F32x16::load(moves + kLanes * other) * F32x16::broadcast(in.gram[kGroup * (kGroup * group + other) + c]);
        const F32x16 step = gradient / F32x16::broadcast(in.curvature[k]) / scale;
        const F32x16 better = range.rounded(before + step);
        ((before - better) * scale).store(moves + kLanes * c);
        better.store(q + kLanes * k);
        moved |= any_differs(before, better);
      }
      if (moved) add(residual, x(group), in.n, moves);
    }
  }

  // The passes after the first one, for sixteen rows; scratch: [2][n][16].
  void improve(const float* w, float* q, float* scale, float* scratch) const {
    float* const want = scratch;
    float* const got = scratch + kLanes * in.n;
    outputs(w, want);
    for (int64_t pass = 0; pass < in.passes; ++pass) {
      outputs(q, got);
      if (in.refits) refit(w, q, want, got, scale);
      const F32x16 scales = F32x16::load(scale);
      for (int64_t i = 0; i < in.n; ++i)
        (F32x16::load(want + kLanes * i) - scales * F32x16::load(got + kLanes * i)).store(got + kLanes * i);
      descend(w, q, scales, got);
    }
    if (in.refits) {
      outputs(q, got);
      refit(w, q, want, got, scale);
    }
  }

  // visit(place in the rows [count, columns], place in blocks [padded][16]) for all numbers, in pieces of a cache's
  // size.
  template <class Visit>
  void for_each_place(int64_t rows, const Visit& visit) const {
    for (int64_t first = 0; first < in.columns; first += kCopied)
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t k = first; k < min(first + kCopied, in.columns); ++k)
          visit(in.columns * row + in.perm[k], kLanes * (padded * (row / kLanes) + k) + row % kLanes);
  }
};

inline void gptq_round(const GptqRound& op) {
  const Gptq gptq(op);
  const int64_t most = min(kRowBlocks, ceil_div(op.rows, kLanes)), size = gptq.padded * kLanes;
  const Buffer<float> w(most * size), q(most * size), carried(max(most, 2) * op.n * kLanes), scales(most * kLanes);
  std::memset(w, 0, sizeof(float) * static_cast<size_t>(most * size));
  fill<float>(scales, most * kLanes, 1.0f);
  for (int64_t start = 0; start < op.rows; start += most * kLanes) {
    const int64_t count = min(most * kLanes, op.rows - start), blocks = ceil_div(count, kLanes);
    const float* const source = op.weight + op.columns * start;
    float* const target = op.out + op.columns * start;
    std::memcpy(scales, op.scale + start, sizeof(float) * static_cast<size_t>(count));
    gptq.for_each_place(count, [&](int64_t row, int64_t block) { w[block] = source[row]; });
    gptq.first_pass(blocks, w, q, scales, carried);
    for (int64_t block = 0; block < blocks && op.passes; ++block)
      gptq.improve(w + size * block, q + size * block, scales + kLanes * block, carried);
    std::memcpy(op.scale + start, scales, sizeof(float) * static_cast<size_t>(count));
    gptq.for_each_place(count, [&](int64_t row, int64_t block) { target[row] = q[block]; });
  }
}

}  // namespace glm5::GLM5_SET
