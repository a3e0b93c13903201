// The mutex that is handed to the thread that waited longest.
#include "base/fair_mutex.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

namespace thimble {
namespace {

TEST(FairMutex, GoesToTheThreadThatWaitedLongest) {
  FairMutex mutex;
  std::vector<int> order;
  mutex.lock();
  const uint64_t second = mutex.draw();
  std::thread third([&] {
    const std::lock_guard lock(mutex);
    order.push_back(3);
  });
  order.push_back(1);
  mutex.unlock();
  // The mutex is free and the third thread is ready to take it, but it is the second thread's turn.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  mutex.wait(second);
  order.push_back(2);
  mutex.unlock();
  third.join();
  EXPECT_EQ(order, (std::vector{1, 2, 3}));
}

TEST(FairMutex, IsHeldByOneThreadAtATime) {
  FairMutex mutex;
  uint64_t sum = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        const std::lock_guard lock(mutex);
        ++sum;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(sum, 2000u);
}

}  // namespace
}  // namespace thimble
