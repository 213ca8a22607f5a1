// The exported ops of attention, for one instruction set.
#include "indexer_pool.h"
#include "kda.h"
#include "lightning_indexer_tasks.h"
#include "preprocess.h"
#include "sparse_flash_attention_amx.h"

using namespace glm5::GLM5_SET;

GLM5_EXPORT(lightning_indexer, LightningIndexer)
GLM5_EXPORT(sparse_flash_attention, SparseFlashAttention)
GLM5_EXPORT(indexer_preprocess, IndexerPreprocess)
GLM5_EXPORT(mla_latents, MlaLatents)
GLM5_EXPORT(rotate_queries, RotateQueries)
GLM5_EXPORT(kda, Kda)
GLM5_EXPORT(indexer_pool, IndexerPool)
