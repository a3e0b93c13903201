// What only Vulkan devices promise: alignment of operands, copies, the pipeline cache on disk, and errors.
#include "backends/vulkan/host/vulkan_device.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <thread>

#include "backends/vulkan/host/memory.h"
#include "backends/vulkan/host/program.h"
#include "backends/vulkan/host/vulkan_stream.h"
#include "base/cache.h"
#include "tests/support/device_test_name.h"
#include "tests/support/seeded_model.h"
#include "tests/support/sessions.h"
#include "tests/support/vulkan_messages.h"

namespace thimble::test {
namespace {

std::vector<DeviceInfo> found() {
  std::vector<DeviceInfo> devices;
  for (DeviceInfo& info : list_devices())
    if (info.name.starts_with("vulkan")) devices.push_back(std::move(info));
  return devices;
}

std::vector<std::string> usable() {
  std::vector<std::string> names;
  for (const DeviceInfo& info : found())
    if (info.usable) names.push_back(info.name);
  return names;
}

TEST(VulkanDevice, RefusesInvalidNames) {
  for (const char* name : {"vulkan:", "vulkan:x", "vulkan:1x", "vulkan1", "vulkan:-1", "vulkan:99999999999"})
    EXPECT_EQ(open_device(name, {}).status().code(), Code::kUnsupported) << name;
}

TEST(VulkanDevice, RefusesAMissingDeviceNumber) {
  if (found().empty()) GTEST_SKIP() << "there is no Vulkan device";
  EXPECT_EQ(open_device("vulkan:" + std::to_string(found().size()), {}).status().code(),
            Code::kInvalidArgument);
}

// Runs in its own process, because drivers are searched for only once. With these variables the loader finds
// no driver. The second one is the newer name of the first; which one counts depends on the loader's age.
TEST(VulkanDeviceDeathTest, ExplainsWhyThereIsNoDevice) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  std::map<std::string, std::string> before;
  for (const char* name : {"VK_ICD_FILENAMES", "VK_DRIVER_FILES"}) {
    if (const char* files = std::getenv(name)) before[name] = files;
    setenv(name, "/nowhere.json", 1);
  }
  const auto ask = [] {
    const Status status = open_device("vulkan", {}).status();
    const bool none = status.code() == Code::kUnsupported && found().empty();
    const std::string chosen = must(open_device("auto", {.threads = 1}))->info().name;
    std::fprintf(stderr, "%s, %s\n", status.message().c_str(), chosen.c_str());
    std::exit(none && !chosen.starts_with("vulkan") ? 0 : 1);
  };
  EXPECT_EXIT(ask(), ::testing::ExitedWithCode(0), "no driver was found");
  for (const char* name : {"VK_ICD_FILENAMES", "VK_DRIVER_FILES"})
    before.contains(name) ? setenv(name, before[name].c_str(), 1) : unsetenv(name);
}

// More often than a driver can be loaded and unloaded in one process.
TEST(VulkanDevice, OpensAgainAndAgain) {
  if (usable().empty()) GTEST_SKIP() << "there is no Vulkan device";
  for (int i = 0; i < 60; ++i) {
    SCOPED_TRACE("opened " + std::to_string(i) + " times before");
    const auto device = must(open_device("vulkan", strictly()));
    EXPECT_EQ(device->info().name, usable().front());
    const auto buffer = must(device->alloc(MemKind::kWorkspace, sizeof i));
    const View view{buffer.get(), 0, buffer->size};
    must(device->write(view, &i));
    int got = -1;
    must(device->read(&got, view));
    EXPECT_EQ(got, i);
  }
}

TEST(VulkanDevice, AutoSkipsSoftwareDevices) {
  for (const DeviceInfo& info : found())
    if (!info.software) GTEST_SKIP() << "there is more than the software driver";
  EXPECT_EQ(must(open_device("auto", {.threads = 1}))->info().name.find("vulkan"), std::string::npos);
}

class Vulkan : public ::testing::TestWithParam<std::string> {
 protected:
  static std::shared_ptr<Device> open(DeviceOptions options = {}) {
    return must(open_device(GetParam(), strictly(options)));
  }
  static std::vector<uint32_t> count_up(size_t n, uint32_t first) {
    std::vector<uint32_t> words(n);
    std::iota(words.begin(), words.end(), first);
    return words;
  }
  static View all(const std::unique_ptr<Buffer>& buffer) { return {buffer.get(), 0, buffer->size}; }
  template <typename T>
  static std::vector<T> get(Device& device, const View& view) {
    std::vector<T> values(view.bytes / sizeof(T));
    must(device.read(values.data(), view));
    return values;
  }
  // Copies rows of 4 words with the op.
  static void copy_rows(Stream& stream, const View& to, const View& from, uint32_t rows) {
    auto recorder = stream.record(rows);
    recorder->record(Copy{from, to, {.cols = 4, .src_stride = 4, .dst_stride = 4, .rows = kStepRows}});
    const auto program = must(stream.finish(std::move(recorder)));
    must(stream.submit(*program, 0, 1, {.n_rows = rows}, {}));
    must(stream.wait());
  }
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Vulkan);

TEST_P(Vulkan, SaysWhatItIs) {
  const DeviceInfo info = open()->info();
  EXPECT_EQ(info.name, GetParam());
  EXPECT_NE(info.description.find("Vulkan 1."), std::string::npos) << info.description;
  EXPECT_NE(info.description.find("subgroups of"), std::string::npos) << info.description;
  EXPECT_GT(info.free_bytes, 0u);
  EXPECT_LE(info.free_bytes, info.total_bytes);
}

TEST_P(Vulkan, MemoryStartsZeroedAndCopiesMayExceedTheStagingBuffer) {
  const auto device = open();
  const std::vector<uint32_t> words = count_up((5 << 20) + 3, 7);
  for (const MemKind kind : {MemKind::kWeights, MemKind::kIo}) {
    const auto a = must(device->alloc(kind, words.size() * 4));
    const auto b = must(device->alloc(MemKind::kPool, words.size() * 4));
    EXPECT_EQ(a->mapped != nullptr, kind == MemKind::kIo);
    EXPECT_EQ(get<uint32_t>(*device, all(a)), std::vector<uint32_t>(words.size()));
    must(device->write(all(a), words.data()));
    must(device->copy(all(b), all(a)));
    EXPECT_EQ(get<uint32_t>(*device, all(b)), words);
    // An odd number of bytes, too.
    const std::vector<uint8_t> some{1, 2, 3};
    must(device->write(all(b).slice(5, 3), some.data()));
    EXPECT_EQ(get<uint8_t>(*device, all(b).slice(5, 3)), some);
    EXPECT_EQ(get<uint32_t>(*device, all(b).slice(8, 4))[0], words[2]);
  }
}

TEST_P(Vulkan, AcceptsEmptyAndOddSizedBuffers) {
  const auto device = open();
  for (const uint64_t bytes : {0, 1, 3, 17, 4097}) {
    const auto buffer = must(device->alloc(MemKind::kWorkspace, bytes));
    EXPECT_EQ(buffer->size, bytes);
    std::vector<uint8_t> values(bytes, 9);
    must(device->write(all(buffer), values.data()));
    EXPECT_EQ(get<uint8_t>(*device, all(buffer)), values);
  }
}

TEST_P(Vulkan, AnOperandMayStartAtAnyWord) {
  const auto device = open();
  const auto stream = must(device->open_stream({}, 0));
  const auto from = must(device->alloc(MemKind::kWorkspace, 4096));
  const auto to = must(device->alloc(MemKind::kWorkspace, 4096));
  const std::vector<uint32_t> words = count_up(1024, 1);
  must(device->write(all(from), words.data()));
  for (const uint32_t source : {0u, 1u, 3u, 4u, 63u, 64u, 1020u})
    for (const uint32_t target : {0u, 2u, 5u, 255u, 1020u}) {
      must(device->write(all(to), std::vector<uint32_t>(1024).data()));
      copy_rows(*stream, all(to).slice(target * 4, 16), all(from).slice(source * 4, 16), 1);
      std::vector<uint32_t> expected(1024);
      std::copy_n(&words[source], 4, &expected[target]);
      EXPECT_EQ(get<uint32_t>(*device, all(to)), expected) << source << " to " << target;
    }
}

TEST_P(Vulkan, RefusesOperandsThatDoNotFit) {
  const auto device = open();
  const auto stream = must(device->open_stream({}, 0));
  const auto buffer = must(device->alloc(MemKind::kWorkspace, 4096));
  const auto record = [&](const View& from, uint32_t stride, uint32_t rows) {
    auto recorder = stream->record(rows);
    recorder->record(
        Copy{from, all(buffer), {.cols = 4, .src_stride = stride, .dst_stride = stride, .rows = kStepRows}});
    return stream->finish(std::move(recorder)).status();
  };
  EXPECT_EQ(record({buffer.get(), 4000, 100}, 4, 1).code(), Code::kInternal);
  EXPECT_EQ(record({buffer.get(), 2, 100}, 4, 1).code(), Code::kInternal);
  EXPECT_EQ(record(all(buffer), 0, 1u << 31).code(), Code::kUnsupported) << "more rows than a grid has";
  must(record(all(buffer), 4, 1));
}

TEST_P(Vulkan, RefusesSessionsThatItCannotBind) {
  const auto device = open({.portable = true});
  const auto stream = must(device->open_stream({}, 0));
  EXPECT_EQ(device->info().max_binding, 128u << 20);
  const auto large = must(device->alloc(MemKind::kWorkspace, (128 << 20) + 4));
  auto recorder = stream->record(1);
  recorder->record(Copy{all(large), all(large), {.cols = 4, .src_stride = 4, .dst_stride = 4}});
  const Status status = stream->finish(std::move(recorder)).status();
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_NE(status.message().find("128 MiB"), std::string::npos) << status.message();

  // The keys of a head are bound at once, at a multiple of the descriptors' alignment, which is at most 256.
  const ModelShape model{.layers = 1, .d_model = 1024, .heads = 8, .kv_heads = 8, .head_dim = 128};
  // If a layer does not fit, the limit for a run is half, because a window must hold a whole run.
  const auto refused = [&](uint32_t run, uint32_t layer) {
    return device
        ->needs(model, {.chunk = 32, .run_capacity = run, .layer_entries = layer, .view_capacity = 64})
        .status();
  };
  const auto expect_refused = [&](uint32_t run, uint32_t layer, const char* most) {
    const Status said = refused(run, layer);
    EXPECT_EQ(said.code(), Code::kUnsupported);
    EXPECT_NE(said.message().find(most), std::string::npos) << said.message();
  };
  const uint32_t fits = (128 << 20) / 256 - 1;
  must(refused(fits, fits));
  expect_refused(fits + 1, fits + 1, "262143 entries");
  must(refused(fits / 2, 8 * fits));
  expect_refused(fits / 2 + 1, 8 * fits, "262143 entries");
}

TEST_P(Vulkan, RefusesHeadsThatItsShadersDoNotSupport) {
  const auto status = [](const Device& device, uint32_t head_dim, bool selects) {
    const ModelShape model{
        .layers = 1, .d_model = 1024, .heads = 8, .kv_heads = 8, .head_dim = head_dim, .d_ff = 64};
    return device
        .needs(model, {.chunk = 32,
                       .run_capacity = 64,
                       .layer_entries = 512,
                       .view_capacity = 64,
                       .positions = selects ? 64u : 0u})
        .status();
  };
  const auto refuses = [&](const Device& device, uint32_t head_dim, bool selects, const char* most) {
    const Status refused = status(device, head_dim, selects);
    EXPECT_EQ(refused.code(), Code::kUnsupported);
    EXPECT_NE(refused.message().find(most), std::string::npos) << refused.message();
  };
  const auto device = open(), small = open({.portable = true});
  for (const bool selects : {false, true}) {
    for (const uint32_t head_dim : {2u, 576u}) must(status(*device, head_dim, selects));
    for (const uint32_t head_dim : {63u, 578u}) refuses(*device, head_dim, selects, "up to 576: use");
  }
  must(status(*small, 272, false));  // its queries, keys and counted parts share 16 KiB
  refuses(*small, 274, false, "up to 272: use");
}

TEST_P(Vulkan, AFullDeviceReportsItAndStaysUsable) {
  const auto device = open();
  const auto refused = device->alloc(MemKind::kPool, device->info().total_bytes + (64 << 10));
  EXPECT_EQ(refused.status().code(), Code::kOutOfMemory) << refused.status().message();
  must(device->alloc(MemKind::kPool, 1 << 20));
}

TEST_P(Vulkan, RunsSegmentsInOrderAgainAndAgain) {
  const auto device = open();
  const auto stream = must(device->open_stream({}, 0));
  const auto a = must(device->alloc(MemKind::kIo, 4096)), b = must(device->alloc(MemKind::kWorkspace, 4096)),
             c = must(device->alloc(MemKind::kIo, 4096));
  auto recorder = stream->record(4);
  const CopyParams rows{.cols = 4, .src_stride = 4, .dst_stride = 4, .rows = kStepRows};
  recorder->segment();
  recorder->record(Copy{all(a), all(b), rows});
  recorder->segment();
  recorder->segment();
  recorder->record(Copy{all(b), all(c), rows});
  const auto program = must(stream->finish(std::move(recorder)));
  ASSERT_EQ(program->segments, 3u);
  for (uint32_t run = 0; run < 50; ++run) {
    const std::vector<uint32_t> words = count_up(16, run * 100);
    const uint32_t n = run % 5;
    std::memcpy(a->mapped, words.data(), 64);
    std::memset(c->mapped, 0xff, 64);
    const StepParams step{.n_rows = n};
    must(stream->submit(*program, 0, 0, step, {}));
    if (run % 2) {
      must(stream->submit(*program, 0, 3, step, {}));
      must(stream->submit(*program, 0, 3, step, {}));
    } else {
      for (uint32_t s = 0; s < 3; ++s) must(stream->submit(*program, s, s + 1, step, {}));
    }
    must(stream->wait());
    std::vector<uint32_t> expected(16, 0xffffffffu), got(16);
    std::copy_n(words.begin(), n * 4, expected.begin());
    std::memcpy(got.data(), c->mapped, 64);
    ASSERT_EQ(got, expected) << "run " << run;
  }
  EXPECT_EQ(stream->submit(*program, 0, 1, {.n_rows = 5}, {}).code(), Code::kInternal);
  EXPECT_EQ(stream->submit(*program, 2, 4, {.n_rows = 1}, {}).code(), Code::kInternal);
}

// A program may be destroyed before its stream, after it, or while it runs.
TEST_P(Vulkan, ProgramsAndStreamsAreDestroyedInAnyOrder) {
  const auto device = open();
  const auto a = must(device->alloc(MemKind::kWorkspace, 1 << 20)),
             b = must(device->alloc(MemKind::kWorkspace, 1 << 20));
  for (const bool stream_first : {false, true}) {
    auto stream = must(device->open_stream({}, 0));
    auto recorder = stream->record(1 << 14);
    recorder->record(
        Copy{all(a), all(b), {.cols = 16, .src_stride = 16, .dst_stride = 16, .rows = kStepRows}});
    auto program = must(stream->finish(std::move(recorder)));
    must(stream->submit(*program, 0, 1, {.n_rows = 1 << 14}, {}));
    if (stream_first) stream.reset();
    program.reset();
  }
  auto stream = must(device->open_stream({}, 0));
  auto abandoned = stream->record(1);
  abandoned->segment();
}

TEST_P(Vulkan, StreamsOnSeveralThreadsShareADevice) {
  const auto device = open();
  std::vector<std::thread> threads;
  std::vector<uint32_t> right(4);
  for (uint32_t t = 0; t < right.size(); ++t)
    threads.emplace_back([&, t] {
      const auto stream = must(device->open_stream({}, 0));
      const auto a = must(device->alloc(MemKind::kWorkspace, 4096)),
                 b = must(device->alloc(MemKind::kWorkspace, 4096));
      for (uint32_t run = 0; run < 20; ++run) {
        const std::vector<uint32_t> words = count_up(1024, t * 10000 + run);
        must(device->write(all(a), words.data()));
        copy_rows(*stream, all(b), all(a), 256);
        right[t] += get<uint32_t>(*device, all(b)) == words;
      }
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(right, std::vector<uint32_t>(4, 20));
}

TEST_P(Vulkan, MeasuresItsRates) {
  const Rates rates = must(open()->measure());
  std::printf("%s: %.1f GB/s, %.1f GFLOP/s\n", GetParam().c_str(), rates.bytes_per_second * 1e-9,
              rates.flop_per_second * 1e-9);
  EXPECT_GT(rates.bytes_per_second, 0.1e9);
  EXPECT_LT(rates.bytes_per_second, 20e12);
  EXPECT_GT(rates.flop_per_second, 0.1e9);
}

// A device that is opened again finds its pipelines on disk; if the files are damaged, it compiles them
// again.
TEST_P(Vulkan, CachesPipelinesOnDisk) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / ("thimble-" + std::to_string(std::random_device()()));
  const char* old = std::getenv("XDG_CACHE_HOME");
  const std::string before = old ? old : "";
  setenv("XDG_CACHE_HOME", folder.c_str(), 1);
  const auto use = [&] {
    auto device = open();
    const auto stream = must(device->open_stream({}, 0));
    const auto buffer = must(device->alloc(MemKind::kWorkspace, 4096));
    copy_rows(*stream, all(buffer).slice(2048, 16), all(buffer).slice(0, 16), 1);
    return device;
  };
  const auto files = [&] {
    std::vector<fs::path> paths;
    for (const auto& entry : fs::directory_iterator(folder / "thimble")) paths.push_back(entry.path());
    return paths;
  };
  {
    const auto device = use();  // not closed when the program is killed
    ASSERT_EQ(files().size(), 1u);
  }
  const uintmax_t size = fs::file_size(files()[0]);
  use();
  ASSERT_EQ(files().size(), 1u);
  fs::resize_file(files()[0], size / 2);
  use();
  EXPECT_EQ(fs::file_size(files()[0]), size);
  fs::remove_all(folder);
  setenv("XDG_CACHE_HOME", "/proc/nowhere", 1);
  use();
  old ? setenv("XDG_CACHE_HOME", before.c_str(), 1) : unsetenv("XDG_CACHE_HOME");
}

// Tests below the device interface, where limits can be changed and calls can fail.
class VulkanContext : public ::testing::Test {
 protected:
  void SetUp() override {
    if (usable().empty()) GTEST_SKIP() << "there is no Vulkan device";
    gpu_ = vulkan::find_gpus(*must(vulkan::Instance::get())).front();
  }
  std::shared_ptr<vulkan::Context> open() {
    return must(vulkan::Context::open(*must(vulkan::Instance::get()), gpu_, strictly().messages));
  }

  // Three copies of 16 words, each from where the previous one wrote.
  struct Copies {
    static constexpr uint64_t kBytes = 64;
    std::unique_ptr<vulkan::VulkanBuffer> words;
    std::unique_ptr<Stream> stream;
    std::unique_ptr<Program> program;

    explicit Copies(const std::shared_ptr<vulkan::Context>& context)
        : words(must(vulkan::allocate(context, vulkan::Place::kHost, 4 * kBytes))),
          stream(must(vulkan::open_stream(context, {}, 0))) {
      std::memset(words->mapped, 0, words->size);
      std::memset(words->mapped, 7, kBytes);
      auto recorder = stream->record(1);
      for (uint64_t i = 0; i < 3; ++i)
        recorder->record(Copy{View{words.get(), i * kBytes, kBytes},
                              View{words.get(), (i + 1) * kBytes, kBytes},
                              {.cols = 16, .src_stride = 16, .dst_stride = 16}});
      program = must(stream->finish(std::move(recorder)));
    }
    Status run() {
      THIMBLE_TRY(stream->submit(*program, 0, 1, {.n_rows = 1}, {}));
      return stream->wait();
    }
    bool right() const {
      return std::memcmp(words->mapped, static_cast<char*>(words->mapped) + 3 * kBytes, kBytes) == 0;
    }
  };

  vulkan::Gpu gpu_;
};

// How often the following context was asked to submit work.
int submits = 0;
PFN_vkQueueSubmit submit_really = nullptr;
PFN_vkWaitSemaphores wait_really = nullptr;

TEST_F(VulkanContext, LongWorkIsSubmittedInPieces) {
  // A copy accesses 128 bytes in total, and a submission may take 50 ms.
  for (const auto& [bytes_per_second, expected] :
       {std::pair(1e9, 1), std::pair(5200.0, 2), std::pair(100.0, 3)}) {
    gpu_.limits.bytes_per_second = bytes_per_second;
    const auto context = open();
    submit_really = context->vk.QueueSubmit;
    context->vk.QueueSubmit = [](VkQueue queue, uint32_t count, const VkSubmitInfo* info, VkFence fence) {
      ++submits;
      return submit_really(queue, count, info, fence);
    };
    Copies copies(context);
    submits = 0;
    for (int run = 1; run <= 2; ++run) {
      must(copies.run());
      EXPECT_EQ(submits, run * expected) << bytes_per_second << " bytes a second";
    }
    EXPECT_TRUE(copies.right());
  }
}

// Memory that the driver allocated and that was not freed, by call.
std::map<VkDeviceMemory, uint64_t> taken;
PFN_vkAllocateMemory allocate_really = nullptr;
PFN_vkFreeMemory free_really = nullptr;

TEST_F(VulkanContext, ASessionUsesItsPlannedMemory) {
  const auto context = open();
  allocate_really = context->vk.AllocateMemory;
  context->vk.AllocateMemory = [](VkDevice device, const VkMemoryAllocateInfo* info,
                                  const VkAllocationCallbacks* callbacks, VkDeviceMemory* memory) {
    const VkResult result = allocate_really(device, info, callbacks, memory);
    if (result == VK_SUCCESS) taken[*memory] = info->allocationSize;
    return result;
  };
  free_really = context->vk.FreeMemory;
  context->vk.FreeMemory = [](VkDevice device, VkDeviceMemory memory,
                              const VkAllocationCallbacks* callbacks) {
    taken.erase(memory);
    free_really(device, memory, callbacks);
  };
  const auto sum = [] {
    uint64_t bytes = 0;
    for (const auto& [memory, size] : taken) bytes += size;
    return bytes;
  };
  const auto device = must(vulkan::make_device(context));
  const uint64_t staging = sum();
  EXPECT_EQ(staging, 2 * vulkan::Staging::kBytes);
  const SeededModel model = seeded_model();
  for (const SessionOptions& options :
       {SessionOptions{.pool = 100, .chunk = 24, .max_new = 10},
        SessionOptions{
            .retainer = model.retainer, .retention = Retention::kLocret, .pool = 60, .chunk = 24}}) {
    const auto session = open_session(model.model, options, device);
    const MemoryPlan& plan = session->plan();
    // The arenas: the planned total, without host memory, the device's fixed part and programs.
    const uint64_t arenas = plan.total - plan.fixed - host_bytes(*model.model, plan);
    const uint64_t step =
        vulkan::StreamState::kStep + sizeof(StepParams) + plan.dimensions.runs.size() * sizeof(HeadState);
    EXPECT_GT(arenas, 0u);
    EXPECT_GE(sum(), staging + arenas + step);
    EXPECT_LE(sum(), staging + arenas + step + taken.size() * 256) << "what drivers round up";
    EXPECT_LE(step, plan.programs) << "it is planned as part of the programs";
  }
  EXPECT_EQ(sum(), staging);
}

TEST_F(VulkanContext, DeviceLossIsAnErrorAndTheNextDeviceWorks) {
  {
    const auto context = open();
    Copies copies(context);
    must(copies.run());
    submit_really = context->vk.QueueSubmit;
    context->vk.QueueSubmit = [](VkQueue, uint32_t, const VkSubmitInfo*, VkFence) {
      return VK_ERROR_DEVICE_LOST;
    };
    EXPECT_EQ(copies.run().code(), Code::kDeviceLost);
    EXPECT_EQ(copies.run().code(), Code::kDeviceLost);
    context->vk.QueueSubmit = submit_really;
    wait_really = context->vk.WaitSemaphores;
    context->vk.WaitSemaphores = [](VkDevice device, const VkSemaphoreWaitInfo* info, uint64_t timeout) {
      wait_really(device, info, timeout);
      return VK_ERROR_DEVICE_LOST;
    };
    EXPECT_EQ(copies.run().code(), Code::kDeviceLost);
  }
  Copies copies(open());
  must(copies.run());
  EXPECT_TRUE(copies.right());
}

TEST_F(VulkanContext, OutOfMemoryIsAnErrorAndTheDeviceStaysUsable) {
  const auto context = open();
  allocate_really = context->vk.AllocateMemory;
  for (const VkResult result : {VK_ERROR_OUT_OF_DEVICE_MEMORY, VK_ERROR_OUT_OF_HOST_MEMORY}) {
    static VkResult answer;
    answer = result;
    context->vk.AllocateMemory = [](VkDevice, const VkMemoryAllocateInfo*, const VkAllocationCallbacks*,
                                    VkDeviceMemory*) { return answer; };
    EXPECT_EQ(vulkan::allocate(context, vulkan::Place::kDevice, 4096).status().code(), Code::kOutOfMemory);
    EXPECT_EQ(vulkan::open_stream(context, {}, 0).status().code(), Code::kOutOfMemory);
    context->vk.AllocateMemory = allocate_really;
    Copies copies(context);
    must(copies.run());
    EXPECT_TRUE(copies.right());
  }
  EXPECT_EQ(context->check(VK_ERROR_UNKNOWN, "running").code(), Code::kInternal);
}

INSTANTIATE_TEST_SUITE_P(On, Vulkan, ::testing::ValuesIn(usable()), device_test_name);

}  // namespace
}  // namespace thimble::test
