// The C interface of the CPU kernels. Python calls it by ctypes (glm5_kernels/native).
//
// The library holds every op once for each instruction set: GLM5_NAME(rms_norm) is glm5_avx2_rms_norm, for example.
// Callers own all memory. Rows are contiguous in their last dimension; a pitch is the distance, in elements, from one
// row to the next. dtype is one of Dtype. Ops run on as many threads as OpenMP would use, which is what torch has set;
// their number changes no bit of a result. Every op returns 0, or kNoMemory when it could not allocate its scratch.
#pragma once
#include <cstdint>

#define GLM5_JOIN(set, op) glm5_##set##_##op
#define GLM5_EXPAND(set, op) GLM5_JOIN(set, op)
#define GLM5_NAME(op) GLM5_EXPAND(GLM5_SET, op)

enum Dtype : int64_t { kFp32 = 0, kBf16 = 1, kInt8 = 2 };
enum Code : int { kDone = 0, kNoMemory = 1 };

#pragma GCC visibility push(default)
extern "C" {
// The instruction sets that this library has and this CPU can run, the fastest one first, separated by spaces.
const char* glm5_instruction_sets();

#ifdef GLM5_SET
// total = x + residual (residual and total may be null), out = total / rms(total) * weight; [tokens, columns] each in
// dtype fp32 or bf16, weight [columns]; columns a multiple of 16; the quotient is rounded to dtype before the product.
int GLM5_NAME(rms_norm)(const void* x, int64_t x_pitch, const void* residual, int64_t residual_pitch,
                        const void* weight, int64_t tokens, int64_t columns, int64_t dtype, float eps, void* out,
                        void* total);

// y [tokens, rows] in y_dtype <- x [tokens, k] in x_dtype, quantized, times weight int8 [rows, k] transposed, times
// scales fp32 [rows]. Rows of x have a scale each, max|x| / 127; or, with the addresses of input_scale and
// input_offset, are round(x / input_scale + input_offset), and bias int32 [rows] is added to the sums.
int GLM5_NAME(int8_linear)(const void* x, int64_t x_pitch, int64_t x_dtype, int64_t tokens, int64_t k,
                           const int8_t* weight, int64_t weight_pitch, int64_t rows, const float* scales,
                           const float* input_scale, const float* input_offset, const int32_t* bias, void* y,
                           int64_t y_dtype);
#endif
}
#pragma GCC visibility pop
