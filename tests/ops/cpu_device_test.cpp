// What the CPU device reports about itself, its memory, and the programs that it refuses.
#include "backends/cpu/host/cpu_device.h"

#include <gtest/gtest.h>
#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "backends/cpu/kernels.h"
#include "backends/cpu/kv_scratch.h"
#include "base/system.h"

namespace thimble {
namespace {

std::shared_ptr<Device> open(uint32_t threads = 2) {
  auto device = open_cpu_device(threads);
  EXPECT_TRUE(device.ok()) << device.status().message();
  return *device;
}

constexpr ModelShape kModel{
    .layers = 2, .d_model = 64, .heads = 4, .kv_heads = 2, .head_dim = 16, .d_ff = 128, .vocab = 100};
constexpr SessionShape kSession{.chunk = 32,
                                .run_capacity = 100,
                                .layer_entries = 200,
                                .reach = 132,
                                .view_capacity = 132,
                                .positions = 1000};

TEST(CpuDevice, SaysWhatItIs) {
  const DeviceInfo info = open()->info();
  EXPECT_EQ(info.name, "cpu");
  EXPECT_FALSE(info.description.empty());
  EXPECT_GE(info.total_bytes, info.free_bytes);
  EXPECT_GT(info.free_bytes, 0u);
  EXPECT_EQ(info.view_element_bytes, 4u);
}

TEST(CpuDevice, UsesOneThreadPerCoreByDefault) {
  EXPECT_GE(core_count(), 1u);
  EXPECT_TRUE(open_cpu_device(0).ok());
  const auto many = open_cpu_device(1u << 20);
  ASSERT_FALSE(many.ok());
  EXPECT_EQ(many.status().code(), Code::kInvalidArgument);
}

TEST(CpuDevice, NeedsScratchForDenseAndKvOps) {
  const auto device = open(3);
  const auto needs = device->needs(kModel, kSession);
  ASSERT_TRUE(needs.ok());
  EXPECT_GE(needs->workspace, cpu::kv_scratch_bytes(kModel, kSession, 3));
  EXPECT_EQ(needs->workspace % 64, 0u);
  EXPECT_GE(needs->fixed, 3u * 64 * 1024);  // a stack for each worker
  const auto fewer = open(1)->needs(kModel, kSession);
  EXPECT_LT(fewer->workspace, needs->workspace);
}

TEST(CpuDevice, AllocatesZeroedAlignedMemoryAndFreesIt) {
  const auto device = open();
  constexpr uint64_t kBytes = 32 << 20;
  const uint64_t before = resident_anonymous_bytes();
  {
    auto buffer = device->alloc(MemKind::kPool, kBytes);
    ASSERT_TRUE(buffer.ok());
    auto* data = static_cast<unsigned char*>((*buffer)->mapped);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 64, 0u);
    EXPECT_EQ((*buffer)->size, kBytes);
    for (uint64_t i = 0; i < kBytes; i += 97) {
      ASSERT_EQ(data[i], 0) << i;
      data[i] = 1;
    }
    if (before) {
      EXPECT_GT(resident_anonymous_bytes(), before + kBytes / 2);
    }
  }
  if (before) {
    EXPECT_LT(resident_anonymous_bytes(), before + kBytes / 2);
  }
}

TEST(CpuDevice, ReportsThatThereIsNoMemory) {
  const auto buffer = open()->alloc(MemKind::kPool, uint64_t{1} << 60);
  ASSERT_FALSE(buffer.ok());
  EXPECT_EQ(buffer.status().code(), Code::kOutOfMemory);
}

TEST(CpuDevice, ShowsHostMemoryWithoutACopyAndDoesNotWriteIt) {
  const auto device = open();
  const std::vector<int> values = {1, 2, 3, 4};
  auto buffer = device->import_host(values.data(), sizeof(int) * values.size());
  ASSERT_TRUE(buffer.ok());
  EXPECT_EQ((*buffer)->mapped, values.data());
  int got[2];
  ASSERT_TRUE(device->read(got, {buffer->get(), 4, 8}).ok());
  EXPECT_EQ(got[0], 2);
  EXPECT_FALSE(device->write({buffer->get(), 0, 8}, got).ok());
  EXPECT_FALSE(device->read(got, {buffer->get(), 12, 8}).ok());
  auto other = device->alloc(MemKind::kIo, 64);
  ASSERT_TRUE(other.ok());
  ASSERT_TRUE(device->copy({other->get(), 16, 8}, {buffer->get(), 8, 8}).ok());
  EXPECT_EQ(static_cast<int*>((*other)->mapped)[4], 3);
  EXPECT_FALSE(device->copy({other->get(), 0, 8}, {buffer->get(), 0, 4}).ok());
}

class CpuPrograms : public ::testing::Test {
 protected:
  void SetUp() override {
    device = open();
    auto needs = device->needs(kModel, kSession);
    auto workspace = device->alloc(MemKind::kWorkspace, needs->workspace);
    auto memory = device->alloc(MemKind::kIo, 4096);
    ASSERT_TRUE(workspace.ok() && memory.ok());
    scratch = std::move(*workspace);
    io = std::move(*memory);
    auto opened = device->open_stream({scratch.get(), 0, needs->workspace}, 0);
    ASSERT_TRUE(opened.ok());
    stream = std::move(*opened);
  }
  View floats(uint32_t first, uint32_t count) { return {io.get(), first * 4, count * 4}; }
  float* values() { return static_cast<float*>(io->mapped); }

