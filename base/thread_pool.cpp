// Workers claim the items of a job one by one through a single 64-bit ticket: (job number, items left).
// Claiming decrements it. A worker that wakes late, or is never scheduled on a busy machine, finds nothing
// left and delays nobody.
#include "base/thread_pool.h"

#include <atomic>
#include <chrono>
#include <exception>
#include <thread>
#include <vector>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#endif

namespace thimble {

// How long a worker spins for the next job before it sleeps. The ops of a step follow one another within 20
// us, the steps of decoding within about 100 us; waking a sleeper takes 5 to 50 us.
constexpr auto kSpin = std::chrono::microseconds(100);

static void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleep while the word has the value seen before, and wake all sleepers. We do not use std::atomic::wait on
// Windows: libstdc++'s version (GCC 12) reads the word before it takes its lock and may miss a wake-up, so
// that the pool's final join never returns.
#ifdef _WIN32
static void sleep_while(std::atomic<uint32_t>& word, uint32_t seen) {
  WaitOnAddress(&word, &seen, sizeof seen, INFINITE);
}
static void wake_all(std::atomic<uint32_t>& word) { WakeByAddressAll(&word); }
#else
static void sleep_while(std::atomic<uint32_t>& word, uint32_t seen) {
  word.wait(seen, std::memory_order_acquire);
}
static void wake_all(std::atomic<uint32_t>& word) { word.notify_all(); }
#endif

struct ThreadPool::State {
  std::vector<std::thread> workers;
  alignas(64) std::atomic<uint64_t> ticket{0};
  // Written only while no items are left. A thread that reads these and then claims an item has read this
  // job's values: if they had changed, so would the job number, and the claim would have failed.
  std::atomic<Call> call{nullptr};
  std::atomic<const void*> body{nullptr};
  alignas(64) std::atomic<uint32_t> unfinished{0};
  alignas(64) std::atomic<uint32_t> signal{0};  // changes with every job; workers sleep on it
  std::atomic<bool> stop{false};

  // Runs items until none is left to claim.
  void work(uint32_t worker) {
    uint64_t t = ticket.load(std::memory_order_acquire);
    while (const uint32_t left = static_cast<uint32_t>(t)) {
      const Call c = call.load(std::memory_order_acquire);
      const void* b = body.load(std::memory_order_acquire);
      if (!ticket.compare_exchange_weak(t, t - 1, std::memory_order_acq_rel, std::memory_order_acquire))
        continue;
      c(b, left - 1, worker);
      unfinished.fetch_sub(1, std::memory_order_release);
      t = ticket.load(std::memory_order_acquire);
    }
  }

  // Spins until done() is true or kSpin has passed, yielding to other threads now and then. Returns whether
  // done() was true.
  template <typename Done>
  static bool spin(const Done& done) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < 32; ++i) {
        if (done()) return true;
        relax();
      }
      std::this_thread::yield();
    } while (std::chrono::steady_clock::now() < end);
    return false;
  }

  void loop(uint32_t worker) {
    uint32_t seen = 0;
    while (!stop.load(std::memory_order_acquire)) {
      work(worker);
      const auto called = [&] { return signal.load(std::memory_order_acquire) != seen; };
      if (!spin(called)) sleep_while(signal, seen);
      seen = signal.load(std::memory_order_acquire);
    }
  }
};

ThreadPool::ThreadPool(uint32_t threads) : state_(std::make_unique<State>()) {
  state_->workers.reserve(threads);
  try {
    for (uint32_t worker = 1; worker < threads; ++worker)
      state_->workers.emplace_back([s = state_.get(), worker] { s->loop(worker); });
  } catch (const std::exception&) {
    // The system has no more threads, or no memory for one. size() is the number of threads that started.
  }
}

ThreadPool::~ThreadPool() {
  state_->stop.store(true, std::memory_order_release);
  state_->signal.fetch_add(1, std::memory_order_release);
  wake_all(state_->signal);
  for (std::thread& worker : state_->workers) worker.join();
}

uint32_t ThreadPool::size() const { return static_cast<uint32_t>(state_->workers.size()) + 1; }

void ThreadPool::dispatch(uint32_t items, Call call, const void* body) {
  State& s = *state_;
  if (items <= 1 || s.workers.empty()) {
    for (uint32_t item = 0; item < items; ++item) call(body, item, 0);
    return;
  }
  s.call.store(call, std::memory_order_release);
  s.body.store(body, std::memory_order_release);
  s.unfinished.store(items, std::memory_order_relaxed);
  const uint64_t job = (s.ticket.load(std::memory_order_relaxed) >> 32) + 1;
  s.ticket.store(job << 32 | items, std::memory_order_release);
  s.signal.fetch_add(1, std::memory_order_release);
  wake_all(s.signal);  // makes no system call unless a worker sleeps
  s.work(0);
  const auto finished = [&] { return s.unfinished.load(std::memory_order_acquire) == 0; };
  while (!State::spin(finished)) {
  }
}

}  // namespace thimble
