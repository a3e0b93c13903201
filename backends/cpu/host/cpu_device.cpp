#include "backends/cpu/host/cpu_device.h"

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstring>
#include <limits>
#include <mutex>
#include <span>
#include <thread>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "backends/checks.h"
#include "backends/cpu/dense/experts.h"
#include "backends/cpu/host/cpu_host.h"
#include "backends/cpu/host/measure.h"
#include "backends/cpu/host/parts.h"
#include "backends/cpu/kernels.h"
#include "backends/cpu/kv_kernels.h"
#include "backends/cpu/kv_scratch.h"
#include "backends/cpu/ops.h"
#include "base/system.h"

namespace thimble {
namespace cpu {
namespace {

struct PageBuffer : Buffer {
  PageBuffer(Pages p, uint64_t bytes) : pages(std::move(p)) {
    size = bytes;
    mapped = pages.data();
  }
  Pages pages;
};

// The mapped model, which is only read.
struct HostBuffer : Buffer {
  HostBuffer(const void* data, uint64_t bytes) {
    size = bytes;
    mapped = const_cast<void*>(data);
  }
};

struct Segment {
  std::vector<Op> ops;
  std::vector<Part> parts;
};

struct CpuProgram : Program {
  std::vector<Segment> list;
  ProgramBounds bounds;
  uint32_t parts(uint32_t segment) const override {
    return static_cast<uint32_t>(list[segment].parts.size());
  }
};

struct Run {
  const Context& c;
#define THIMBLE_RUN_OP(Type, name, backends)               \
  void operator()(const Type& op) const {                  \
    if constexpr ((kOnCpu & (backends)) != 0) name(c, op); \
  }
  THIMBLE_OPS(THIMBLE_RUN_OP)
#undef THIMBLE_RUN_OP
};

// Whether the op table contains this op for the CPU, and the op supports the formats of its keys and values.
bool is_supported(const Op& op) {
  if (!has_op(op, kOnCpu)) return false;
  const auto formats = [](uint32_t head_dim, const auto&... arrays) {
    return ((kv_format(arrays.type) && kv_fits(arrays.type, head_dim)) && ...);
  };
  const auto one_format = [&](uint32_t head_dim, const KvArray& pool, const KvArray& chunk) {
    return formats(head_dim, pool) && (!chunk || chunk.type == pool.type);
  };
  const auto has_blocks = [](const KvArray& a) { return dtype_info(a.type).block > 1; };
  return std::visit(
      [&](const auto& o) {
        using T = std::decay_t<decltype(o)>;
        if constexpr (std::is_same_v<T, KvView>)
          return formats(o.p.head_dim, o.pool_k, o.pool_v, o.chunk_k, o.chunk_v);
        else if constexpr (std::is_same_v<T, KvCompact>)  // copies rows without conversion
          return one_format(o.p.head_dim, o.k, o.chunk_k) && one_format(o.p.head_dim, o.v, o.chunk_v);
        else if constexpr (std::is_same_v<T, KvSpill>)
          return formats(o.p.head_dim, o.k, o.v) && one_format(o.p.head_dim, o.pool_k, o.chunk_k) &&
                 one_format(o.p.head_dim, o.pool_v, o.chunk_v);
        else if constexpr (std::is_same_v<T, KvRecall>)
          return formats(o.p.head_dim, o.row_k, o.row_v, o.k, o.v);
        else if constexpr (std::is_same_v<T, AttendAll>)
          return one_format(o.p.head_dim, o.k, o.chunk_k) && one_format(o.p.head_dim, o.v, o.chunk_v) &&
                 formats(o.p.head_dim, o.stored_k, o.stored_v);
        else if constexpr (std::is_same_v<T, KvAppend> || std::is_same_v<T, KvMerge>)
          return formats(o.p.head_dim, o.k, o.v);
        else if constexpr (std::is_same_v<T, Attention>)  // no values: they are parts of keys' rows
          return o.p.source == kFromView || (formats(o.p.head_dim, o.k, o.v) && (o.v || !has_blocks(o.k)));
        else if constexpr (std::is_same_v<T, QueryScore>)  // a tile may contain rows of both
          return one_format(o.p.head_dim, o.k, o.chunk_k);
        else if constexpr (std::is_same_v<T, Label> || std::is_same_v<T, KeyDiff>)
          return formats(o.p.head_dim, o.k, o.chunk_k);
        else if constexpr (std::is_same_v<T, TokenScore>)
          return formats(o.p.head_dim, o.k);
        else if constexpr (std::is_same_v<T, PageBounds>)  // bounds cannot hold the range of f32
          return (o.k.type == DType::kF16 || has_blocks(o.k)) && formats(o.p.head_dim, o.k);
        else
          return true;
      },
      op);
}

// Frees unused capacity of a list. Returns the bytes that remain.
template <typename T>
uint64_t fit(std::vector<T>& list) {
  list.shrink_to_fit();
  return list.capacity() * sizeof(T);
}

class CpuRecorder : public Recorder {
 public:
  // `part_seconds` is the largest estimated time of a part of a segment on one core.
  CpuRecorder(uint32_t max_rows, double part_seconds)
      : program_(std::make_unique<CpuProgram>()), part_seconds_(part_seconds) {
    program_->bounds.max_rows = max_rows;
  }

