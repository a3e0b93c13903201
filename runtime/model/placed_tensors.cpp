#include "runtime/model/placed_tensors.h"

#include <cstring>
#include <numeric>

#include "base/bits.h"
#include "runtime/model/model.h"

namespace thimble {

Weight PlacedTensors::weight(const Tensor& t) const {
  Weight w;
  if (!t) return w;
  if (!files_.empty()) {
    for (size_t i = 0; i < files_.size() && !w.buffer; ++i) {
      // If the tensor is not in this file, the distance wraps around or is larger than the file.
      w.offset = reinterpret_cast<uintptr_t>(t.data) - reinterpret_cast<uintptr_t>(files_[i]);
      if (w.offset < buffers_[i]->size) w.buffer = buffers_[i].get();
    }
    if (!w.buffer) return {};
  } else {
    const auto found = places_.find(t.data);
    if (found == places_.end()) return {};
    w.buffer = buffers_[found->second.buffer].get();
    w.offset = found->second.offset;
  }
  w.bytes = t.bytes();
  w.type = t.type;
  w.rows = t.rows;
  w.cols = t.cols;
  w.scale = t.scale;
  return w;
}

uint64_t PlacedTensors::bytes() const { return device_bytes_; }

PlacedTensors::Layout::Layout(const std::vector<Tensor>& tensors, const DeviceInfo& device,
                              const InHost& in_host) {
  uint64_t end = 0;  // end of the tensors in the last buffer
  const auto place = [&](bool host, size_t first_buffer) {
    for (const Tensor& t : tensors) {
      if (places.contains(t.data) || in_host.contains(t.data) != host) continue;
      const uint64_t bytes = round_up(t.bytes(), device.alignment);
      if (sizes.size() == first_buffer || round_up(end + bytes, device.granularity) > device.max_allocation) {
        sizes.push_back(0);
        end = 0;
      }
      places[t.data] = {sizes.size() - 1, end};
      end += bytes;
      sizes.back() = round_up(end, device.granularity);
    }
  };
  place(false, 0);
  on_device = sizes.size();
  place(true, on_device);
}

uint64_t PlacedTensors::Layout::device_bytes() const {
  return std::accumulate(sizes.begin(), sizes.begin() + static_cast<ptrdiff_t>(on_device), uint64_t{0});
}

uint64_t Placements::bytes(const std::vector<Tensor>& tensors, const DeviceInfo& device,
                           const PlacedTensors::InHost& in_host) {
  return device.unified ? 0 : PlacedTensors::Layout(tensors, device, in_host).device_bytes();
}

bool Placements::has(const Device& device) const {
  const std::lock_guard lock(mutex_);
  const auto found = placed_.find(&device);
  return found != placed_.end() && !found->second.expired();
}

Result<std::shared_ptr<const PlacedTensors>> Placements::place(
    const std::vector<std::span<const std::byte>>& files, const std::vector<Tensor>& tensors,
    const std::shared_ptr<Device>& device, const PlacedTensors::InHost& in_host) {
  // The lock is held during the copy, so that a second session waits and does not copy the tensors again.
  const std::lock_guard lock(mutex_);
  std::erase_if(placed_, [](const auto& p) { return p.second.expired(); });
  if (const auto found = placed_.find(device.get()); found != placed_.end())
    if (auto placed = found->second.lock()) return placed;

  auto placed = std::make_shared<PlacedTensors>();
  placed->device_ = device;
  const DeviceInfo info = device->info();
  if (info.unified) {
    for (const std::span<const std::byte> file : files) {
      THIMBLE_LET(buffer, device->import_host(file.data(), file.size()));
      placed->buffers_.push_back(std::move(buffer));
      placed->files_.push_back(file.data());
    }
  } else {
    PlacedTensors::Layout layout(tensors, info, in_host);
    for (const uint64_t size : layout.sizes) {
      const bool on_device = placed->buffers_.size() < layout.on_device;
      THIMBLE_LET(buffer, device->alloc(on_device ? MemKind::kWeights : MemKind::kHostWeights, size));
      placed->buffers_.push_back(std::move(buffer));
    }
    placed->device_bytes_ = layout.device_bytes();
    placed->places_ = std::move(layout.places);
    for (const Tensor& t : tensors) {
      const Weight to = placed->weight(t);
      if (in_host.contains(t.data))
        std::memcpy(static_cast<std::byte*>(to.buffer->mapped) + to.offset, t.data, to.bytes);
      else
        THIMBLE_TRY(device->write(to, t.data));
    }
  }
  placed_[device.get()] = placed;
  return std::shared_ptr<const PlacedTensors>(std::move(placed));
}

}  // namespace thimble
