// Runs ops on any device, selected by name. Every operand is between guard bytes and outputs start poisoned;
// after a run, guards and inputs must be unchanged.
//
//   class DenseOps : public OpTest {};
//   THIMBLE_OP_TESTS(DenseOps);                       // once for each device of this build and machine
//   TEST_P(DenseOps, RmsNormScalesRows) {
//     View x = input(padded_rows(values, 5 * 64)), w = input(weights), y = output<float>(5 * 64);
//     run({.n_rows = 3}, 5, [&](Recorder& r) { r.record(RmsNorm{x, w, y, {.cols = 64, ...}}); });
//     std::vector<float> got = get<float>(y);
//   }
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/backend.h"
#include "backends/cpu/host/cpu_device.h"
#include "backends/registry.h"
#include "base/bits.h"
#include "tests/support/device_test_name.h"
#include "tests/support/random.h"
#include "tests/support/shared_devices.h"
#include "tests/support/vulkan_messages.h"

namespace thimble::test {

// Poison bytes are NaN in f32, f16 and bf16, and -1 as an integer.
constexpr std::byte kPoison{0xff};
constexpr std::byte kGuard{0xa5};

// The values, padded with poison up to `count` elements. The padding stands for rows beyond n_rows, which
// must not affect any result.
template <typename T>
std::vector<T> padded_rows(std::vector<T> values, size_t count) {
  const size_t filled = values.size();
  values.resize(count);
  if (count > filled) std::memset(&values[filled], static_cast<int>(kPoison), (count - filled) * sizeof(T));
  return values;
}

// Whether each of `count` bytes from `first` on is still poison, for memory that an op must not write.
template <typename T>
bool is_poison(const std::vector<T>& values, size_t first, size_t count) {
  const auto* bytes = reinterpret_cast<const std::byte*>(values.data() + first);
  for (size_t i = 0; i < count * sizeof(T); ++i)
    if (bytes[i] != kPoison) return false;
  return true;
}

// ---- the table of HeadState ----

// Heads with equal runs, stored one after the other.
inline std::vector<HeadState> equal_heads(uint32_t count, uint32_t capacity, uint32_t n_entries,
                                          uint32_t keep = 0, uint32_t protect_first = 0,
                                          uint32_t protect_last = 0) {
  std::vector<HeadState> heads;
  for (uint32_t head = 0; head < count; ++head)
    heads.push_back({head * capacity, capacity, n_entries, keep, protect_first, protect_last});
  return heads;
}
// Heads that hold the given numbers of entries, each with space for `room` more. Other entries are stored
// before, between and after their runs.
inline std::vector<HeadState> unequal_heads(const std::vector<uint32_t>& n_entries, uint32_t room) {
  std::vector<HeadState> heads;
  uint32_t first = 3;
  for (uint32_t n : n_entries) {
    heads.push_back({.first = first, .capacity = n + room, .n_entries = n});
    first += n + room + 5;
  }
  return heads;
}
// Rows of other layers in the head table, which ops must skip according to their head_state.
inline constexpr uint32_t kOtherRows = 3;
inline std::vector<HeadState> behind_other_rows(std::vector<HeadState> heads) {
  const HeadState other{
      .first = 1, .capacity = 9, .n_entries = 7, .keep = 5, .protect_first = 1, .protect_last = 2};
  heads.insert(heads.begin(), kOtherRows, other);
  return heads;
}
// Entries that a layer's arrays need to hold these runs.
inline uint32_t layer_entries(const std::vector<HeadState>& heads) {
  uint32_t end = 0;
  for (const HeadState& head : heads) end = std::max(end, head.first + head.capacity);
  return end;
}
// A session with one layer of these heads.
inline SessionShape session_of(const std::vector<HeadState>& heads, uint32_t chunk,
                               uint32_t view_capacity = 64, uint32_t positions = 0) {
  SessionShape s{.chunk = chunk,
                 .layer_entries = layer_entries(heads),
                 .view_capacity = view_capacity,
                 .positions = positions,
                 .heads = static_cast<uint32_t>(heads.size())};
  for (const HeadState& head : heads) s.run_capacity = std::max(s.run_capacity, head.capacity);
  s.reach = s.run_capacity + chunk;
  return s;
}

#ifdef __SANITIZE_ADDRESS__
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// Suffix of a device's name: use only what every device of its kind can do (DeviceOptions::portable).
inline constexpr const char* kPortable = " portable";
// The CPU, with segments divided into as many parts as possible.
inline constexpr const char* kCpuInParts = "cpu in parts";

class OpTest : public ::testing::TestWithParam<std::string> {
 protected:
  // Limits of what the test runs, which determine the device's scratch. Set them before the first run() if
  // these are too small, or call size_for().
  ModelShape model{.layers = 1,
                   .d_model = 4096,
                   .heads = 16,
                   .kv_heads = 8,
                   .head_dim = 256,
                   .d_ff = 4096,
                   .vocab = 8192,
                   .delta_keys = 16,
                   .delta_values = 32,
                   .delta_width = 128,
                   .ssm_heads = 64,
                   .mixer_out = 4096,
                   .retainer = {{{1024, 8192}, {8, 1024}}}};
  SessionShape session{.chunk = 1024,
                       .run_capacity = 4096,
                       .layer_entries = 8 * 4096,
                       .reach = 5120,
                       .view_capacity = 5120,
                       .positions = 16384,
                       .heads = 32};

