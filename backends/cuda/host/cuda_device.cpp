// A card's memory, copies between it and the host, and the memory that a session needs.
#include "backends/cuda/host/cuda_device.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "backends/checks.h"
#include "backends/cuda/host/card_memory.h"
#include "backends/cuda/host/cuda_stream.h"
#include "backends/cuda/host/measure.h"
#include "backends/cuda/host/store_step.h"
#include "backends/cuda/ops.h"
#include "backends/kv_formats.h"

namespace thimble {
namespace cuda {
namespace {

constexpr uint64_t kAllocation = 2 << 20;  // cudaMalloc allocates multiples of this

struct DeviceBuffer : CudaBuffer {
  explicit DeviceBuffer(std::shared_ptr<const CardState> s) : state(std::move(s)) {}
  ~DeviceBuffer() override {
    if (cudaSetDevice(state->card.index) != cudaSuccess) return;
    const std::lock_guard lock(state->memory);
    if (mapped)
      cudaFreeHost(mapped);
    else
      cudaFree(address);
  }
  std::shared_ptr<const CardState> state;
};

// Pinned memory for copies of host data. Its two halves are used in turn.
class Staging {
 public:
  static constexpr uint64_t kBytes = 8 << 20;

  ~Staging() {
    if (stream) cudaStreamDestroy(stream);
    for (cudaEvent_t e : sent)
      if (e) cudaEventDestroy(e);
    if (memory) cudaFreeHost(memory);
  }
  cudaError_t open() {
    cudaError_t e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (cudaEvent_t& event : sent)
      if (e == cudaSuccess) e = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    return e == cudaSuccess ? cudaHostAlloc(&memory, 2 * kBytes, cudaHostAllocDefault) : e;
  }
  cudaError_t write(std::byte* to, const std::byte* from, uint64_t bytes) {
    cudaError_t e = cudaSuccess;
    for (uint64_t at = 0, half = 0; at < bytes && e == cudaSuccess; at += kBytes, half ^= 1) {
      const uint64_t n = std::min(kBytes, bytes - at);
      std::byte* piece = static_cast<std::byte*>(memory) + half * kBytes;
      e = cudaEventSynchronize(sent[half]);
      if (e != cudaSuccess) break;
      std::memcpy(piece, from + at, n);
      e = cudaMemcpyAsync(to + at, piece, n, cudaMemcpyHostToDevice, stream);
      if (e == cudaSuccess) e = cudaEventRecord(sent[half], stream);
    }
    return e == cudaSuccess ? cudaStreamSynchronize(stream) : e;
  }
  cudaError_t read(std::byte* to, const std::byte* from, uint64_t bytes) {
    cudaError_t e = cudaSuccess;
    for (uint64_t at = 0; at < bytes && e == cudaSuccess; at += kBytes) {
      const uint64_t n = std::min(kBytes, bytes - at);
      e = cudaMemcpyAsync(memory, from + at, n, cudaMemcpyDeviceToHost, stream);
      if (e == cudaSuccess) e = cudaStreamSynchronize(stream);
      if (e == cudaSuccess) std::memcpy(to + at, memory, n);
    }
    return e;
  }

  cudaStream_t stream = nullptr;

 private:
  cudaEvent_t sent[2] = {};
  void* memory = nullptr;
};

// The free bytes of a card with `total` bytes. For a part of a card, the driver may report the free bytes of
// the whole card.
uint64_t free_bytes(int index, uint64_t total) {
  return std::min(free_card_bytes(index).value_or(total), total);
}

// The formats of keys and values that kernels know.
bool has_format(DType type) { return has_kv_format(type) || type == DType::kQ8_0 || type == DType::kQ4_0; }

// Rows of the pool are read in units of 16 bytes.
bool takes_rows_of(uint32_t head_dim) { return head_dim <= kMostHeadDim && head_dim % 8 == 0; }
// Whether attention takes heads of so many channels with values of their own.
bool takes_heads_of(uint32_t head_dim) {
  return takes_rows_of(head_dim) && (head_dim <= kMostNarrowHeadDim || head_dim == kWideHeadDim);
}

// Whether an op has a kernel for its types and parameters.
struct TakesTypes {
  const Card& card;

