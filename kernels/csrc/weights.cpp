// The exported ops of the quantizer, for one instruction set.
#include "gptq.h"
#include "hadamard.h"
#include "weight_rounding.h"

using namespace glm5::GLM5_SET;

int GLM5_NAME(gptq_round)(const float* weight, float* scale, int64_t rows, int64_t largest, int64_t passes,
                          int64_t refits, const GptqInputs* inputs, float* out) {
  return guarded([&] { gptq_round(weight, scale, rows, largest, passes, refits, *inputs, out); });
}

int GLM5_NAME(ssz_scale)(const float* weight, int64_t rows, int64_t k, int64_t largest, int64_t steps,
                         const float* grid, int64_t ratios, float* out) {
  return guarded([&] { ssz_scale(weight, rows, k, largest, steps, grid, ratios, out); });
}

int GLM5_NAME(fake_round)(const float* weight, const float* factor, int64_t rows, int64_t k, int64_t largest,
                          int64_t steps, float* out) {
  return guarded([&] { fake_round(weight, factor, rows, k, largest, steps, out); });
}

int GLM5_NAME(round_rows)(const float* weight, const float* scale, int64_t rows, int64_t k, int64_t bits, int64_t parts,
                          int8_t* stored, float* sums, double* squares) {
  return guarded([&] { round_rows(weight, scale, rows, k, bits, parts, stored, sums, squares); });
}

int GLM5_NAME(hadamard)(const Hadamard* op) {
  return guarded([&] { hadamard(*op); });
}
