// The tasks of the Lightning Indexer on all threads.
#pragma once
#include "lightning_indexer_amx.h"
#include "lightning_indexer_vectors.h"
#include "topk.h"

namespace glm5::GLM5_SET {

// Tasks whose scores are in memory together.
struct IndexerBatch {
  static constexpr int64_t kTasks = 64, kScores = 1 << 23;  // at most: 32 MiB, or one token's

  IndexerTask tasks[kTasks];
  int64_t count = 0, scores = 0, longest = 0, most_tokens = 0;

  bool has_room_for(const IndexerTask& task) const {
    return count < kTasks && (count == 0 || scores + task.scores() <= kScores);
  }
  void add(IndexerTask task) {
    task.offset = scores;
    scores += task.scores();
    longest = max(longest, task.length);
    most_tokens = max(most_tokens, task.last - task.first);
    tasks[count++] = task;
  }
};

inline void score_columns(const Indexer& op, const IndexerTask& task, int64_t start, int64_t stop, float* scores,
                          const IndexerScratch& scratch) {
#if defined(__AMX_BF16__)
  if (scores_by_amx(op)) return score<AmxScorer>(op, task, start, stop, scores, scratch);
#endif
  if (by_pairs(op))
    score<VectorScorer<Bf16Pairs>>(op, task, start, stop, scores, scratch);
  else
    score<VectorScorer<Fp32Terms>>(op, task, start, stop, scores, scratch);
}

// All threads score parts of the keys of all tasks, then select for their tokens.
inline void run_batch(const Indexer& op, const IndexerBatch& batch) {
  constexpr int64_t kPart = 4096;  // keys
  const PerThread<IndexerScratch> scratch(op, batch.most_tokens);
  const Buffer<float> scores(batch.scores);
  const Buffer<uint32_t> selections(2 * batch.longest * max_threads());
  const int64_t parts = ceil_div(batch.longest, kPart);
  parallel_for(batch.count * parts, 1, [&](int64_t first, int64_t last, int thread) {
    [[maybe_unused]] const Tiles registers;
    for (int64_t index = first; index < last; ++index) {
      const IndexerTask& task = batch.tasks[index / parts];
      const int64_t start = index % parts * kPart, stop = min(start + kPart, task.length);
      if (start < stop) score_columns(op, task, start, stop, scores + task.offset, scratch[thread]);
    }
  });
  parallel_for(batch.count * batch.most_tokens, 1, [&](int64_t first, int64_t last, int thread) {
    for (int64_t index = first; index < last; ++index) {
      const IndexerTask& task = batch.tasks[index / batch.most_tokens];
      const int64_t row = index % batch.most_tokens, token = task.first + row;
      if (token < task.last)
        best_positions(scores + task.offset + row * task.pitch(), max(0, readable(op, token)), op.out + token * op.topk,
                       op.topk, selections + 2 * batch.longest * thread);
    }
  });
}

inline void lightning_indexer(const Indexer& op) {
  IndexerBatch batch;
  for (int64_t request = 0; request < op.requests; ++request) {
    const int64_t start = op.query_start_loc[request], end = op.query_start_loc[request + 1];
    const int64_t length = end > start ? readable(op, end - 1) : 0;
    if (length <= 0) {
      fill(op.out + start * op.topk, (end - start) * op.topk, -1);
      continue;
    }
    const int64_t size = max(1, min(IndexerBatch::kScores / length, IndexerScratch::kTokens));
    for (int64_t first = start; first < end; first += size) {
      const int64_t last = min(first + size, end);
      const IndexerTask task{request, first, last, max(0, readable(op, last - 1)), 0};
      if (!batch.has_room_for(task)) {
        run_batch(op, batch);
        batch = {};
      }
      batch.add(task);
    }
  }
  run_batch(op, batch);
}

}  // namespace glm5::GLM5_SET
