// The tasks of the Lightning Indexer on all threads.
#pragma once
#include "lightning_indexer_amx.h"
#include "lightning_indexer_scores.h"

namespace glm5::GLM5_SET {

// Calls work(task) for tasks of up to 64 query tokens of a request, and 32 MiB of scores.
template <class Work>
void for_each_task(const Indexer& op, const Work& work) {
  constexpr int64_t kScores = 1 << 23;
  for (int64_t request = 0; request < op.requests; ++request) {
    const int64_t start = op.query_start_loc[request], end = op.query_start_loc[request + 1];
    const int64_t length = end > start ? readable(op, end - 1) : 0;
    if (length <= 0) fill(op.out + start * op.topk, (end - start) * op.topk, -1);
    const int64_t size = length > 0 ? max(1, min(kScores / length, IndexerScratch::kTokens)) : 1;
    for (int64_t first = start; length > 0 && first < end; first += size) {
      const int64_t last = min(first + size, end);
      work(IndexerTask{request, first, last, readable(op, last - 1)});
    }
  }
}

inline void score(const Indexer& op, const IndexerTask& task, int64_t start, int64_t stop, float* scores,
                  const IndexerScratch& scratch) {
  if (start >= stop) return;
  if (scores_by_amx(op))
    score_by_amx(op, task, start, stop, scores, scratch);
  else if (by_pairs(op))
    score_by_vectors<Bf16Pairs>(op, task, start, stop, scores, scratch);
  else
    score_by_vectors<Fp32Terms>(op, task, start, stop, scores, scratch);
}

// op.out <- the best positions of a token of a task whose keys are scored; selection: uint32 [2 * task.length].
inline void select(const Indexer& op, const IndexerTask& task, int64_t token, const float* scores,
                   uint32_t* selection) {
  best_positions(scores + (token - task.first) * task.pitch(), max(0, readable(op, token)), op.out + token * op.topk,
                 op.topk, selection);
}

// Every thread scores a task of its own, and selects.
inline void run_tasks(const Indexer& op, const Buffer<IndexerTask>& tasks, int64_t count, int64_t tokens) {
  int64_t scores = 0, length = 0;
  for (int64_t i = 0; i < count; ++i) {
    scores = max(scores, tasks[i].scores());
    length = max(length, tasks[i].length);
  }
  struct Memory {
    IndexerScratch scratch;
    float* scores;
    uint32_t* selection;
  };
  const auto make = [&](Arena& arena) {
    return Memory{IndexerScratch(arena, op, tokens), arena.take<float>(scores), arena.take<uint32_t>(2 * length)};
  };
  const PerThread memory(make);
  parallel_for(count, 1, [&](int64_t first, int64_t last, int thread) {
    const Memory mine = memory[thread];
    for (int64_t i = first; i < last; ++i) {
      score(op, tasks[i], 0, tasks[i].length, mine.scores, mine.scratch);
      for (int64_t token = tasks[i].first; token < tasks[i].last; ++token)
        select(op, tasks[i], token, mine.scores, mine.selection);
    }
  });
}

// All threads score parts of the keys of one task, and select its tokens.
inline void share_task(const Indexer& op, const IndexerTask& task) {
  constexpr int64_t kPart = 4096;
  const auto make = [&](Arena& arena) { return IndexerScratch(arena, op, task.last - task.first); };
  const PerThread scratch(make);
  const Buffer<float> scores(task.scores());
  const Buffer<uint32_t> selections(2 * task.length * max_threads());
  parallel_for(ceil_div(task.length, kPart), 1, [&](int64_t first, int64_t last, int thread) {
    score(op, task, first * kPart, min(last * kPart, task.length), scores, scratch[thread]);
  });
  parallel_for(task.last - task.first, 1, [&](int64_t first, int64_t last, int thread) {
    for (int64_t token = task.first + first; token < task.first + last; ++token)
      select(op, task, token, scores, selections + 2 * task.length * thread);
  });
}

inline void lightning_indexer(const Indexer& op) {
  int64_t count = 0, tokens = 0;
  for_each_task(op, [&](const IndexerTask& task) {
    ++count;
    tokens = max(tokens, task.last - task.first);
  });
  const Buffer<IndexerTask> tasks(count);
  int64_t next = 0;
  for_each_task(op, [&](const IndexerTask& task) { tasks[next++] = task; });
  if (count < max_threads())
    for (int64_t i = 0; i < count; ++i) share_task(op, tasks[i]);
  else
    run_tasks(op, tasks, count, tokens);
}

}  // namespace glm5::GLM5_SET