  static bool takes(const KvArray& a, uint32_t head_dim) {
    return has_format(a.type) && kv_fits(a.type, head_dim) && takes_rows_of(head_dim);
  }
  static bool has_blocks(const KvArray& a) { return dtype_info(a.type).block > 1; }
  // Of keys and values, one may have blocks and the other f16, or other blocks. Values that are channels of
  // the keys have no array.
  static bool take(const KvArray& k, const KvArray& v, uint32_t head_dim) {
    const auto mixes = [](const KvArray& a) { return a.type == DType::kF16 || has_blocks(a); };
    if (!v) return takes(k, head_dim);
    return takes(k, head_dim) && takes(v, head_dim) && (k.type == v.type || (mixes(k) && mixes(v)));
  }
  // A chunk has the format of its pool; it may be empty.
  static bool alike(const KvArray& pool, const KvArray& chunk) { return !chunk || pool.type == chunk.type; }
  bool operator()(const KvAppend& op) const { return take(op.k, op.v, op.p.head_dim); }
  bool operator()(const KvView& op) const {
    return take(op.pool_k, op.pool_v, op.p.head_dim) && alike(op.pool_k, op.chunk_k) &&
           alike(op.pool_v, op.chunk_v);
  }
  bool operator()(const Attention& op) const {
    const bool rows_are_halves = op.p.source != kFromView || op.k.type == DType::kF16;
    return take(op.k, op.v, op.p.head_dim) && rows_are_halves &&
           (op.v ? takes_heads_of(op.p.head_dim) : !has_blocks(op.k) && takes_latent(op.p));
  }
  // The view's rows are read in units of 16 bytes.
  bool operator()(const LiftView& op) const { return op.p.rotated % 8 == 0 && op.p.latent % 8 == 0; }
  bool operator()(const AttendAll& op) const {
    return op.v && takes_heads_of(op.p.head_dim) && takes(op.k, op.p.head_dim) &&
           takes(op.v, op.p.head_dim) && takes(op.stored_k, op.p.head_dim) &&
           takes(op.stored_v, op.p.head_dim) && alike(op.k, op.chunk_k) && alike(op.v, op.chunk_v);
  }
  bool operator()(const KvCompact& op) const {
    return take(op.k, op.v, op.p.head_dim) && alike(op.k, op.chunk_k) && alike(op.v, op.chunk_v);
  }
  bool operator()(const KvMerge& op) const { return take(op.k, op.v, op.p.head_dim); }
  // One of two formats between which rows are copied is f16, or both are the same.
  static bool copies(const KvArray& from, const KvArray& to, const KvArray& pool, uint32_t head_dim) {
    return takes(from, head_dim) && takes(to, head_dim) && (from.type == to.type || pool.type == DType::kF16);
  }
  bool operator()(const KvSpill& op) const {
    return copies(op.pool_k, op.k, op.pool_k, op.p.head_dim) &&
           copies(op.pool_v, op.v, op.pool_v, op.p.head_dim) && alike(op.pool_k, op.chunk_k) &&
           alike(op.pool_v, op.chunk_v);
  }
  bool operator()(const KvRecall& op) const {
    return copies(op.row_k, op.k, op.k, op.p.head_dim) && copies(op.row_v, op.v, op.v, op.p.head_dim);
  }
  bool operator()(const PageVote& op) const { return takes(op.stored_k, op.p.head_dim); }
  bool operator()(const TokenScore& op) const { return takes(op.k, op.p.head_dim); }
  bool operator()(const PageBounds& op) const {  // f16 bounds would round those of bf16
    return (op.k.type == DType::kF16 || has_blocks(op.k)) && takes(op.k, op.p.head_dim);
  }
  bool operator()(const PageScore& op) const { return takes_rows_of(op.p.head_dim); }
  bool operator()(const Label& op) const {
    return takes(op.k, op.p.head_dim) && takes_label(card, op.p.head_dim) && alike(op.k, op.chunk_k);
  }
  bool operator()(const KeyDiff& op) const { return takes(op.k, op.p.head_dim) && alike(op.k, op.chunk_k); }
  bool operator()(const QueryScore& op) const {
    return takes(op.k, op.p.head_dim) && alike(op.k, op.chunk_k);
  }
  template <typename Any>
  bool operator()(const Any&) const {
    return true;
  }
};

class CudaDevice : public Device {
 public:
  CudaDevice(const Card& card, DeviceInfo info)
      : state_(std::make_shared<CardState>(card)), info_(std::move(info)) {}

  Status open() {
    const std::optional<uint64_t> before = free_card_bytes(state_->card.index);
    THIMBLE_TRY(state_->use());
    THIMBLE_TRY(state_->check(cudaFree(nullptr), "opening it"));  // creates the context
    Card card = state_->card;
    THIMBLE_TRY(state_->check(find_kernels(card), "loading kernels"));
    state_ = std::make_shared<CardState>(card);
    THIMBLE_TRY(state_->check(staging_.open(), "allocating staging memory"));
    uint64_t free = 0, total = 0;
    THIMBLE_TRY(state_->check(cudaMemGetInfo(&free, &total), "counting its memory"));
    // Without the management library, all memory in use counts as the context's.
    const uint64_t now = before ? free_card_bytes(state_->card.index).value_or(free) : free;
    const uint64_t cost = before.value_or(total) - std::min(now, before.value_or(total));
    // A context that already existed costs nothing now, but its cost at creation still counts.
    static std::mutex mutex;
    static std::vector<uint64_t> costs;
    const std::lock_guard lock(mutex);
    const size_t index = static_cast<size_t>(state_->card.index);
    if (costs.size() <= index) costs.resize(index + 1);
    context_bytes_ = costs[index] = std::max(costs[index], cost);
    return {};
  }

