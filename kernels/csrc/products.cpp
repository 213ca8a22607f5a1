// The exported ops around linear layers and experts, for one instruction set.
#include "experts.h"
#include "head_products.h"
#include "int8_linear.h"
#include "mhc.h"
#include "rms_norm.h"

using namespace glm5::GLM5_SET;

int GLM5_NAME(rms_norm)(const void* x, int64_t x_pitch, const void* residual, int64_t residual_pitch,
                        const void* weight, int64_t tokens, int64_t columns, int64_t dtype, float eps, void* out,
                        void* total) {
  return guarded(
      [&] { rms_norm(x, x_pitch, residual, residual_pitch, weight, tokens, columns, dtype, eps, out, total); });
}

int GLM5_NAME(mhc)(const Mhc* op) {
  return guarded([&] { mhc(*op); });
}

int GLM5_NAME(int8_linear)(const void* x, int64_t x_pitch, int64_t x_dtype, int64_t tokens, int64_t k,
                           const int8_t* weight, int64_t weight_pitch, int64_t rows, const float* scales,
                           const float* input_scale, const float* input_offset, const int32_t* bias, void* y,
                           int64_t y_dtype) {
  return guarded([&] {
    int8_linear(x, x_pitch, x_dtype, tokens, k, weight, weight_pitch, rows, scales, input_scale, input_offset, bias, y,
                y_dtype);
  });
}

int GLM5_NAME(w4a8_moe)(const void* x, int64_t x_pitch, int64_t dtype, int64_t tokens, const int64_t* ids,
                        const float* weights, int64_t per_token, int64_t experts, const ExpertBlocks* w13,
                        const ExpertBlocks* w2, float* out) {
  return guarded([&] { w4a8_moe(x, x_pitch, dtype, tokens, ids, weights, per_token, experts, *w13, *w2, out); });
}

int GLM5_NAME(head_products)(const void* x, int64_t x_dtype, const void* w, int64_t w_dtype, int64_t tokens,
                             int64_t heads, int64_t n, int64_t r, const int64_t* p, void* out) {
  const HeadPitches pitch{{p[0], p[1]}, {p[2], p[3]}, {p[4], p[5]}};
  return guarded([&] { head_products(x, x_dtype, w, w_dtype, tokens, heads, n, r, pitch, out); });
}

int GLM5_NAME(head_products_by_rows)(const void* x, const void* w, int64_t tokens, int64_t heads, int64_t n, int64_t r,
                                     const int64_t* p, void* out) {
  const HeadPitches pitch{{p[0], p[1]}, {p[2], p[3]}, {p[4], p[5]}};
  return guarded([&] { head_products_by_rows(x, w, tokens, heads, n, r, pitch, out); });
}
