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

// Rows of a tensor [A, B, D]: row (a, b) begins a * block_pitch + b * row_pitch elements after `base`.
struct Rows {
  const void* base;
  int64_t block_pitch, row_pitch, dtype;
};

// The operands of the following ops are structs of fields of 8 bytes, which Python packs. What is written is fp32 or
// bf16 or named otherwise; sizes of rows are multiples of 16. slots: rows of a cache, negative: written nowhere.

// out [tokens, topk] <- the positions with the largest scores of each token, ascending, then -1.
struct LightningIndexer {
  Rows q;                          // (token, head), [dims], also int8
  Rows k_cache;                    // (block, offset), [dims], also int8
  const float* weights;            // [tokens, heads]
  const float* k_scale;            // [num_blocks, block_size], or null
  const int64_t* query_start_loc;  // [requests + 1]
  const int64_t* visible;          // [tokens], the positions that a token sees
  const int32_t* block_table;      // [requests, max_blocks], negative: no block
  int64_t requests, max_blocks, block_size, heads, dims, topk;
  int32_t* out;
};

// out and lse [tokens, heads] <- attention over the positions topk_indices, by the rules of the op's contract.
struct SparseFlashAttention {
  Rows ql_nope, q_pe;         // (token, head), [rank] and [rope]; rank is a multiple of 32
  Rows ckv_cache, kpe_cache;  // (block, offset), of one dtype; int8: both in packed rows, int8 [rank], bf16 [rope] and
                              // fp32 [rank / 128], rank a multiple of 128
  const int32_t* topk_indices;  // [tokens, topk]
  const int64_t* request;       // [tokens]
  const int64_t* visible;       // [tokens]
  const int32_t* block_table;   // [requests, max_blocks], negative: no block
  int64_t tokens, heads, rank, rope, topk, max_blocks, block_size;
  double scale;         // of the scores
  int64_t round_probs;  // to bf16, before they multiply the values
  Rows out;             // (token, head), [rank]
  float* lse;
};

// The cosines and sines of each token's position, rows of `pairs` elements of dtype.
struct Angles {
  const void* cos;
  int64_t cos_pitch;
  const void* sin;
  int64_t sin_pitch, dtype, pairs;
};

// out <- q rotated; rows of k_cache <- k normed and rotated.
struct IndexerPreprocess {
  Rows q, out;        // (token, head), [dim]
  Rows k, k_cache;    // (0, token) and (block, offset), [dim], of q's dtype
  Rows weight, bias;  // (0, 0), of the norm, [dim]
  double eps;
  Angles angles;
  int64_t interleaved;
  const int64_t* slots;
  int64_t tokens, heads, dim, block_size;
};

// What MLA preprocess does after its first product: q_c [tokens, q_lora] <- the first part of y normed; ckv_cache <-
// the second one normed; kpe_cache <- the third one rotated.
struct MlaLatents {
  Rows y;                  // (0, token), [q_lora + rank + 2 * pairs]
  Rows q_gamma, kv_gamma;  // (0, 0), of the norms, [q_lora] and [rank]
  double eps;
  Angles angles;
  const int64_t* slots;
  Rows ckv_cache, kpe_cache;  // (block, offset), of y's dtype
  Rows q_c, rounded_q_c;      // (0, token), fp32 and of y's dtype
  int64_t tokens, q_lora, rank, block_size;
};

// out <- the rows z rotated, both (token, head), [2 * pairs].
struct RotateQueries {
  Rows z, out;
  Angles angles;
  int64_t tokens, heads;
};

// x <- x * weight times the Hadamard matrix of size n along dim, in place; x fp32 [rows, columns].
struct Hadamard {
  float* x;
  int64_t pitch, rows, columns;  // the size along dim is a multiple of n; along dim 0 columns are a multiple of 16
  const float* weight;           // [n], with the factor 1 / sqrt(n)
  int64_t n;
  const float* core;  // [order, order], transposed; n / order is a power of two, along dim 1 at least 16
  int64_t order, dim;
};

// out <- KDA, by the contract of the op; states fp32 (slot, head), [keys, values], a slot every slot_pitch elements.
struct Kda {
  Rows q, k, v, g, out;  // (token, head), q, k and g [keys], g in fp32; v and out [values]
  const float* beta;     // [tokens, heads]
  float* states;
  int64_t slot_pitch;
  const int32_t *query_start_loc, *initial_slots, *state_slots;  // [sequences + 1], [sequences], [tokens]
  int64_t sequences, heads, keys, values;
};

