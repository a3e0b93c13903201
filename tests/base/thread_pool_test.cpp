// Worker threads: every item runs once, no job waits for a sleeping worker, idle workers use no processor
// time.
#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <thread>
#include <vector>

namespace thimble {
namespace {

TEST(ThreadPool, RunsEveryItemOnceOnAWorkerInRange) {
  for (uint32_t threads : {1u, 2u, 3u, 16u}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.size(), threads);
    for (uint32_t items : {0u, 1u, 2u, 5u, 1000u}) {
      std::vector<std::atomic<uint32_t>> runs(items);
      std::atomic<uint32_t> strays{0};
      pool.run(items, [&](uint32_t item, uint32_t worker) {
        runs[item].fetch_add(1);
        if (worker >= pool.size()) strays.fetch_add(1);
      });
      for (uint32_t i = 0; i < items; ++i) ASSERT_EQ(runs[i].load(), 1u) << "item " << i << " of " << items;
      EXPECT_EQ(strays.load(), 0u);
    }
  }
}

// Jobs of different sizes and bodies, back to back and with pauses in which the workers fall asleep, on far
// more threads than cores. Plain integers: what a body writes must be visible when run() returns.
TEST(ThreadPool, KeepsManyShortJobsApart) {
  ThreadPool pool(8);
  std::vector<uint64_t> slots(64);
  uint64_t expected = 0;
  for (uint32_t job = 0; job < 20000; ++job) {
    const uint32_t items = 1 + job % 7;
    pool.run(items, [&slots, job](uint32_t item, uint32_t) { slots[item] += job; });
    expected += uint64_t{job} * items;
    if (job % 5000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  uint64_t sum = 0;
  for (uint64_t s : slots) sum += s;
  EXPECT_EQ(sum, expected);
}

TEST(ThreadPool, AWorkerRunsOneItemAtATime) {
  ThreadPool pool(6);
  std::vector<std::atomic<uint32_t>> busy(6);
  std::atomic<uint32_t> collisions{0};
  for (int job = 0; job < 50; ++job)
    pool.run(60, [&](uint32_t, uint32_t worker) {
      if (busy[worker].fetch_add(1) != 0) collisions.fetch_add(1);
      std::this_thread::yield();
      busy[worker].fetch_sub(1);
    });
  EXPECT_EQ(collisions.load(), 0u);
}

// std::clock counts the processor time of all threads. Three workers that spin for 300 ms use at least 300 ms
// on an idle machine, and a part of it on a busy one. Sleeping workers use none; the limit is 20 ms.
TEST(ThreadPool, SleepsWhenIdle) {
  ThreadPool pool(4);
  pool.run(100, [](uint32_t, uint32_t) {});
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const std::clock_t before = std::clock();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const double seconds = static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC;
  EXPECT_LT(seconds, 0.02);
}

}  // namespace
}  // namespace thimble
