// The validation layer that all tests of Vulkan devices use does report a missing barrier.
#include <gtest/gtest.h>

#include <mutex>
#include <string>
#include <vector>

#include "backends/vulkan/host/memory.h"
#include "backends/vulkan/host/vulkan_stream.h"
#include "tests/support/vulkan_messages.h"

namespace thimble::vulkan {
namespace {

template <typename T>
T must(Result<T> result) {
  if (!result.ok()) ADD_FAILURE() << result.status().message();
  return std::move(*result);
}

// The messages of the layer for two copies: a to b, and then the result of `between` to c.
std::vector<std::string> messages_of_two_copies(bool hide_the_dependency) {
  std::mutex mutex;
  std::vector<std::string> messages;
  const Instance& instance = *must(Instance::get());
  Gpu gpu = find_gpus(instance).front();
  gpu.limits.cooperative_matrix = false;  // old layers complain about them (vulkan_messages.h)
  const auto context = must(Context::open(instance, gpu, [&](const char* message) {
    const std::lock_guard lock(mutex);
    messages.emplace_back(message);
  }));
  constexpr uint64_t kBytes = 1024;
  const auto a = must(allocate(context, Place::kDevice, kBytes));
  const auto b = must(allocate(context, Place::kDevice, kBytes));
  const auto c = must(allocate(context, Place::kDevice, kBytes));
  VulkanBuffer other_b(context);  // the same memory, which the recording does not know
  other_b.size = kBytes;
  other_b.handle = b->handle;

  const auto stream = must(open_stream(context, {}, 0));
  auto recorder = stream->record(1);
  const CopyParams all{.cols = kBytes / 4, .src_stride = kBytes / 4, .dst_stride = kBytes / 4};
  recorder->record(Copy{View{a.get(), 0, kBytes}, View{b.get(), 0, kBytes}, all});
  Buffer* between = hide_the_dependency ? &other_b : b.get();
  recorder->record(Copy{View{between, 0, kBytes}, View{c.get(), 0, kBytes}, all});
  const auto program = must(stream->finish(std::move(recorder)));
  other_b.handle = VK_NULL_HANDLE;
  return messages;
}

TEST(VulkanValidation, ReportsADroppedBarrierAndNothingElse) {
  if (list_devices().back().name == "cpu") GTEST_SKIP() << "there is no Vulkan device";
  EXPECT_EQ(messages_of_two_copies(false), std::vector<std::string>());
  const std::vector<std::string> messages = messages_of_two_copies(true);
  EXPECT_FALSE(messages.empty());
  for (const std::string& message : messages)  // one message for each array of an operand
    EXPECT_NE(message.find("SYNC-HAZARD-READ-AFTER-WRITE"), std::string::npos) << message;
}

}  // namespace
}  // namespace thimble::vulkan