  DeviceInfo info() const override {
    DeviceInfo info = info_;
    info.free_bytes = free_bytes(state_->card.index, info.total_bytes);
    return info;
  }

  bool lost() const { return state_->lost; }

  Result<Needs> needs(const ModelShape& m, const SessionShape& s) const override {
    constexpr uint32_t kMostGroup = 16, kMostChunk = 65535;  // a grid has at most 65535 rows
    // Latent keys may serve any number of query heads. Others of this width are refused with their op.
    const bool is_latent = m.head_dim == kMostHeadDim;
    if (!is_latent && (!takes_heads_of(m.head_dim) || m.heads > kMostGroup * m.kv_heads))
      return error(
          Code::kUnsupported,
          "the model has heads of %u and %u query heads to %u KV heads; cuda takes heads of a "
          "multiple of 8, at most %u, or of %u, and at most %u query heads to a KV head: use --device "
          "cpu",
          m.head_dim, m.heads, m.kv_heads, kMostNarrowHeadDim, kWideHeadDim, kMostGroup);
    if (s.chunk > kMostChunk)
      return error(Code::kUnsupported, "a chunk of %u; cuda reads at most %u tokens at a time", s.chunk,
                   kMostChunk);
    uint64_t scratch = 0;
    for (const auto op_scratch :
         {dense_scratch, attention_scratch, attend_all_scratch, token_score_scratch, page_score_scratch,
          vote_scratch, top_k_scratch, label_scratch, kv_recall_scratch, page_vote_scratch, arg_max_scratch,
          route_scratch, expert_scratch, delta_net_scratch, ssm_scratch})
      scratch = std::max(scratch, op_scratch(m, s, state_->card));
    return Needs{.fixed = context_bytes_ + 2 * Staging::kBytes,
                 .programs = program_bytes(m),
                 .workspace = round_up(scratch, info_.alignment)};
  }

  Result<std::unique_ptr<Buffer>> alloc(MemKind kind, uint64_t bytes) override {
    THIMBLE_TRY(state_->use());
    auto buffer = std::make_unique<DeviceBuffer>(state_);
    buffer->size = bytes;
    if (!bytes) return std::unique_ptr<Buffer>(std::move(buffer));
    void* memory = nullptr;
    const bool in_host = kind == MemKind::kIo || kind == MemKind::kHostWeights;
    if (in_host) {
      THIMBLE_TRY(state_->check(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped),
                                "allocating host memory"));
      buffer->mapped = memory;
      if (kind == MemKind::kIo) std::memset(memory, 0, bytes);
    } else {
      const std::lock_guard lock(state_->memory);
      THIMBLE_TRY(state_->check(cudaMalloc(&memory, bytes), "allocating"));
    }
    buffer->address = static_cast<std::byte*>(memory);
    if (!in_host) {
      const std::lock_guard lock(mutex_);
      THIMBLE_TRY(state_->check(cudaMemsetAsync(memory, 0, bytes, staging_.stream), "clearing memory"));
      THIMBLE_TRY(state_->check(cudaStreamSynchronize(staging_.stream), "clearing memory"));
    }
    return std::unique_ptr<Buffer>(std::move(buffer));
  }

  Result<std::unique_ptr<Buffer>> import_host(const void*, uint64_t) override {
    return error(Code::kUnsupported, "cuda reads weights from its own memory");
  }

  Status write(View to, const void* source) override {
    THIMBLE_TRY(begin(to));
    const std::lock_guard lock(mutex_);
    return state_->check(staging_.write(data<std::byte>(to), static_cast<const std::byte*>(source), to.bytes),
                         "writing");
  }
  Status read(void* destination, View from) override {
    THIMBLE_TRY(begin(from));
    const std::lock_guard lock(mutex_);
    return state_->check(
        staging_.read(static_cast<std::byte*>(destination), data<std::byte>(from), from.bytes), "reading");
  }
  Status copy(View to, View from) override {
    if (to.bytes != from.bytes)
      return error(Code::kInternal, "a copy of %llu bytes to %llu",
                   static_cast<unsigned long long>(from.bytes), static_cast<unsigned long long>(to.bytes));
    THIMBLE_TRY(begin(to));
    THIMBLE_TRY(begin(from));
    const std::lock_guard lock(mutex_);
    THIMBLE_TRY(state_->check(cudaMemcpyAsync(data<std::byte>(to), data<std::byte>(from), to.bytes,
                                              cudaMemcpyDefault, staging_.stream),
                              "copying"));
    return state_->check(cudaStreamSynchronize(staging_.stream), "copying");
  }

