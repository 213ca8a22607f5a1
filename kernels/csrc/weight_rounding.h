// Rounding weights to integers: a row stays in the nearest cache for all that is done to it.
#pragma once
#include "parallel.h"
#include "rows.h"

namespace glm5::GLM5_SET {

constexpr int64_t kUnrolled = 4;  // vectors of sums that are added side by side
constexpr double kNoise = 1e-6;   // relative gain below which a refit counts as converged (the reference's NOISE)

// Integers lie in low .. high; ties go to even.
struct Range {
  float low, high;

  explicit Range(int64_t largest) : low(static_cast<float>(-largest - 1)), high(static_cast<float>(largest)) {}
  GLM5_INLINE F32x16 rounded(F32x16 x) const {
    return smaller(larger(rint(x), F32x16::broadcast(low)), F32x16::broadcast(high));
  }
  GLM5_INLINE float rounded(float x) const {
    const float whole = __builtin_rintf(x), least = whole > low ? whole : low;
    return least < high ? least : high;
  }
};

// A least-squares scale, and by how much less than sum(w^2) its squared error is.
struct Fit {
  float scale;
  double gain;
};

// The fit for the integers of `row` at `scale`. No lane adds more than k / 64 terms, so sums of squared INT8 integers
// stay exact for any real row. Inlined in the loops of best_scale it takes a twentieth longer (gcc 12).
[[gnu::noinline]] inline Fit refit(const float* row, int64_t k, float scale, const Range& range) {
  const float inverse = 1.0f / scale;
  F32x16 along[kUnrolled], energy[kUnrolled];
  for (int u = 0; u < kUnrolled; ++u) along[u] = energy[u] = F32x16::zero();
  int64_t i = 0;
  for (; i + kUnrolled * kLanes <= k; i += kUnrolled * kLanes)
#pragma GCC unroll 4
    for (int u = 0; u < kUnrolled; ++u) {
      const F32x16 w = F32x16::load(row + i + kLanes * u), q = range.rounded(w * F32x16::broadcast(inverse));
      along[u] = fma(w, q, along[u]);
      energy[u] = fma(q, q, energy[u]);
    }
  double all_along = 0, all_energy = 0;
  for (int u = 0; u < kUnrolled; ++u) {
    float lanes[2][kLanes];
    along[u].store(lanes[0]);
    energy[u].store(lanes[1]);
    for (int lane = 0; lane < kLanes; ++lane) {  // side by side: each sum waits for itself
      all_along += lanes[0][lane];
      all_energy += lanes[1][lane];
    }
  }
  for (; i < k; ++i) {
    const double q = range.rounded(row[i] * inverse);
    all_along += row[i] * q;
    all_energy += q * q;
  }
  if (all_energy == 0) return {scale, -1.0};
  return {static_cast<float>(all_along / all_energy), all_along * all_along / all_energy};
}

// The best of the fits at start * ratio, then refitted while that gains, at most `steps` times.
inline float best_scale(const float* row, int64_t k, float start, int64_t steps, const float* grid, int64_t ratios,
                        const Range& range) {
  Fit best{start, -1.0};
  for (int64_t i = 0; i < ratios; ++i) {
    const Fit fit = refit(row, k, start * grid[i], range);
    if (fit.gain > best.gain) best = fit;
  }
  for (int64_t step = 0; step < steps; ++step) {
    const Fit fit = refit(row, k, best.scale, range);
    if (!(fit.gain > best.gain * (1 + kNoise))) break;
    best = fit;
  }
  return best.scale;
}

inline void ssz_scale(const SszScale& op) {
  const Range range(op.largest);
  for (int64_t row = 0; row < op.rows; ++row) {
    const float* const w = op.weight + op.k * row;
    const float peak = largest_magnitude<Fp32>(w, op.k);
    op.out[row] = peak > 0 ? best_scale(w, op.k, peak / range.high, op.steps, op.grid, op.ratios, range) : 1.0f;
  }
}

inline void fake_round(const FakeRound& op) {
  const Range range(op.largest);
  const float minmax = 1.0f;
  for (int64_t row = 0; row < op.rows; ++row) {
    float* const w = op.out + op.k * row;
    const float peak = largest_magnitude(op.k, [&](int64_t i, int64_t count) GLM5_INLINED {
      const F32x16 x = load_columns<Fp32>(op.weight + op.k * row, i, count) * load_columns<Fp32>(op.factor, i, count);
      store_columns<Fp32>(w, i, count, x);
      return x;
    });
    if (peak == 0) continue;
    const float start = peak / range.high;
    const float scale = op.steps > 0 ? best_scale(w, op.k, start, op.steps, &minmax, 1, range) : start;
    for (int64_t i = 0; i < op.k; i += kLanes) {
      const int64_t count = min(kLanes, op.k - i);
      const F32x16 step = F32x16::broadcast(scale);
      store_columns<Fp32>(w, i, count, range.rounded(load_columns<Fp32>(w, i, count) / step) * step);
    }
  }
}

// Integers to `out`; returns their sum; adds squared errors and squared weights to `squares`.
inline float round_run(const float* row, int64_t k, float scale, const Range& range, int8_t* out,
                       double (&squares)[2]) {
  F32x16 sums = F32x16::zero(), errors = sums, weights = sums;
  const F32x16 step = F32x16::broadcast(scale);
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    const F32x16 w = F32x16::load(row + i), q = range.rounded(w / step), miss = q * step - w;
    sums += q;
    errors = fma(miss, miss, errors);
    weights = fma(w, w, weights);
    store_int8(out + i, to_int(q));
  }
  float total = sum_in_order(sums);
  add_lanes(errors, squares[0]);
  add_lanes(weights, squares[1]);
  for (; i < k; ++i) {
    const float q = range.rounded(row[i] / scale);
    const double miss = q * scale - row[i], w = row[i];
    total += q;
    squares[0] += miss * miss;
    squares[1] += w * w;
    out[i] = static_cast<int8_t>(q);
  }
  return total;
}

// bytes [k] <- their low halves, and the low ones of `high` as high halves.
inline void join_halves(const int8_t* high, int64_t k, int8_t* bytes) {
  for (int64_t i = 0; i < k; ++i) bytes[i] = static_cast<int8_t>((high[i] * 16) | (bytes[i] & 15));
}

inline void round_rows(const RoundRows& op) {
  const Range range((int64_t{1} << (op.bits - 1)) - 1);
  const int64_t run = op.k / op.parts;
  const Buffer<int8_t> high(op.k);
  double squares[2] = {};
  for (int64_t row = 0; row < op.rows; ++row) {
    const bool joins = op.bits == 4 && row % 2;  // the row before, as the high halves of its bytes
    int8_t *const stored = op.stored + op.k * (op.bits == 8 ? row : row / 2), *const line = joins ? high : stored;
    for (int64_t part = 0; part < op.parts; ++part)
      op.sums[op.parts * row + part] =
          round_run(op.weight + op.k * row + run * part, run, op.scale[row], range, line + run * part, squares);
    if (joins) join_halves(high, op.k, stored);
  }
  op.squares[0] = squares[0];
  op.squares[1] = squares[1];
}

}  // namespace glm5::GLM5_SET
