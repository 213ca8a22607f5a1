// The exported ops around linear layers and experts, for one instruction set.
#include "rms_norm.h"

using namespace glm5::GLM5_SET;

int GLM5_NAME(rms_norm)(const void* x, int64_t x_pitch, const void* residual, int64_t residual_pitch,
                        const void* weight, int64_t tokens, int64_t columns, int64_t dtype, float eps, void* out,
                        void* total) {
  return guarded(
      [&] { rms_norm(x, x_pitch, residual, residual_pitch, weight, tokens, columns, dtype, eps, out, total); });
}