  void SetUp() override {
    use(shared_device(GetParam(), [&] {
      open({});
      return device_;
    }));
  }

  // Opens a separate device for the test instead of the one that all tests share.
  void open(const DeviceOptions& options) {
    stream_.reset();
    workspace_.reset();
    operands_.clear();
    const std::string& name = GetParam();
    DeviceOptions given = strictly(options);
    given.portable = name.ends_with(kPortable);
    auto opened = name == kCpuInParts ? open_cpu_device(given.threads, 1e-7)
                                      : open_device(name.substr(0, name.find(kPortable)), given);
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    use(*opened);
  }

  Device& device() { return *device_; }

  // A software driver compiles each pipeline for up to a second and computes a thousand times slower than a
  // card; sanitizers slow the CPU down tenfold. On these, tests run the smallest cases that reach each path.
  // Cards, and the CPU without sanitizers, run all cases.
  // Whether the device takes heads of so many channels. One with little shared memory has a lower limit.
  bool takes_heads_of(uint32_t head_dim) const {
    ModelShape wide = model;
    wide.head_dim = head_dim;
    return device_->needs(wide, session).ok();
  }
  bool is_slow() const { return kSanitized || device_->info().software; }
  // Whether this is the software driver restricted to portable features, or with a non-default subgroup size.
  // Behaviour that depends on neither, such as the meaning of a weight block, need not be tested again.
  bool is_variation() const {
    return device_->info().software &&
           (GetParam().ends_with(kPortable) || std::getenv("LP_NATIVE_VECTOR_WIDTH"));
  }
  uint32_t smaller(uint32_t size, uint32_t if_slow) const { return is_slow() ? if_slow : size; }
  std::vector<uint32_t> fewer(std::vector<uint32_t> all, std::vector<uint32_t> if_slow) const {
    return is_slow() ? if_slow : all;
  }
  std::vector<uint32_t> fewer(std::vector<uint32_t> all, std::vector<uint32_t> if_slow,
                              std::vector<uint32_t> if_variation) const {
    return is_variation() ? if_variation : fewer(all, if_slow);
  }

  // Sizes the following runs. The device's scratch is allocated again, poisoned, and no larger than the
  // device requires.
  void size_for(const ModelShape& m, const SessionShape& s) {
    model = m;
    session = s;
    stream_.reset();
    workspace_.reset();
  }
  // The same for attention and selection; the chunk is as large as the largest program.
  void size_for(uint32_t kv_heads, uint32_t group, uint32_t head_dim, const SessionShape& s) {
    const uint32_t heads = kv_heads * group;
    size_for({.layers = 1,
              .d_model = heads * head_dim,
              .heads = heads,
              .kv_heads = kv_heads,
              .head_dim = head_dim,
              .d_ff = heads * head_dim,
              .vocab = 64},
             s);
  }

  // The rounding that a device may do; this is the only place that states it. A device with an f16 view works
  // on tensor cores, which multiply 16-bit numbers and add in f32. In programs of several rows, except for
  // rows of logits, its linear and glu round W to f16, and x after a power of two has scaled its row's
  // largest magnitude to 2^14 or more; an exact linear does not. Attention to the view rounds the
  // rotated and scaled q, the rotated k, the weights and v to f16. On CUDA, so does attention to the pool if
  // values are channels of the keys; delta_net of kRoundedDeltaRows or more rows, and head_linear in programs
  // of more than kExactHeadRows rows or with transposed matrices, round the operands of their products to 11
  // bits. Everything else is f32 on every device.
  bool is_cuda() const { return GetParam().starts_with("cuda"); }
  bool has_tensor_cores() const { return view_element_bytes_ == 2; }
  uint32_t view_element_bytes() const { return view_element_bytes_; }
  bool rounds_to_f16(uint32_t max_rows, uint32_t rows = kStepRows, bool exact = false) const {
    return !exact && has_tensor_cores() && max_rows > 1 && rows == kStepRows;
  }
  bool attends_in_f16() const { return has_tensor_cores(); }
  bool attends_to_pool_in_f16(bool latent) const { return is_cuda() && latent; }
  static constexpr uint32_t kRoundedDeltaRows = 16, kExactHeadRows = 8;
  bool rounds_delta(uint32_t rows) const { return is_cuda() && rows >= kRoundedDeltaRows; }
  bool rounds_heads(uint32_t max_rows, bool transposed) const {
    return is_cuda() && (max_rows > kExactHeadRows || transposed);
  }

