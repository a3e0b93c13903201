#include "backends/vulkan/host/vulkan_device.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <optional>

#include "backends/checks.h"
#include "backends/vulkan/heads.h"
#include "backends/vulkan/host/measure.h"
#include "backends/vulkan/host/memory.h"
#include "backends/vulkan/host/vulkan_stream.h"
#include "backends/vulkan/ops.h"
#include "base/bits.h"

namespace thimble {
namespace vulkan {
namespace {

// The memory that opening a device takes if its driver does not report it. On lavapipe, 15.6 MiB were
// measured.
constexpr uint64_t kContextBytes = 16 << 20;

// The memory of a model's pipelines, about forty. On lavapipe, where LLVM compiles them, thirty pipelines
// took 60 MiB.
uint64_t pipeline_bytes(const Gpu& gpu) {
  return 40 * (gpu.type == VK_PHYSICAL_DEVICE_TYPE_CPU ? 2 << 20 : 256 << 10);
}

class VulkanDevice : public Device {
 public:
  VulkanDevice(std::shared_ptr<Context> context, std::optional<uint64_t> used_before)
      : context_(std::move(context)), gpu_(context_->gpu), used_before_(used_before), staging_(context_) {}

  Status open() {
    THIMBLE_TRY(staging_.open());
    const std::optional<uint64_t> used = used_gpu_bytes(context_->instance, gpu_);
    if (used && used_before_) context_bytes_ = *used - std::min(*used, *used_before_);
    return {};
  }

  DeviceInfo info() const override {
    DeviceInfo info = gpu_.info;
    info.free_bytes = free_gpu_bytes(context_->instance, gpu_);
    return info;
  }

  Result<Needs> needs(const ModelShape& m, const SessionShape& s) const override {
    const char* name = gpu_.info.name.c_str();
    const uint32_t most_dim = most_head_dim(gpu_.limits);
    if (m.head_dim % 2 || m.head_dim > most_dim)
      return error(Code::kUnsupported,
                   "the model has heads of %u channels; %s takes even ones up to %u: use --device cpu",
                   m.head_dim, name, most_dim);
    // The K or V of a head is bound as one range, both in the pool and in the view.
    const uint64_t entry = kv_bytes(DType::kF16, m.head_dim), most = most_entries(gpu_.limits, entry),
                   most_run = most_run_entries(gpu_.limits, entry, s.layer_entries);
    if (s.run_capacity > most_run || s.view_capacity > most)
      return error(Code::kUnsupported,
                   "a shader of %s sees %" PRIu64 " MiB at once, %" PRIu64
                   " entries of a head of this model in the pool and %" PRIu64
                   " in the view, and the pool has %u and the view %u; use a smaller pool, or --device cpu",
                   name, gpu_.limits.max_range >> 20, most_run, most, s.run_capacity, s.view_capacity);
    uint64_t scratch = 0;
    for (const auto op_scratch :
         {product_scratch, attention_scratch, token_score_scratch, vote_scratch, top_k_scratch,
          vote_top_k_scratch, label_scratch, norm_scratch, arg_max_scratch, route_scratch, expert_scratch,
          delta_scratch, ssm_scratch, kv_recall_scratch, attend_all_scratch})
      scratch = std::max(scratch, op_scratch(m, s, gpu_.limits));
    return Needs{.fixed = context_bytes_ + pipeline_bytes(gpu_) + 2 * Staging::kBytes,
                 .programs = program_bytes(m),
                 .workspace = round_up(scratch, gpu_.info.alignment)};
  }

  Result<std::unique_ptr<Buffer>> alloc(MemKind kind, uint64_t bytes) override {
    const bool in_host = kind == MemKind::kIo || kind == MemKind::kHostWeights;
    THIMBLE_LET(buffer, allocate(context_, in_host ? Place::kHost : Place::kDevice, bytes));
    if (kind == MemKind::kIo)
      std::memset(buffer->mapped, 0, bytes);
    else if (!in_host)
      THIMBLE_TRY(staging_.clear(*buffer));
    return std::unique_ptr<Buffer>(std::move(buffer));
  }

  Result<std::unique_ptr<Buffer>> import_host(const void*, uint64_t) override {
    return error(Code::kUnsupported, "%s reads weights from its own memory", gpu_.info.name.c_str());
  }