  Result<std::unique_ptr<Stream>> open_stream(View workspace, uint32_t heads) override {
    if (workspace.bytes) THIMBLE_TRY(check_view(workspace));
    return cuda::open_stream(state_, info_, workspace, heads);
  }

  bool supports(const Op& op) const override {
    return has_op(op, kOnCuda) && !weighs_queries(op) && std::visit(TakesTypes{state_->card}, op);
  }

  Result<Rates> measure() override {
    THIMBLE_TRY(state_->use());
    return measure_rates(*state_);
  }

 private:
  Status begin(const View& v) const {
    THIMBLE_TRY(check_view(v));
    return state_->use();
  }

  std::shared_ptr<const CardState> state_;
  DeviceInfo info_;
  uint64_t context_bytes_ = 0;
  std::mutex mutex_;  // protects staging_
  Staging staging_;
};

Card card_of(int index, const cudaDeviceProp& properties) {
  return {.index = index,
          .major = properties.major,
          .minor = properties.minor,
          .multiprocessors = static_cast<uint32_t>(properties.multiProcessorCount),
          .shared_bytes = static_cast<uint32_t>(properties.sharedMemPerBlockOptin)};
}

DeviceInfo info_of(int index, const cudaDeviceProp& properties) {
  int driver = 0;
  cudaDriverGetVersion(&driver);
  char description[320];
  std::snprintf(description, sizeof description, "%s, compute capability %d.%d, driver for CUDA %d.%d",
                properties.name, properties.major, properties.minor, driver / 1000, driver % 1000 / 10);
  return {.name = "cuda:" + std::to_string(index),
          .description = description,
          .total_bytes = properties.totalGlobalMem,
          .free_bytes = free_bytes(index, properties.totalGlobalMem),
          .max_binding = std::numeric_limits<uint64_t>::max(),
          .alignment = 256,
          .granularity = kAllocation,
          .unified = false,
          .view_element_bytes = 2,
          .stages_weights = true,
          .lifts_views = true,
          .votes_pages = true};
}

}  // namespace
}  // namespace cuda

std::vector<DeviceInfo> cuda_device_infos() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return {};
  std::vector<DeviceInfo> infos;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, i) == cudaSuccess) infos.push_back(cuda::info_of(i, properties));
  }
  return infos;
}

Result<std::shared_ptr<Device>> open_cuda_device(uint32_t index, bool portable) {
  int count = 0;
  const cudaError_t found = cudaGetDeviceCount(&count);
  if (found == cudaErrorInsufficientDriver || found == cudaErrorNoDevice || count == 0)
    return error(Code::kUnsupported,
                 "no NVIDIA card can be used: %s; install its driver, or use --device cpu",
                 found == cudaSuccess ? "none was found" : cudaGetErrorString(found));
  if (found != cudaSuccess)
    return error(Code::kUnsupported, "no NVIDIA card can be used: %s", cudaGetErrorString(found));
  if (index >= static_cast<uint32_t>(count))
    return error(Code::kInvalidArgument, "cuda:%u was asked for; there are %d cards, counted from 0", index,
                 count);
  cudaDeviceProp properties;
  const int i = static_cast<int>(index);
  if (const cudaError_t e = cudaGetDeviceProperties(&properties, i); e != cudaSuccess)
    return error(Code::kUnsupported, "cuda:%u does not answer: %s", index, cudaGetErrorString(e));
  cuda::Card card = cuda::card_of(i, properties);
  if (portable) {
    card.major = 8;
    card.minor = 0;
    card.shared_bytes = std::min<uint32_t>(card.shared_bytes, 99 << 10);  // the limit of 8.6, the smallest
  }
  // Everyone who opens the same card shares one device, including the weights stored there.
  static std::mutex mutex;
  static std::map<std::pair<int, bool>, std::weak_ptr<cuda::CudaDevice>> opened;
  const std::lock_guard lock(mutex);
  std::weak_ptr<cuda::CudaDevice>& known = opened[{i, portable}];
  if (auto device = known.lock(); device && !device->lost())
    return std::shared_ptr<Device>(std::move(device));
  auto device = std::make_shared<cuda::CudaDevice>(card, cuda::info_of(i, properties));
  THIMBLE_TRY(device->open());
  known = device;
  return std::shared_ptr<Device>(std::move(device));
}

}  // namespace thimble