  std::shared_ptr<Device> device;
  std::unique_ptr<Buffer> scratch, io;
  std::unique_ptr<Stream> stream;
};

TEST_F(CpuPrograms, RunRangesOfSegmentsWithTheStepsValues) {
  auto recorder = stream->record(4);
  for (uint32_t s = 0; s < 3; ++s) {  // segment s copies row s of [3][4] to row s + 1
    recorder->segment();
    recorder->record(Copy{floats(s * 4, 4),
                          floats(s * 4 + 4, 4),
                          {.cols = 1, .src_stride = 1, .dst_stride = 1, .rows = kStepRows}});
  }
  auto program = stream->finish(std::move(recorder));
  ASSERT_TRUE(program.ok());
  EXPECT_EQ((*program)->segments, 3u);
  for (int i = 0; i < 4; ++i) values()[i] = 1;
  ASSERT_TRUE(stream->submit(**program, 0, 2, {.n_rows = 3}, {}).ok());
  ASSERT_TRUE(stream->wait().ok());
  EXPECT_EQ(values()[8 + 2], 1);
  EXPECT_EQ(values()[8 + 3], 0);   // the fourth row was not requested
  EXPECT_EQ(values()[12 + 2], 0);  // neither was the third segment
  ASSERT_TRUE(stream->submit(**program, 2, 3, {.n_rows = 3}, {}).ok());
  EXPECT_EQ(values()[12 + 2], 1);
  EXPECT_FALSE(stream->submit(**program, 2, 4, {.n_rows = 3}, {}).ok());
  EXPECT_EQ((*program)->parts(2), 1u);  // a copy is too short to divide
  values()[12 + 2] = 0;
  ASSERT_TRUE(stream->submit_part(**program, 2, 0, {.n_rows = 3}, {}).ok());
  EXPECT_EQ(values()[12 + 2], 1);
  EXPECT_FALSE(stream->submit_part(**program, 2, 1, {.n_rows = 3}, {}).ok());
  EXPECT_FALSE(stream->submit(**program, 0, 3, {.n_rows = 5}, {}).ok());
}

#ifdef __linux__
// Two sessions share the workers: one reads a long text, a segment of many parts, and the other makes single
// steps. A step waits for the part that runs, and not for the reading. The test counts turns: each part of
// the reading marks its cell, and a step copies the cells during its own turn.
TEST(CpuDevice, LetsAStepWaitForAPartOfAReadingAndNotForAllOfIt) {
  constexpr uint32_t kParts = 300, kSteps = 20, kWidth = 512, kRows = 64;
  constexpr uint64_t kFloat = sizeof(float);
  // Each product of the reading is a part of its own: about a millisecond.
  const double part_seconds = 2.0 * kRows * kWidth * kWidth / cpu::kernels().flop_per_second;
  const auto opened = open_cpu_device(1, part_seconds);
  ASSERT_TRUE(opened.ok());
  Device& device = **opened;
  const ModelShape model{.layers = 1,
                         .d_model = kWidth,
                         .heads = 4,
                         .kv_heads = 2,
                         .head_dim = 16,
                         .d_ff = kWidth,
                         .vocab = 100};
  SessionShape session = kSession;
  session.chunk = kRows;
  const auto needs = device.needs(model, session);
  ASSERT_TRUE(needs.ok());
  const auto alloc = [&](uint64_t bytes) { return std::move(*device.alloc(MemKind::kIo, bytes)); };
  const auto view = [](const std::unique_ptr<Buffer>& buffer) { return View{buffer.get(), 0, buffer->size}; };
  const auto scratch = alloc(needs->workspace), other_scratch = alloc(needs->workspace);
  const auto reader = device.open_stream(view(scratch), 0),
             stepper = device.open_stream(view(other_scratch), 0);
  ASSERT_TRUE(reader.ok() && stepper.ok());

  const auto cells = alloc((kParts + 1) * kFloat), seen = alloc((kParts + 1) * kFloat);
  const auto x = alloc(kRows * kWidth * kFloat), y = alloc(kRows * kWidth * kFloat),
             w = alloc(kWidth * kWidth * kFloat);
  Weight weight;
  static_cast<View&>(weight) = view(w);
  weight.type = DType::kF32;
  weight.rows = weight.cols = kWidth;

  auto recorder = (*reader)->record(kRows);
  recorder->segment();
  for (uint32_t part = 0; part < kParts; ++part) {
    recorder->record(Linear{view(x),
                            weight,
                            View(),
                            view(y),
                            {.in_cols = kWidth, .out_cols = kWidth, .x_stride = kWidth, .y_stride = kWidth}});
    recorder->record(Copy{View{cells.get(), part * kFloat, kFloat},
                          View{cells.get(), (part + 1) * kFloat, kFloat},
                          {.cols = 1, .src_stride = 0, .dst_stride = 0}});
  }
  const auto reading = (*reader)->finish(std::move(recorder));
  ASSERT_TRUE(reading.ok()) << reading.status().message();
  ASSERT_GE((*reading)->parts(0), kParts);

  recorder = (*stepper)->record(1);
  recorder->segment();
  recorder->record(Copy{view(cells), view(seen), {.cols = kParts + 1, .src_stride = 1, .dst_stride = 1}});
  const auto step = (*stepper)->finish(std::move(recorder));
  ASSERT_TRUE(step.ok()) << step.status().message();

  static_cast<float*>(cells->mapped)[0] = 1;
  uint32_t between = 0;  // steps that had their turn between two parts of the reading
  std::thread thread([&] {
    // A thread that wakes may drive out the one that woke it, which makes any lock look fair. A batch thread
    // does not.
    const sched_param priority{};
    EXPECT_EQ(sched_setscheduler(0, SCHED_BATCH, &priority), 0);
    const auto* marks = static_cast<const float*>(seen->mapped) + 1;
    for (uint32_t before = 0; before < kParts;) {
      ASSERT_TRUE((*stepper)->submit(**step, 0, 1, {.n_rows = 1}, {}).ok());
      const auto done = static_cast<uint32_t>(std::count(marks, marks + kParts, 1.0f));
      if (done == before) std::this_thread::yield();  // the reader has not asked again yet
      if (before < done && done < kParts) ++between;
      before = done;
    }
  });
  const Status read = (*reader)->submit(**reading, 0, 1, {.n_rows = kRows}, {});
  thread.join();
  EXPECT_TRUE(read.ok()) << read.message();
  EXPECT_GE(between, kSteps) << "of a reading of " << (*reading)->parts(0) << " parts";
}
#endif

TEST_F(CpuPrograms, RefuseMatricesThatDoNotFitTheOp) {
  const auto status_of = [&](DType type, uint32_t rows, uint32_t cols, uint32_t bytes) {
    Weight w;
    static_cast<View&>(w) = {io.get(), 0, bytes};
    w.type = type;
    w.rows = rows;
    w.cols = cols;
    auto recorder = stream->record(1);
    recorder->segment();
    recorder->record(Linear{floats(0, 64),
                            w,
                            View(),
                            floats(64, 8),
                            {.in_cols = cols, .out_cols = 8, .x_stride = 64, .y_stride = 8}});
    return stream->finish(std::move(recorder)).status();
  };
  EXPECT_TRUE(status_of(DType::kQ8_0, 8, 32, 8 * 34).ok());
  EXPECT_EQ(status_of(DType::kQ8_0, 7, 32, 8 * 34).code(), Code::kInternal);
  EXPECT_EQ(status_of(DType::kQ8_0, 8, 32, 8 * 34 - 1).code(), Code::kInternal);
  EXPECT_EQ(status_of(DType::kQ8_0, 8, 33, 8 * 36).code(), Code::kUnsupported);
}

}  // namespace
}  // namespace thimble
