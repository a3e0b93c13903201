// Worker threads that share the iterations of a loop.
#pragma once

#include <cstdint>
#include <memory>

namespace thimble {

class ThreadPool {
 public:
  explicit ThreadPool(uint32_t threads);  // the calling thread counts as one
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  uint32_t size() const;
  // Calls body(item, worker) for every item in [0, items), in any order, and returns when all calls have
  // returned. Worker numbers are less than size(). `body` must not throw.
  template <typename Body>
  void run(uint32_t items, const Body& body) {
    dispatch(
        items,
        [](const void* b, uint32_t item, uint32_t worker) { (*static_cast<const Body*>(b))(item, worker); },
        &body);
  }

 private:
  using Call = void (*)(const void* body, uint32_t item, uint32_t worker);
  void dispatch(uint32_t items, Call call, const void* body);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace thimble
