// Tasks of an op on OpenMP's threads, and memory that lasts for one call.
#pragma once
#include <cstddef>
#include <cstdint>
#include <new>
#if defined(_OPENMP)
#include <omp.h>
#elif defined(__SANITIZE_THREAD__)
#include <thread>
#endif

#include "glm5_kernels.h"

namespace glm5::GLM5_SET {

// Bytes that a thread reads at a time, at least: fewer are read sooner than another thread has begun.
constexpr int64_t kLeastBytes = 1 << 17;
constexpr int64_t kRunsPerThread = 16;  // so that all threads end at about the same time

// std's templates are left out: the linker would keep one copy of each, compiled for any of the instruction sets.
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

#if defined(__SANITIZE_THREAD__)  // it does not see how OpenMP orders memory: other threads, and every task is a run
inline int max_threads() { return 4; }

template <class Work>
void parallel_for(int64_t tasks, int64_t, const Work& work) {
  std::thread team[4];
  for (int thread = 0; thread < max_threads(); ++thread)
    team[thread] = std::thread([&work, tasks, thread] {
      for (int64_t task = thread; task < tasks; task += max_threads()) work(task, task + 1, thread);
    });
  for (std::thread& thread : team) thread.join();
}

#else
// The threads that an op may use: torch's number, as OpenMP keeps it.
inline int max_threads() {
#if defined(_OPENMP)
  return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
  return 1;
#endif
}

// work(first, last, thread) for runs of the tasks 0 .. tasks, at least `grain` at a time; thread < max_threads().
// One run is done by the caller without a parallel region. `work` must not throw.
template <class Work>
void parallel_for(int64_t tasks, int64_t grain, const Work& work) {
  const int threads = max_threads();
  grain = max(max(grain, tasks / (kRunsPerThread * threads)), 1);
  const int64_t runs = ceil_div(tasks, grain);
#if defined(_OPENMP)
  if (threads > 1 && runs > 1) {
    const int team = static_cast<int>(min(threads, runs));
#pragma omp parallel for schedule(dynamic) num_threads(team)
    for (int64_t run = 0; run < runs; ++run) work(run * grain, min(run * grain + grain, tasks), omp_get_thread_num());
    return;
  }
#endif
  if (tasks) work(int64_t{0}, tasks, 0);
}

#endif

// Uninitialised array on a cache line, freed with its scope; throws std::bad_alloc.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t size) : data_(static_cast<T*>(::operator new(bytes(size), kAlignment))) {}
  ~Buffer() { ::operator delete(static_cast<void*>(data_), kAlignment); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  operator T*() const { return data_; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  static size_t bytes(int64_t size) { return static_cast<size_t>(max(size, 1)) * sizeof(T); }
  T* data_;
};

// The code of an op's call, which fails where its scratch cannot be allocated.
template <class Operands>
int guarded(void (*op)(const Operands&), const Operands& given) {
  try {
    op(given);
    return kDone;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}
// Exports an op, a function of its operands.
#define GLM5_EXPORT(op, Operands) \
  GLM5_EXPORTED int GLM5_NAME(op)(const Operands* given) { return guarded(op, *given); }

template <class T>
void fill(T* array, int64_t count, T value) {
  for (int64_t i = 0; i < count; ++i) array[i] = value;
}

// Hands out arrays one after the other, each on a cache line.
class Arena {
 public:
  explicit Arena(char* memory) : start_(memory), next_(memory) {}
  template <class T>
  T* take(int64_t size) {
    T* const array = reinterpret_cast<T*>(next_);
    next_ += round_up(size * static_cast<int64_t>(sizeof(T)), 64);
    return array;
  }
  int64_t bytes() const { return next_ - start_; }

 private:
  char *start_, *next_;
};

// A Scratch{arena, arguments...} for each thread of an op; its first field is its arena.
template <class Scratch>
class PerThread {
 public:
  template <class... Arguments>
  explicit PerThread(const Arguments&... arguments)
      : bytes_(Scratch{Arena(nullptr), arguments...}.arena.bytes()),
        memory_(bytes_ * max_threads()),
        scratch_(max_threads()) {
    for (int thread = 0; thread < max_threads(); ++thread)
      new (scratch_ + thread) Scratch{Arena(memory_ + bytes_ * thread), arguments...};
  }
  Scratch operator[](int thread) const { return scratch_[thread]; }  // a copy: its addresses stay in registers

 private:
  int64_t bytes_;
  Buffer<char> memory_;
  Buffer<Scratch> scratch_;
};

}  // namespace glm5::GLM5_SET
