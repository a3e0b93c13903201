// A device that forwards everything to another one and records it: allocations, submissions, lists.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "backends/backend.h"

namespace thimble::test {

class SpyDevice : public Device {
 public:
  explicit SpyDevice(std::shared_ptr<Device> inner) : inner_(std::move(inner)) { host = inner_->host; }

  // An independent count of allocations, without imported host memory. Those that live are counted only for
  // the CPU: a device with its own memory needs its own buffers back.
  uint64_t live_bytes = 0, peak_bytes = 0, allocations = 0;
  uint64_t allocated_bytes = 0;           // by all allocations so far
  uint64_t host_weight_bytes = 0;         // by those for weights in the host's memory, in none of the others
  uint64_t program_bytes = 0;             // sum over all programs recorded so far, as they report it
  uint64_t fail_allocation = UINT64_MAX;  // the index, from 0, of an allocation that is refused

  bool discrete =
      false;  // pretends to have its own memory, in allocations of 4096 bytes, so that weights are copied
  bool stages_weights = false;           // pretends to copy weights from the host's memory next to other ops
  uint64_t max_allocation = UINT64_MAX;  // pretends that buffers are limited to this size
  uint64_t free_bytes = UINT64_MAX;      // pretends that this much memory is free
  uint32_t pool_rows = UINT32_MAX;       // pretends that no more rows attend to the pool itself
  std::string lacks;                     // pretends not to have this op

  uint64_t submits = 0;
  // Called before each submission is forwarded.
  std::function<void(const Program&, const StepParams&, std::span<const HeadState>)> before_submit;

  // Ops of a kind, one for each layer that has them, in the order in which they were recorded: the
  // selections' lists, the retention scores and the pages' bounds. The one-row program comes last, followed
  // by the scores of the ring.
  std::vector<TopK> selections;
  std::vector<CisStore> scores;
  std::vector<PageBounds> pages;
  // Attention, what queries grow by, attention reports and convolutions, in the order in which they were
  // recorded.
  std::vector<Attention> attention;
  std::vector<Scale> growths;
  std::vector<QueryScore> watches;
  std::vector<ShortConv> convolutions;
  uint64_t stages = 0;  // copies of weights recorded so far

  DeviceInfo info() const override {
    DeviceInfo info = inner_->info();
    if (discrete) {
      info.unified = false;
      info.granularity = 4096;
      info.max_allocation = max_allocation;
    }
    info.stages_weights |= stages_weights;
    info.free_bytes = std::min(info.free_bytes, free_bytes);
    info.pool_rows = std::min(info.pool_rows, pool_rows);
    return info;
  }
  Result<Needs> needs(const ModelShape& m, const SessionShape& s) const override {
    return inner_->needs(m, s);
  }
  Result<std::unique_ptr<Buffer>> alloc(MemKind kind, uint64_t bytes) override {
    if (allocations++ == fail_allocation)
      return error(Code::kOutOfMemory, "the test refuses this allocation");
    THIMBLE_LET(buffer, inner_->alloc(kind, bytes));
    if (kind == MemKind::kHostWeights) {
      host_weight_bytes += bytes;
      return std::move(buffer);
    }
    allocated_bytes += bytes;
    if (!inner_->info().unified) return std::move(buffer);
    live_bytes += bytes;
    peak_bytes = std::max(peak_bytes, live_bytes);
    return std::unique_ptr<Buffer>(new SpyBuffer(*this, std::move(buffer), bytes));
  }
  Result<std::unique_ptr<Buffer>> import_host(const void* data, uint64_t bytes) override {
    if (discrete) return error(Code::kUnsupported, "the test's device imports nothing");
    return inner_->import_host(data, bytes);
  }
  Status write(View destination, const void* source) override { return inner_->write(destination, source); }
  Status read(void* destination, View source) override { return inner_->read(destination, source); }
  Status copy(View destination, View source) override { return inner_->copy(destination, source); }
  bool supports(const Op& op) const override { return op_name(op) != lacks && inner_->supports(op); }
  Result<Rates> measure() override { return inner_->measure(); }
  Result<std::unique_ptr<Stream>> open_stream(View workspace, uint32_t heads) override {
    THIMBLE_LET(stream, inner_->open_stream(workspace, heads));
    return std::unique_ptr<Stream>(new SpyStream(*this, std::move(stream)));
  }

