#include "backends/cpu/host/cpu_device.h"

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "backends/checks.h"
#include "backends/cpu/kernels.h"
#include "backends/cpu/kv_scratch.h"
#include "backends/cpu/dense/matmul.h"
#include "backends/cpu/host/measure.h"
#include "backends/cpu/ops.h"
#include "backends/cpu/host/thread_pool.h"
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

struct HostBuffer : Buffer {  // shows the mapped model, which nothing writes
  HostBuffer(const void* data, uint64_t bytes) {
    size = bytes;
    mapped = const_cast<void*>(data);
  }
};

using Call = std::function<void(const Context&)>;

struct CpuProgram : Program {
  std::vector<std::vector<Call>> calls;  // of each segment
  uint32_t max_rows = 0;
};

class CpuRecorder : public Recorder {
 public:
  explicit CpuRecorder(uint32_t max_rows) : program_(std::make_unique<CpuProgram>()) {
    program_->max_rows = max_rows;
  }

  void segment() override { program_->calls.emplace_back(); }
  void embed(const Embed& op) override {
    check("embed", op.table, op.table.rows, op.p.cols);
    add(cpu::embed, op);
  }
  void rms_norm(const RmsNorm& op) override { add(cpu::rms_norm, op); }
  void linear(const Linear& op) override {
    check("linear", op.w, op.p.out_cols, op.p.in_cols);
    add(cpu::linear, op);
  }
  void glu(const Glu& op) override {
    check("glu", op.gate, op.p.out_cols, op.p.in_cols);
    check("glu", op.up, op.p.out_cols, op.p.in_cols);
    add(cpu::glu, op);
  }
  void activation(const Activation& op) override { add(cpu::activation, op); }
  void kv_append(const KvAppend& op) override { add(cpu::kv_append, op); }
  void cis_store(const CisStore& op) override { add(cpu::cis_store, op); }
  void kv_view(const KvView& op) override { add(cpu::kv_view, op); }
  void attention(const Attention& op) override { add(cpu::attention, op); }
  void kv_compact(const KvCompact& op) override { add(cpu::kv_compact, op); }
  void query_gate(const QueryGate& op) override { add(cpu::query_gate, op); }
  void token_score(const TokenScore& op) override { add(cpu::token_score, op); }
  void vote(const Vote& op) override { add(cpu::vote, op); }
  void top_k(const TopK& op) override { add(cpu::top_k, op); }
  void arg_max(const ArgMax& op) override { add(cpu::arg_max, op); }
  void log_prob(const LogProb& op) override { add(cpu::log_prob, op); }
  void copy(const Copy& op) override { add(cpu::copy, op); }

  Result<std::unique_ptr<Program>> finish() {
    THIMBLE_TRY(status_);
    program_->segments = static_cast<uint32_t>(program_->calls.size());
    return std::unique_ptr<Program>(std::move(program_));
  }

 private:
  template <typename Op>
  void add(void (*function)(const Context&, const Op&), const Op& op) {
    if (program_->calls.empty()) segment();
    program_->calls.back().push_back([function, op](const Context& c) { function(c, op); });
  }

  void check(const char* op, const Weight& w, uint32_t rows, uint32_t cols) {
    if (status_.ok()) status_ = check_matrix(op, w, rows, cols);
  }

  std::unique_ptr<CpuProgram> program_;
  Status status_;
};

// The workers, which sessions take turns to use.
struct Workers {
  explicit Workers(uint32_t threads) : pool(threads) {}
  std::mutex queue;
  ThreadPool pool;
};

class CpuStream : public Stream {
 public:
  CpuStream(std::shared_ptr<Workers> workers, std::span<std::byte> scratch)
      : workers_(std::move(workers)), scratch_(scratch) {}

  std::unique_ptr<Recorder> record(uint32_t max_rows) override {
    return std::make_unique<CpuRecorder>(max_rows);
  }

  Result<std::unique_ptr<Program>> finish(std::unique_ptr<Recorder> recorder) override {
    return static_cast<CpuRecorder&>(*recorder).finish();
  }

  Status submit(Program& program, uint32_t first, uint32_t last, const StepParams& step) override {
    const CpuProgram& p = static_cast<CpuProgram&>(program);
    THIMBLE_TRY(check_submit(program, p.max_rows, first, last, step));
    const std::lock_guard lock(workers_->queue);
    const Context context{step, workers_->pool, scratch_};
    for (uint32_t s = first; s < last; ++s)
      for (const Call& call : p.calls[s]) call(context);
    return {};
  }

  Status wait() override { return {}; }

 private:
  std::shared_ptr<Workers> workers_;
  std::span<std::byte> scratch_;
};

// What each worker's stack may come to: the ops need a tenth of it. Planned rather than measured, so that a
// plan and the session made from it agree to the byte.
constexpr uint64_t kStackBytes = 64 << 10;

class CpuDevice : public Device {
 public:
  explicit CpuDevice(uint32_t threads) {
    workers_ = std::make_shared<Workers>(threads);
    ThreadPool& pool = workers_->pool;
    fixed_ = pool.size() * (kStackBytes + matmul_thread_bytes());
    // What a BLAS keeps for a thread is allocated now, by every worker once.
    std::atomic<uint32_t> here{0};
    pool.run(pool.size(), [&](uint32_t, uint32_t) {
      here.fetch_add(1);
      while (here.load() < pool.size()) std::this_thread::yield();
      warm_up_matmul();
    });
  }

  uint32_t threads() const { return workers_->pool.size(); }

  DeviceInfo info() const override { return cpu_device_info(); }

  Result<Needs> needs(const ModelShape& model, const SessionShape& session) const override {
    const uint64_t dense = uint64_t(threads()) * kDenseScratch * sizeof(float);
    return Needs{.fixed = fixed_,
                 .workspace = round_up(std::max(dense, kv_scratch_bytes(model, session, threads())), 64)};
  }

  Result<std::unique_ptr<Buffer>> alloc(MemKind, uint64_t bytes) override {
    THIMBLE_LET(pages, Pages::allocate(bytes));
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

  Result<std::unique_ptr<Stream>> open_stream(View workspace) override {
    THIMBLE_LET(scratch, address(workspace));
    return std::unique_ptr<Stream>(
        std::make_unique<CpuStream>(workers_, std::span<std::byte>(scratch, workspace.bytes)));
  }

  Result<Rates> measure() override {
    const std::lock_guard lock(workers_->queue);
    return measure_rates(workers_->pool);
  }

 private:
  static Result<std::byte*> address(const View& v) {
    THIMBLE_TRY(check_view(v));
    return static_cast<std::byte*>(v.buffer->mapped) + v.offset;
  }

  std::shared_ptr<Workers> workers_;  // streams may outlive the device
  uint64_t fixed_ = 0;
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
          .view_element_bytes = 4};
}

Result<std::shared_ptr<Device>> open_cpu_device(uint32_t threads) {
  const uint32_t wanted = threads ? threads : core_count();
  constexpr uint32_t kMostThreads = 1024;
  if (wanted > kMostThreads)
    return error(Code::kInvalidArgument, "%u threads; the cpu takes 1 to %u, or 0 for one a core", wanted,
                 kMostThreads);
  auto device = std::make_shared<cpu::CpuDevice>(wanted);
  if (device->threads() < wanted)
    return error(Code::kOutOfMemory, "the system gives only %u of %u threads; ask for fewer",
                 device->threads(), wanted);
  return std::shared_ptr<Device>(std::move(device));
}

}  // namespace thimble
