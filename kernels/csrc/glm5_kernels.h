// The C interface of the CPU kernels. Python calls it by ctypes (glm5_kernels/native).
//
// The library holds every op once for each instruction set: GLM5_NAME(rms_norm) is glm5_avx2_rms_norm, for example. An
// op takes the address of the struct of its operands and returns 0, or kNoMemory when it could not allocate its
// scratch. Callers own all memory. Ops run on as many threads as OpenMP would use, which is what torch has set; their
// number changes no bit of a result.
//
// All fields have 8 bytes. Rows are contiguous in their last dimension; a pitch is the distance, in elements, from one
// row to the next. What is written is fp32 or bf16 or named otherwise. slots: rows of a cache, negative: written
// nowhere.
#pragma once
#include <cstdint>

#define GLM5_JOIN(set, op) glm5_##set##_##op
#define GLM5_EXPAND(set, op) GLM5_JOIN(set, op)
#define GLM5_NAME(op) GLM5_EXPAND(GLM5_SET, op)
#define GLM5_EXPORTED extern "C" [[gnu::visibility("default")]]

enum Dtype : int64_t { kFp32 = 0, kBf16 = 1, kInt8 = 2 };
enum Code : int { kDone = 0, kNoMemory = 1 };

// The instruction sets that this library has and this CPU can run, the fastest one first, separated by spaces.
GLM5_EXPORTED const char* glm5_instruction_sets();

// SHA-256 of this file: in a checkout Python refuses a library of another commit, whose structs may differ.
GLM5_EXPORTED const char* glm5_interface();

// Rows of a tensor [A, B, D]: row (a, b) begins a * block_pitch + b * row_pitch elements after `base`.
struct Rows {
  void* base;
  int64_t block_pitch, row_pitch, dtype;
};

// Attention. Sizes of rows are multiples of 16.

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

// out <- the rows q, of which the first 2 * pairs dims are rotated, both (token, head), [dim]. Pairs are neighbours, if
// `interleaved`, else (0, pairs), (1, pairs + 1), ...
struct RotateQueries {
  Rows q, out;
  Angles angles;
  int64_t interleaved, tokens, heads, dim;
};