// pool_cache <- the pools that the tokens complete, then the tails <- the tokens, by the contract of the op.
struct IndexerPool {
  Rows k, gate;                                        // (0, token), [dim], of one dtype
  const float* ape;                                    // [pool, dim]
  Rows tail_keys, tail_gates;                          // (ring, row), [dim], of the dtype of k
  Rows pool_cache;                                     // (block, offset), [dim]
  const int64_t *query_start_loc, *request, *visible;  // [requests + 1], [tokens], [tokens]
  const int32_t *block_table, *tail_blocks;            // [requests, max_blocks], [requests], negative: none
  int64_t tokens, max_blocks, block_size, dim, pool, ring;
};

// total <- the streams joined by post and comb with the output of a half; input, post_out, comb_out <- what the next
// half reads and writes with, by the contract of the op. Without comb, total is what the streams are.
struct Mhc {
  Rows streams, output;            // (token, stream) and (0, token), [dim]
  const float *post, *comb;        // [tokens, n] and [tokens, n, n], or null
  float* total;                    // [tokens, n, dim]
  const float *fn, *scale, *base;  // [n * (n + 2), n * dim], [3], [n * (n + 2)]; n is 8 at most
  Rows weight, input;              // of the norm (0, 0), and (0, token), [dim], of one dtype
  float *post_out, *comb_out;
  int64_t tokens, n, dim, iterations;
  double rms_eps, hc_eps, norm_eps;
};

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
  double limit;  // of w13: gates are at most that, ups between -limit and limit
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
// The same in bf16 for up to 16 tokens, from w [heads, r, n], whose rows are contiguous; n a multiple of 32.
int GLM5_NAME(head_products_by_rows)(const void* x, const void* w, int64_t tokens, int64_t heads, int64_t n, int64_t r,
                                     const int64_t* pitches, void* out);

// What all rows of a weight [rows, columns] share in GPTQ, by groups of eight columns in the order `perm`, int64
// [columns]; columns that fill up the last group are zero. x and hinv [groups, n, 8]: inputs and factors of each
// column. coupling, gram [groups, 8, 8]: hinv^T x and x^T x of a group. curvature [groups * 8]: the diagonal of the
// Hessian.
struct GptqInputs {
  int64_t columns, groups, n;
  const int64_t* perm;
  const float *x, *hinv, *coupling, *gram, *curvature;
  double damping;
};

// out [rows, columns] <- the integers of weight, both fp32; scale [rows] changes if `refits`. By the calling thread.
int GLM5_NAME(gptq_round)(const float* weight, float* scale, int64_t rows, int64_t largest, int64_t passes,
                          int64_t refits, const GptqInputs* inputs, float* out);

// The scale fp32 [rows] at which rounding each row of weight fp32 [rows, k] to -largest - 1 .. largest loses least;
// grid [ratios] of the scale of max|w|, then up to `steps` refits. By the calling thread, as the next two.
int GLM5_NAME(ssz_scale)(const float* weight, int64_t rows, int64_t k, int64_t largest, int64_t steps,
                         const float* grid, int64_t ratios, float* out);

// out fp32 [rows, k] <- weight * factor [k] rounded, as integers times scales, refitted up to `steps` times.
int GLM5_NAME(fake_round)(const float* weight, const float* factor, int64_t rows, int64_t k, int64_t largest,
                          int64_t steps, float* out);

// stored int8 [rows, k] or, for 4 bits, [rows / 2, k], row 2i in the low and row 2i + 1 in the high halves; sums fp32
// [rows, parts] of the integers of each part of a row; squares [2]: of the errors, and of the weights.
int GLM5_NAME(round_rows)(const float* weight, const float* scale, int64_t rows, int64_t k, int64_t bits, int64_t parts,
                          int8_t* stored, float* sums, double* squares);

int GLM5_NAME(lightning_indexer)(const LightningIndexer* op);
int GLM5_NAME(sparse_flash_attention)(const SparseFlashAttention* op);
int GLM5_NAME(indexer_preprocess)(const IndexerPreprocess* op);
int GLM5_NAME(mla_latents)(const MlaLatents* op);
int GLM5_NAME(rotate_queries)(const RotateQueries* op);
int GLM5_NAME(hadamard)(const Hadamard* op);
int GLM5_NAME(kda)(const Kda* op);
int GLM5_NAME(indexer_pool)(const IndexerPool* op);
int GLM5_NAME(mhc)(const Mhc* op);
#endif
}
#pragma GCC visibility pop