  // An operand with these values. run() fails if an op changes it.
  template <typename T>
  View input(const std::vector<T>& values) {
    return place(values.data(), values.size() * sizeof(T), false);
  }
  // An operand with these values that an op may change.
  template <typename T>
  View inout(const std::vector<T>& values) {
    return place(values.data(), values.size() * sizeof(T), true);
  }
  // A poisoned operand of `count` elements that an op may write.
  template <typename T>
  View output(size_t count) {
    return inout(std::vector<T>(padded_rows(std::vector<T>(), count)));
  }
  // A matrix of a model from its bytes in the file, row after row.
  Weight weight(DType type, uint32_t rows, uint32_t cols, const std::vector<std::byte>& bytes) {
    EXPECT_EQ(bytes.size(), dtype_bytes(type, uint64_t(rows) * cols));
    Weight w;
    static_cast<View&>(w) = input(bytes);
    w.type = type;
    w.rows = rows;
    w.cols = cols;
    return w;
  }

  // Drops all operands, so that the next run() does not check them again.
  void clear() { operands_.clear(); }

  // The current values of a view.
  template <typename T>
  std::vector<T> get(const View& view) {
    std::vector<T> values(view.bytes / sizeof(T));
    const Status status = device_->read(values.data(), view);
    EXPECT_TRUE(status.ok()) << status.message();
    return values;
  }
  // Replaces the values of a view between two runs.
  template <typename T>
  void put(const View& view, const std::vector<T>& values) {
    ASSERT_EQ(view.bytes, values.size() * sizeof(T));
    const Status status = device_->write(view, values.data());
    ASSERT_TRUE(status.ok()) << status.message();
    for (Operand& o : operands_)
      if (o.view.buffer == view.buffer)
        std::memcpy(o.bytes.data() + (view.offset - o.view.offset), values.data(), view.bytes);
  }

  // Resets every operand that may change to its original values, or to those last set by put().
  void restore() {
    for (const Operand& o : operands_)
      if (o.may_change) {
        const Status status = device_->write(o.view, o.bytes.data());
        ASSERT_TRUE(status.ok()) << status.message();
      }
  }

  using Record = std::function<void(Recorder&)>;

  // Records a program for max_rows rows; null after a failure.
  std::unique_ptr<Program> record(uint32_t max_rows, const Record& ops) {
    if (!stream_) open_stream();
    if (!stream_) return nullptr;
    std::unique_ptr<Recorder> recorder = stream_->record(max_rows);
    recorder->segment();
    ops(*recorder);
    auto program = stream_->finish(std::move(recorder));
    EXPECT_TRUE(program.ok()) << program.status().message();
    if (!program.ok()) return nullptr;
    EXPECT_EQ((*program)->segments, 1u);
    return std::move(*program);
  }
  // Runs a program and checks guards and inputs. Rows of the head table that are not given are zeros.
  void run(Program& program, const StepParams& step, std::vector<HeadState> heads = {}) {
    ASSERT_LE(heads.size(), session.heads);
    heads.resize(session.heads);
    const Status submitted = stream_->submit(program, 0, 1, step, heads);
    ASSERT_TRUE(submitted.ok()) << submitted.message();
    const Status waited = stream_->wait();
    ASSERT_TRUE(waited.ok()) << waited.message();
    check_operands();
  }
  // Records a program and runs it once.
  void run(const StepParams& step, const std::vector<HeadState>& heads, uint32_t max_rows,
           const Record& ops) {
    const std::unique_ptr<Program> program = record(max_rows, ops);
    ASSERT_TRUE(program);
    run(*program, step, heads);
  }
  void run(const StepParams& step, uint32_t max_rows, const Record& ops) { run(step, {}, max_rows, ops); }

 private:
  static constexpr uint64_t kGuardBytes =
      256;  // before and after an operand; a multiple of every alignment in use

  struct Operand {
    std::unique_ptr<Buffer> buffer;
    View view;
    std::vector<std::byte> bytes;  // original values
    bool may_change;
  };

  void use(const std::shared_ptr<Device>& device) {
    if (!device) return;  // the device could not be opened
    device_ = device;
    view_element_bytes_ = device->info().view_element_bytes;
  }