// Index queries rotated; rows of k_cache <- k normed and rotated.
struct IndexerPreprocess {
  RotateQueries queries;
  Rows k, k_cache;    // (0, token) and (block, offset), [dim], of the queries' dtype
  Rows weight, bias;  // (0, 0), of the norm, [dim]
  double eps;
  const int64_t* slots;
  int64_t block_size;
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

// Layers.

// total <- x + residual, out <- total / rms(total) * weight, where the quotient is rounded before the product. Without
// a residual, whose base is null then, total is not written.
struct RmsNorm {
  Rows x, residual;         // (0, token), [columns]; all rows have one dtype
  Rows weight, out, total;  // (0, 0), then (0, token)
  double eps;
  int64_t tokens, columns;  // columns: a multiple of 16
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

// y <- x, quantized, times the weight transposed, times scales. Rows of x have a scale each, max|x| / 127; or, with the
// addresses of input_scale and input_offset, are round(x / input_scale + input_offset), and bias is added to the sums.
struct Int8Linear {
  Rows x, y;              // (0, token), [k] and [rows]
  const uint8_t* weight;  // int8 [rows, k]
  int64_t weight_pitch;
  const float *scales, *input_scale, *input_offset;  // [rows], [1], [1]
  const int32_t* bias;                               // [rows], or null
  int64_t tokens, k, rows;
};

// The weights of experts: blocks of one shape [rows, k] at `bases`, int8 or, `packed`, INT4 with two rows in a byte;
// pitch: bytes from a line in memory to the next one. scales: one for each row of each expert.
struct ExpertBlocks {
  const void* const* bases;
  int64_t pitch, rows, k, packed;
  const float* scales;
};

// out [tokens, w2.rows] <- sum over the experts of each token of weight * w2 (silu(gate) * up), where gate and up are
// blocks 2e and 2e + 1 of w13, and activations are quantized per row; gate <= limit and -limit <= up <= limit.
struct W4a8Moe {
  Rows x;                // (0, token), [w13.k]
  const int64_t* ids;    // [tokens, per_token], negative: no expert
  const float* weights;  // [tokens, per_token]
  ExpertBlocks w13, w2;
  double limit;
  int64_t tokens, per_token, experts;
  float* out;
};

// out (token, head), [r] <- x (token, head), [n] times w for each head, summed in fp32. head_products: w (head, row),
// [r], the terms of a sum in order, r a multiple of 32. head_products_by_rows: bf16, w (head, column), [n], up to 16
// tokens, n a multiple of 32.
struct HeadProducts {
  Rows x, w, out;
  int64_t tokens, heads, n, r;
};

// Sublayers of a decoder layer for up to 16 tokens, in one call: what the ops above compute one after the other.
// Activations and caches are bf16; rows of bf16 weights have a multiple of 32 elements.

// A linear layer in one or two parts, whose results lie side by side; the second one has 0 rows then. A part is bf16
// without scales, else int8 as in Int8Linear.
struct LinearPart {
  const uint8_t* weight;  // [rows, k]
  int64_t pitch, rows;
  const float *scales, *input_scale, *input_offset;
  const int32_t* bias;
};
struct Linear {
  int64_t k;
  LinearPart parts[2];
};

// What all layers of a step share: its tokens and their requests, as in the ops above.
struct DecodeStep {
  int64_t tokens;
  Angles angles, index_angles;
  const int64_t *slots, *query_start_loc, *request, *visible;
  const int32_t* block_table;
  int64_t requests, max_blocks;
};

// The weights of an attention sublayer. index_heads is 0 in a layer without an indexer.
struct MlaWeights {
  Rows norm, q_gamma, kv_gamma, w_uk, w_uv;  // (0, 0), and as the w of HeadProducts: by rows, or not
  double norm_eps, latent_eps, scale;
  int64_t hidden, heads, nope, rope, rank, q_lora, values, uk_by_rows, uv_by_rows;
  Linear qkv_a, q_b, o_proj;
  Rows k_weight, k_bias;
  double k_eps, index_scale;
  int64_t index_heads, index_dim, interleaved;
  Linear wk_weights, wq_b;
};

// total <- x + residual; out <- what attention makes of the norm of total, and its output projection; this step's rows
// of the caches. topk_indices [tokens, topk] are written by the indexer if it `selects`, else read. *undefined <- 1 if
// a softmax has no finite largest score: then `out` is not to be used.
struct MlaSublayer {
  const MlaWeights* weights;
  const DecodeStep* step;
  Rows x, residual, total, out;           // (0, token); residual's base may be null, as in RmsNorm
  Rows ckv_cache, kpe_cache, index_keys;  // (block, offset)
  int64_t block_size, index_block_size, topk, selects;
  int32_t* topk_indices;
  int64_t* undefined;
};

// The weights of an MLP sublayer: of an MLP or the shared experts, and of routed experts, if `experts` is not 0.
struct MlpWeights {
  Rows norm;
  double norm_eps;
  int64_t hidden, width;
  Linear gate_up, down;  // [2 * width, hidden], [hidden, width]
  Linear router;         // [experts, hidden]
  const float* correction_bias;
  int64_t experts, per_token, renormalizes;
  double routed_scale, limit;
  ExpertBlocks w13, w2;
};

// total <- x + residual; out <- the MLP of the norm of total, or the sum of shared and routed experts.
struct MlpSublayer {
  const MlpWeights* weights;
  Rows x, residual, total, out;  // (0, token)
  int64_t tokens;
};

// Weights. All of these ops run in the calling thread.

// x <- x * weight times the Hadamard matrix of size n along dim, in place; x fp32 [rows, columns].
struct Hadamard {
  float* x;
  int64_t pitch, rows, columns;  // the size along dim is a multiple of n; along dim 0 columns are a multiple of 16
  const float* weight;           // [n], with the factor 1 / sqrt(n)
  int64_t n;
  const float* core;  // [order, order], transposed; n / order is a power of two, along dim 1 at least 16
  int64_t order, dim;
};

// out [rows, columns] <- the integers of weight, both fp32; scale [rows] changes if `refits`. Inputs and factors come
// in groups of eight columns, in the order `perm`; columns that fill up the last group are zero.
struct GptqRound {
  const float* weight;
  float *scale, *out;
  int64_t rows, columns, largest, passes, refits;
  int64_t groups, n;
  const int64_t* perm;           // [columns]
  const float *x, *hinv;         // [groups, n, 8], inputs and factors of each column
  const float *coupling, *gram;  // [groups, 8, 8], hinv^T x and x^T x of a group
  const float* curvature;        // [groups * 8], the diagonal of the Hessian
  double damping;
};

// out [rows] <- the scale at which rounding each row of weight [rows, k] to -largest - 1 .. largest loses least; grid
// [ratios] of the scale of max|w|, then up to `steps` refits.
struct SszScale {
  const float *weight, *grid;
  int64_t rows, k, largest, steps, ratios;
  float* out;
};

// out [rows, k] <- weight * factor [k] rounded, as integers times scales, refitted up to `steps` times.
struct FakeRound {
  const float *weight, *factor;
  int64_t rows, k, largest, steps;
  float* out;
};

// stored int8 [rows, k] or, for 4 bits, [rows / 2, k], row 2i in the low and row 2i + 1 in the high halves; sums [rows,
// parts] of the integers of each part of a row; squares [2]: of the errors, and of the weights.
struct RoundRows {
  const float *weight, *scale;  // [rows, k], [rows]
  int64_t rows, k, bits, parts;
  int8_t* stored;
  float* sums;
  double* squares;
};