  Status write(View to, const void* source) override {
    THIMBLE_TRY(check_view(to));
    return staging_.write(to, static_cast<const std::byte*>(source));
  }
  Status read(void* destination, View from) override {
    THIMBLE_TRY(check_view(from));
    return staging_.read(static_cast<std::byte*>(destination), from);
  }
  Status copy(View to, View from) override {
    if (to.bytes != from.bytes)
      return error(Code::kInternal, "a copy of %" PRIu64 " bytes to %" PRIu64, from.bytes, to.bytes);
    THIMBLE_TRY(check_view(to));
    THIMBLE_TRY(check_view(from));
    return staging_.copy(to, from);
  }

  Result<std::unique_ptr<Stream>> open_stream(View workspace, uint32_t heads) override {
    if (workspace.bytes) THIMBLE_TRY(check_view(workspace));
    return vulkan::open_stream(context_, workspace, heads);
  }

  bool supports(const Op& op) const override { return vulkan::supports(op, gpu_.limits); }

  Result<Rates> measure() override { return measure_rates(*this, info()); }

 private:
  std::shared_ptr<Context> context_;
  const Gpu& gpu_;
  const std::optional<uint64_t> used_before_;
  uint64_t context_bytes_ = kContextBytes;
  Staging staging_;
};

// Limits the device to what Vulkan 1.2 guarantees, to test the behaviour of small devices.
void limit(Gpu& gpu) {
  Limits& l = gpu.limits;
  l.max_group_threads = std::min<uint32_t>(l.max_group_threads, 128);
  l.max_shared_bytes = std::min<uint32_t>(l.max_shared_bytes, 16 << 10);
  l.max_groups = std::min<uint32_t>(l.max_groups, 65535);
  l.max_range = std::min<uint64_t>(l.max_range, 128 << 20);
  l.f16_storage = l.f16_arithmetic = l.byte_products = l.cooperative_matrix = false;
  gpu.info.max_binding = l.max_range;
}

Result<std::shared_ptr<Device>> open_gpu(const Instance& instance, const Gpu& gpu, Messages messages) {
  const std::optional<uint64_t> used = used_gpu_bytes(instance, gpu);
  THIMBLE_LET(context, Context::open(instance, gpu, std::move(messages)));
  return make_device(std::move(context), used);
}

}  // namespace

Result<std::shared_ptr<Device>> make_device(std::shared_ptr<Context> context,
                                            std::optional<uint64_t> used_before) {
  auto device = std::make_shared<VulkanDevice>(std::move(context), used_before);
  THIMBLE_TRY(device->open());
  return std::shared_ptr<Device>(std::move(device));
}

}  // namespace vulkan

std::vector<DeviceInfo> vulkan_device_infos() {
  const auto instance = vulkan::Instance::get();
  if (!instance.ok()) return {};
  std::vector<DeviceInfo> infos;
  for (vulkan::Gpu& gpu : vulkan::find_gpus(**instance)) infos.push_back(std::move(gpu.info));
  return infos;
}

Result<std::shared_ptr<Device>> open_vulkan_device(uint32_t index, bool portable,
                                                   const std::function<void(const char*)>& messages) {
  THIMBLE_LET(instance, vulkan::Instance::get());
  std::vector<vulkan::Gpu> gpus = vulkan::find_gpus(*instance);
  if (gpus.empty())
    return error(Code::kUnsupported,
                 "Vulkan shows no device; install the driver of your card, or use --device cpu");
  if (index >= gpus.size())
    return error(Code::kInvalidArgument, "vulkan:%u was asked for; there are %zu devices, counted from 0",
                 index, gpus.size());
  vulkan::Gpu& gpu = gpus[index];
  if (!gpu.refused.empty())
    return error(Code::kUnsupported, "%s cannot be used: %s; use --device cpu", gpu.info.name.c_str(),
                 gpu.refused.c_str());
  if (portable) vulkan::limit(gpu);
  return vulkan::open_gpu(*instance, gpu, messages);
}

Result<std::shared_ptr<Device>> open_vulkan_hardware() {
  THIMBLE_LET(instance, vulkan::Instance::get());
  const std::vector<vulkan::Gpu> gpus = vulkan::find_gpus(*instance);
  if (gpus.empty() || !gpus.front().info.usable || gpus.front().info.software)
    return error(Code::kUnsupported, "Vulkan shows no card that can be used");
  return vulkan::open_gpu(*instance, gpus.front(), {});
}

}  // namespace thimble
