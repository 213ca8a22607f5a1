// The exported ops of attention, for one instruction set.
#include "indexer_pool.h"
#include "indexer_preprocess.h"
#include "kda.h"
#include "lightning_indexer_tasks.h"
#include "mla_preprocess.h"
#include "sparse_flash_attention_amx.h"
#include "sparse_flash_attention_tiles.h"

using namespace glm5::GLM5_SET;

int GLM5_NAME(lightning_indexer)(const LightningIndexer* op) {
  return guarded([&] { lightning_indexer(*op); });
}
int GLM5_NAME(sparse_flash_attention)(const SparseFlashAttention* op) {
  return guarded([&] {
    if (!op->tokens || !op->heads) return;
#if defined(__AMX_BF16__)
    if (attends_by_amx(*op)) return attend_by_amx(*op);
#endif
    attend_by_vectors(*op);
  });
}
int GLM5_NAME(indexer_preprocess)(const IndexerPreprocess* op) {
  return guarded([&] { indexer_preprocess(*op); });
}
int GLM5_NAME(kda)(const Kda* op) {
  return guarded([&] { kda(*op); });
}
int GLM5_NAME(indexer_pool)(const IndexerPool* op) {
  return guarded([&] { indexer_pool(*op); });
}
int GLM5_NAME(mla_latents)(const MlaLatents* op) {
  return guarded([&] { mla_latents(*op); });
}
int GLM5_NAME(rotate_queries)(const RotateQueries* op) {
  return guarded([&] { rotate_queries(*op); });
}
