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

// The weights of experts: blocks of one shape [rows, k] at `bases`, int8 or, `packed`, INT4 with two rows in a byte;
// pitch: bytes from a line in memory to the next one. scales fp32, one for each row of each expert.
struct ExpertBlocks {
  const void* const* bases;
  int64_t pitch, rows, k, packed;
  const float* scales;
};

// out fp32 [tokens, w2.rows] <- sum over the experts of each token of weight * w2 (silu(gate) * up), where gate and up
// are blocks 2e and 2e + 1 of w13, and activations are quantized per row. ids, weights [tokens, per_token]; negative
// ids are no experts.
int GLM5_NAME(w4a8_moe)(const void* x, int64_t x_pitch, int64_t dtype, int64_t tokens, const int64_t* ids,
                        const float* weights, int64_t per_token, int64_t experts, const ExpertBlocks* w13,
                        const ExpertBlocks* w2, float* out);

// out [tokens, heads, r] in x_dtype <- x [tokens, heads, n] times w [heads, n, r] for each head, summed in fp32 in the
// order of n; r a multiple of 32. pitches: of x by token and head, of w by head and row, of out by token and head.
int GLM5_NAME(head_products)(const void* x, int64_t x_dtype, const void* w, int64_t w_dtype, int64_t tokens,
                             int64_t heads, int64_t n, int64_t r, const int64_t* pitches, void* out);
#if defined(__AVX512BF16__)
// The same in bf16 by VDPBF16PS for up to 16 tokens, from w [heads, r, n], whose rows are contiguous;
// n a multiple of 32.
int GLM5_NAME(head_products_by_rows)(const void* x, const void* w, int64_t tokens, int64_t heads, int64_t n, int64_t r,
                                     const int64_t* pitches, void* out);
#endif
#endif
}
#pragma GCC visibility pop