  void segment() override { program_->list.emplace_back(); }
  void record(const Op& op) override {
    if (!status_.ok()) return;
    status_ = check_op(op, device_, program_->bounds);
    if (status_.ok() && !is_supported(op))
      status_ = error(Code::kUnsupported, "the cpu has no %s of this kind", op_name(op));
    if (program_->list.empty()) segment();
    program_->list.back().ops.push_back(op);
  }

  Result<std::unique_ptr<Program>> finish() {
    THIMBLE_TRY(status_);
    program_->segments = static_cast<uint32_t>(program_->list.size());
    program_->bytes = sizeof(CpuProgram) + fit(program_->list) + fit(program_->bounds.heads);
    for (Segment& segment : program_->list) {
      segment.parts = parts_of(segment.ops, program_->bounds.max_rows, part_seconds_);
      program_->bytes += fit(segment.ops) + fit(segment.parts);
    }
    return std::unique_ptr<Program>(std::move(program_));
  }

 private:
  const DeviceInfo device_ = cpu_device_info();
  std::unique_ptr<CpuProgram> program_;
  double part_seconds_;
  Status status_;
};

class CpuStream : public Stream {
 public:
  CpuStream(std::shared_ptr<CpuHost> workers, std::span<std::byte> scratch, uint32_t heads,
            double part_seconds)
      : workers_(std::move(workers)), scratch_(scratch), heads_(heads), part_seconds_(part_seconds) {}

  std::unique_ptr<Recorder> record(uint32_t max_rows) override {
    return std::make_unique<CpuRecorder>(max_rows, part_seconds_ * workers_->pool().size());
  }

  Result<std::unique_ptr<Program>> finish(std::unique_ptr<Recorder> recorder) override {
    return static_cast<CpuRecorder&>(*recorder).finish();
  }

  Status submit(Program& program, uint32_t first, uint32_t last, const StepParams& step,
                std::span<const HeadState> heads) override {
    const auto& p = static_cast<CpuProgram&>(program);
    THIMBLE_TRY(check(p, first, last, step, heads));
    for (uint32_t s = first; s < last; ++s)
      for (const Part& part : p.list[s].parts) run(p.list[s], part, step, heads);
    return {};
  }

  Status submit_part(Program& program, uint32_t segment, uint32_t part, const StepParams& step,
                     std::span<const HeadState> heads) override {
    const auto& p = static_cast<CpuProgram&>(program);
    THIMBLE_TRY(check(p, segment, segment + 1, step, heads));
    if (part >= p.parts(segment))
      return error(Code::kInternal, "part %u of a segment that has %u", part, p.parts(segment));
    run(p.list[segment], p.list[segment].parts[part], step, heads);
    return {};
  }

  Status wait() override { return {}; }

 private:
  Status check(const CpuProgram& program, uint32_t first, uint32_t last, const StepParams& step,
               std::span<const HeadState> heads) const {
    if (heads.size() != heads_)
      return error(Code::kInternal, "a step with %zu heads, on a stream for %u", heads.size(), heads_);
    return check_submit(program, program.bounds, first, last, step, heads);
  }

  // Runs one part. Sessions take turns to use the workers: the next one that waits gets them after it.
  void run(const Segment& segment, const Part& part, const StepParams& step,
           std::span<const HeadState> heads) {
    const std::lock_guard turn(workers_->queue);
    const Context context{step, heads, workers_->pool(), scratch_, part.share};
    for (uint32_t i = part.first; i < part.last; ++i) std::visit(Run{context}, segment.ops[i]);
  }

  std::shared_ptr<CpuHost> workers_;
  std::span<std::byte> scratch_;
  uint32_t heads_;
  double part_seconds_;
};

// The stack budget of each worker; the ops need a tenth of it. It is a constant and not measured, so that a
// plan and its session agree to the byte.
constexpr uint64_t kStackBytes = 64 << 10;

class CpuDevice : public Device {
 public:
  CpuDevice(uint32_t threads, double part_seconds) : part_seconds_(part_seconds) {
    host = workers_ = std::make_shared<CpuHost>(threads);
    ThreadPool& pool = workers_->pool();
    fixed_ = pool.size() * (kStackBytes + matmul_thread_bytes());
    // A BLAS allocates memory per thread, so every worker uses it once now.
    std::atomic<uint32_t> here{0};
    pool.run(pool.size(), [&](uint32_t, uint32_t) {
      here.fetch_add(1);
      while (here.load() < pool.size()) std::this_thread::yield();
      warm_up_matmul();
    });
  }

  uint32_t threads() const { return workers_->pool().size(); }

  DeviceInfo info() const override { return cpu_device_info(); }