 private:
  struct SpyBuffer : Buffer {
    SpyBuffer(SpyDevice& device, std::unique_ptr<Buffer> inner, uint64_t bytes)
        : device_(device), inner_(std::move(inner)), bytes_(bytes) {
      size = inner_->size;
      mapped = inner_->mapped;
    }
    ~SpyBuffer() override { device_.live_bytes -= bytes_; }
    SpyDevice& device_;
    std::unique_ptr<Buffer> inner_;
    uint64_t bytes_;
  };

  struct SpyRecorder : Recorder {
    SpyRecorder(SpyDevice& device, std::unique_ptr<Recorder> inner)
        : device_(device), inner_(std::move(inner)) {}
    void segment() override { inner_->segment(); }
    void record(const Op& op) override {
      if (const auto* score = std::get_if<CisStore>(&op)) device_.scores.push_back(*score);
      if (const auto* bounds = std::get_if<PageBounds>(&op)) device_.pages.push_back(*bounds);
      if (const auto* seen = std::get_if<Attention>(&op)) device_.attention.push_back(*seen);
      if (const auto* scale = std::get_if<Scale>(&op); scale && scale->p.growth != 0)
        device_.growths.push_back(*scale);
      if (const auto* watch = std::get_if<QueryScore>(&op); watch && watch->p.kind == kQueryHeads)
        device_.watches.push_back(*watch);
      if (const auto* conv = std::get_if<ShortConv>(&op)) device_.convolutions.push_back(*conv);
      device_.stages += std::holds_alternative<Stage>(op);
      if (const auto* list = std::get_if<TopK>(&op); list && list->p.keep == kKeepOfStep)
        device_.selections.push_back(*list);
      inner_->record(op);
    }
    SpyDevice& device_;
    std::unique_ptr<Recorder> inner_;
  };

  struct SpyStream : Stream {
    SpyStream(SpyDevice& device, std::unique_ptr<Stream> inner) : device_(device), inner_(std::move(inner)) {
      bytes = inner_->bytes;
    }
    std::unique_ptr<Recorder> record(uint32_t max_rows) override {
      return std::make_unique<SpyRecorder>(device_, inner_->record(max_rows));
    }
    Result<std::unique_ptr<Program>> finish(std::unique_ptr<Recorder> recorder) override {
      THIMBLE_LET(program, inner_->finish(std::move(static_cast<SpyRecorder&>(*recorder).inner_)));
      device_.program_bytes += program->bytes;
      return std::move(program);
    }
    Status submit(Program& program, uint32_t first, uint32_t last, const StepParams& step,
                  std::span<const HeadState> heads) override {
      ++device_.submits;
      if (device_.before_submit) device_.before_submit(program, step, heads);
      return inner_->submit(program, first, last, step, heads);
    }
    Status submit_part(Program& program, uint32_t segment, uint32_t part, const StepParams& step,
                       std::span<const HeadState> heads) override {
      ++device_.submits;
      if (device_.before_submit) device_.before_submit(program, step, heads);
      return inner_->submit_part(program, segment, part, step, heads);
    }
    Status wait() override { return inner_->wait(); }
    SpyDevice& device_;
    std::unique_ptr<Stream> inner_;
  };

  std::shared_ptr<Device> inner_;
};

// The current lists of a recorded selection: the entries of each KV head.
inline std::vector<std::vector<uint32_t>> read_lists(Device& device, const TopK& op) {
  std::vector<std::vector<uint32_t>> lists(op.p.heads);
  for (uint32_t head = 0; head < op.p.heads; ++head) {
    std::vector<uint32_t> all(op.p.list_capacity);
    const uint64_t bytes = all.size() * sizeof(uint32_t);
    if (!device.read(all.data(), op.list.slice(head * bytes, bytes)).ok()) return {};
    lists[head].assign(all.begin() + 1, all.begin() + 1 + all[0]);
  }
  return lists;
}

}  // namespace thimble::test
