// The exported ops of the quantizer, for one instruction set.
#include "hadamard.h"

using namespace glm5::GLM5_SET;

int GLM5_NAME(hadamard)(float* x, int64_t pitch, int64_t rows, int64_t columns, const float* weight, int64_t n,
                        const float* core, int64_t order, int64_t dim) {
  return guarded([&] {
    const Buffer<float> scratch(order * kLanes);
    (dim == 1 ? hadamard_rows : hadamard_columns)(x, pitch, rows, columns, weight, n, {core, order, scratch});
  });
}
