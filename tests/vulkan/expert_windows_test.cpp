// Experts whose matrices, columns or slots do not all fit an operand: they are computed in parts, without
// changing a bit.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "backends/vulkan/host/memory.h"
#include "backends/vulkan/host/vulkan_device.h"
#include "base/bits.h"
#include "tests/support/random.h"
#include "tests/support/sessions.h"
#include "tests/support/vulkan_messages.h"

namespace thimble::test {
namespace {

constexpr uint32_t kExperts = 6, kChosen = 2, kModel = 320, kInner = 400;

// The contents of h and y after the experts of `rows` rows.
std::vector<std::vector<float>> results(Device& device, uint32_t rows) {
  Random random;
  std::vector<std::unique_ptr<Buffer>> buffers;
  const auto place = [&](const auto& values) {
    const uint64_t bytes = values.size() * sizeof(values[0]);
    buffers.push_back(must(device.alloc(MemKind::kWorkspace, bytes)));
    const View view{buffers.back().get(), 0, bytes};
    must(device.write(view, values.data()));
    return view;
  };
  const auto matrix = [&](uint32_t out, uint32_t in) {
    std::vector<uint16_t> values(size_t(kExperts) * out * in);
    for (uint16_t& v : values) v = f32_to_f16(random.uniform(-1, 1));
    Weight w;
    static_cast<View&>(w) = place(values);
    w.type = DType::kF16, w.rows = kExperts * out, w.cols = in;
    return w;
  };
  const uint32_t slots = rows * kChosen;
  const View x = place(random.floats(size_t(rows) * kModel)),
             logits = place(random.floats(size_t(rows) * kExperts)), first = place(std::vector<uint32_t>(7)),
             row = place(std::vector<uint32_t>(slots)), weight = place(std::vector<float>(slots)),
             h = place(std::vector<float>(size_t(slots) * kInner)),
             y = place(random.floats(size_t(rows) * kModel)),
             of_inner = place(random.floats(kExperts * kInner)),
             of_model = place(random.floats(kExperts * kModel));
  const Weight gate = matrix(kInner, kModel), up = matrix(kInner, kModel), down = matrix(kModel, kInner);

  const Needs needs = must(device.needs({.layers = 1,
                                         .d_model = kModel,
                                         .heads = 1,
                                         .kv_heads = 1,
                                         .head_dim = 32,
                                         .d_ff = kInner,
                                         .experts = kExperts,
                                         .chosen_experts = kChosen},
                                        {.chunk = rows, .heads = 1}));
  const auto scratch = must(device.alloc(MemKind::kWorkspace, needs.workspace));
  const auto stream = must(device.open_stream({scratch.get(), 0, needs.workspace}, 1));
  auto recorder = stream->record(rows);
  recorder->record(
      Route{logits, {}, first, row, weight, {.experts = kExperts, .chosen = kChosen, .scale = 1}});
  recorder->record(ExpertGlu{
      x,
      gate,
      up,
      of_inner,
      of_inner,
      first,
      row,
      h,
      {.in_cols = kModel, .out_cols = kInner, .act = kActSilu, .experts = kExperts, .chosen = kChosen}});
  recorder->record(
      ExpertLinear{h,
                   down,
                   of_model,
                   first,
                   row,
                   weight,
                   y,
                   {.in_cols = kInner, .out_cols = kModel, .experts = kExperts, .chosen = kChosen}});
  const auto program = must(stream->finish(std::move(recorder)));
  const std::vector<HeadState> heads(1);
  must(stream->submit(*program, 0, 1, {.n_rows = rows}, heads));
  must(stream->wait());
  std::vector<std::vector<float>> read;
  for (const View& view : {h, y}) {
    read.emplace_back(view.bytes / sizeof(float));
    must(device.read(read.back().data(), view));
  }
  return read;
}

TEST(VulkanExpertWindows, ChangeNoBit) {
  const auto instance = vulkan::Instance::get();
  if (!instance.ok() || vulkan::find_gpus(**instance).empty()) GTEST_SKIP() << "there is no Vulkan device";
  const vulkan::Gpu gpu = vulkan::find_gpus(**instance).front();
  // An expert has 250 KiB. The cases see all of them, two, and parts of one; h of 40 rows (125 KiB) is then
  // seen in parts, too. With 300 rows, the smallest range covers y, 375 KiB.
  for (const uint32_t rows : {1u, 40u, 300u}) {
    std::vector<std::vector<std::vector<float>>> of_ranges;
    for (const uint64_t kib : {4096u, 600u, rows < 300 ? 120u : 400u}) {
      vulkan::Gpu narrow = gpu;
      narrow.limits.max_range = (kib << 10) + gpu.limits.offset_alignment;
      const auto context = must(vulkan::Context::open(**instance, narrow, strictly().messages));
      of_ranges.push_back(results(*must(vulkan::make_device(context)), rows));
    }
    EXPECT_EQ(of_ranges[1], of_ranges[0]) << rows << " rows";
    EXPECT_EQ(of_ranges[2], of_ranges[0]) << rows << " rows";
  }
}

}  // namespace
}  // namespace thimble::test
