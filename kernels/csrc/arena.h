// Scratch of several arrays for each thread of an op, in one allocation.
#pragma once
#include "parallel.h"

namespace glm5::GLM5_SET {

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

// What `make(arena)` takes from an arena, once for each thread of an op.
template <class Make>
class PerThread {
 public:
  explicit PerThread(const Make& make) : make_(make), bytes_(bytes_of(make)), memory_(bytes_ * max_threads()) {}
  auto operator[](int thread) const {
    Arena arena(memory_ + bytes_ * thread);
    return make_(arena);
  }

 private:
  static int64_t bytes_of(const Make& make) {
    Arena arena(nullptr);
    make(arena);
    return arena.bytes();
  }
  const Make& make_;
  int64_t bytes_;
  Buffer<char> memory_;
};

}  // namespace glm5::GLM5_SET