  Result<Needs> needs(const ModelShape& model, const SessionShape& session) const override {
    uint64_t widest =
        std::max({uint64_t(model.d_model), uint64_t(model.heads) * model.head_dim,
                  uint64_t(model.experts ? model.d_ff_shared : model.d_ff), uint64_t(model.mixer_out)});
    for (const MatrixShape& m : model.retainer)
      widest = std::max({widest, uint64_t(m.rows), uint64_t(m.cols)});
    const uint64_t few_rows = digit_kernels().few_rows;
    uint64_t dense = uint64_t(threads()) * kDenseScratch * sizeof(float) + digit_bytes(few_rows, widest);
    if (model.experts) {
      const uint64_t slots = uint64_t(session.chunk) * model.chosen_experts;
      dense = std::max(
          {dense,
           threads() * expert_scratch(model.d_model) * sizeof(float) + digit_bytes(few_rows, model.d_model),
           threads() * expert_scratch(0) * sizeof(float) +
               digit_bytes(few_rows * model.chosen_experts, model.d_ff),
           slots * (sizeof(uint32_t) + sizeof(float))});
    }
    return Needs{.fixed = fixed_,
                 .workspace = round_up(std::max(dense, kv_scratch_bytes(model, session, threads())), 64)};
  }

  Result<std::unique_ptr<Buffer>> alloc(MemKind, uint64_t bytes) override {
    THIMBLE_LET(pages, Pages::allocate(bytes));
    pages.prefer_huge();
    return std::unique_ptr<Buffer>(std::make_unique<PageBuffer>(std::move(pages), bytes));
  }

  Result<std::unique_ptr<Buffer>> import_host(const void* data, uint64_t bytes) override {
    return std::unique_ptr<Buffer>(std::make_unique<HostBuffer>(data, bytes));
  }

  Status write(View destination, const void* source) override {
    THIMBLE_LET(to, address(destination));
    if (dynamic_cast<const HostBuffer*>(destination.buffer))
      return error(Code::kInternal, "a write to memory that was imported to be read");
    if (destination.bytes) std::memcpy(to, source, destination.bytes);
    return {};
  }
  Status read(void* destination, View source) override {
    THIMBLE_LET(from, address(source));
    if (source.bytes) std::memcpy(destination, from, source.bytes);
    return {};
  }
  Status copy(View destination, View source) override {
    if (destination.bytes != source.bytes)
      return error(Code::kInternal, "a copy of %" PRIu64 " bytes to %" PRIu64, source.bytes,
                   destination.bytes);
    THIMBLE_LET(from, address(source));
    return write(destination, from);
  }

  Result<uint64_t> release(View view) override {
    THIMBLE_TRY(check_view(view));
    auto* const buffer = dynamic_cast<PageBuffer*>(view.buffer);
    if (!buffer) return error(Code::kInternal, "a release of memory that was not allocated");
    return buffer->pages.release(view.offset, view.bytes);
  }

  Result<std::unique_ptr<Stream>> open_stream(View workspace, uint32_t heads) override {
    THIMBLE_LET(scratch, address(workspace));
    return std::unique_ptr<Stream>(std::make_unique<CpuStream>(
        workers_, std::span<std::byte>(scratch, workspace.bytes), heads, part_seconds_));
  }

  bool supports(const Op& op) const override { return is_supported(op); }

  Result<Rates> measure() override {
    const std::lock_guard lock(workers_->queue);
    return measure_rates(workers_->pool());
  }

 private:
  static Result<std::byte*> address(const View& v) {
    THIMBLE_TRY(check_view(v));
    return static_cast<std::byte*>(v.buffer->mapped) + v.offset;
  }

  std::shared_ptr<CpuHost> workers_;  // streams may outlive the device
  uint64_t fixed_ = 0;
  double part_seconds_;
};

}  // namespace
}  // namespace cpu

DeviceInfo cpu_device_info() {
  const MemoryStatus memory = memory_status();
  return {.name = "cpu",
          .description = processor_name() + " (" + cpu::kernels().name + ")",
          .total_bytes = memory.total_bytes,
          .free_bytes = memory.free_bytes,
          .max_binding = std::numeric_limits<uint64_t>::max(),
          .alignment = 64,
          .pages_files = true,
          .view_element_bytes = 4,
          .lifts_views = true,
          .pool_rows = kMostLogitRows};
}

Result<std::shared_ptr<Device>> open_cpu_device(uint32_t threads, double part_seconds) {
  const uint32_t wanted = threads ? threads : core_count();
  constexpr uint32_t kMostThreads = 1024;
  if (wanted > kMostThreads)
    return error(Code::kInvalidArgument, "%u threads; the cpu takes 1 to %u, or 0 for one for each core",
                 wanted, kMostThreads);
  auto device = std::make_shared<cpu::CpuDevice>(wanted, part_seconds);
  if (device->threads() < wanted)
    return error(Code::kOutOfMemory, "the system gives only %u of %u threads; ask for fewer",
                 device->threads(), wanted);
  return std::shared_ptr<Device>(std::move(device));
}

}  // namespace thimble