  View place(const void* values, uint64_t bytes, bool may_change) {
    std::vector<std::byte> all(bytes + 2 * kGuardBytes, kGuard);
    if (bytes) std::memcpy(all.data() + kGuardBytes, values, bytes);
    auto buffer = device_->alloc(MemKind::kWorkspace, all.size());
    EXPECT_TRUE(buffer.ok()) << buffer.status().message();
    if (!buffer.ok()) return {};
    const Status status = device_->write({buffer->get(), 0, all.size()}, all.data());
    EXPECT_TRUE(status.ok()) << status.message();
    const View view{buffer->get(), kGuardBytes, bytes};
    std::vector<std::byte> kept(all.begin() + kGuardBytes, all.end() - kGuardBytes);
    operands_.push_back({std::move(*buffer), view, std::move(kept), may_change});
    return view;
  }

  void open_stream() {
    auto needs = device_->needs(model, session);
    ASSERT_TRUE(needs.ok()) << needs.status().message();
    auto workspace = device_->alloc(MemKind::kWorkspace, needs->workspace + 64);
    ASSERT_TRUE(workspace.ok()) << workspace.status().message();
    workspace_ = std::move(*workspace);
    // Scratch starts poisoned, so that ops cannot rely on zeros.
    const std::vector<std::byte> poison(needs->workspace + 64, kPoison);
    ASSERT_TRUE(device_->write({workspace_.get(), 0, poison.size()}, poison.data()).ok());
    auto stream = device_->open_stream({workspace_.get(), 0, needs->workspace}, session.heads);
    ASSERT_TRUE(stream.ok()) << stream.status().message();
    stream_ = std::move(*stream);
    scratch_bytes_ = needs->workspace;
  }

  void check_operands() {
    for (size_t i = 0; i < operands_.size(); ++i) {
      const Operand& o = operands_[i];
      std::vector<std::byte> now(o.view.bytes + 2 * kGuardBytes);
      ASSERT_TRUE(device_->read(now.data(), {o.buffer.get(), 0, now.size()}).ok());
      for (uint64_t b = 0; b < kGuardBytes; ++b) {
        ASSERT_EQ(now[b], kGuard) << "operand " << i << " was written " << kGuardBytes - b
                                  << " bytes before its start";
        ASSERT_EQ(now[kGuardBytes + o.view.bytes + b], kGuard)
            << "operand " << i << " was written " << b << " bytes past its end";
      }
      const bool changed =
          o.view.bytes && std::memcmp(now.data() + kGuardBytes, o.bytes.data(), o.view.bytes) != 0;
      ASSERT_TRUE(o.may_change || !changed) << "operand " << i << " is an input and was written";
    }
    std::vector<std::byte> after(64);
    ASSERT_TRUE(device_->read(after.data(), {workspace_.get(), scratch_bytes_, 64}).ok());
    for (std::byte b : after) ASSERT_EQ(b, kPoison) << "scratch was written past its end";
  }

  std::shared_ptr<Device> device_;
  uint32_t view_element_bytes_ = 0;
  std::vector<Operand> operands_;
  std::unique_ptr<Buffer> workspace_;
  uint64_t scratch_bytes_ = 0;
  std::unique_ptr<Stream> stream_;
};

// The devices that this build finds and can use, by name; cards also in their portable form.
inline std::vector<std::string> device_names() {
  std::vector<std::string> names;
  for (const DeviceInfo& info : list_devices())
    if (info.usable) {
      names.push_back(info.name);
      if (info.name != "cpu") names.push_back(info.name + kPortable);
    }
  return names;
}

// The devices whose backend has this op.
inline std::vector<std::string> device_names_with(const Op& op) {
  std::vector<std::string> names = device_names();
  std::erase_if(names, [&](const std::string& name) {
    return !has_op(op, name.starts_with("cpu") ? kOnCpu : name.starts_with("cuda") ? kOnCuda : kOnVulkan);
  });
  return names;
}

}  // namespace thimble::test

// Runs the TEST_P of a fixture on every device.
#define THIMBLE_OP_TESTS(fixture)                                                             \
  INSTANTIATE_TEST_SUITE_P(On, fixture, ::testing::ValuesIn(::thimble::test::device_names()), \
                           ::thimble::test::device_test_name)
// On every device whose backend has the op.
#define THIMBLE_OP_TESTS_WITH(fixture, op)                                                           \
  INSTANTIATE_TEST_SUITE_P(On, fixture,                                                              \
                           ::testing::ValuesIn(::thimble::test::device_names_with(::thimble::op())), \
                           ::thimble::test::device_test_name)
// Also runs it in parts, for fixtures whose ops the CPU can divide.
#define THIMBLE_SHARED_OP_TESTS(fixture)                                                      \
  THIMBLE_OP_TESTS(fixture);                                                                  \
  INSTANTIATE_TEST_SUITE_P(InParts, fixture, ::testing::Values(::thimble::test::kCpuInParts), \
                           ::thimble::test::device_test_name)
