#include "runtime/model/placed_tensors.h"

#include "base/bits.h"
#include "runtime/model/model.h"

namespace thimble {

Weight PlacedTensors::weight(const Tensor& t) const {
  Weight w;
  if (!t) return w;
  if (file_) {
    // A wrapped-around distance is larger than any file.
    w.offset = reinterpret_cast<uintptr_t>(t.data) - reinterpret_cast<uintptr_t>(file_);
    if (w.offset >= buffer_->size) return {};
  } else {
    const auto found = offsets_.find(t.data);
    if (found == offsets_.end()) return {};
    w.offset = found->second;
  }
  w.buffer = buffer_.get();
  w.bytes = t.bytes();
  w.type = t.type;
  w.rows = t.rows;
  w.cols = t.cols;
  return w;
}

// Places the tensors behind each other, each aligned as the device asks; returns where the last one ends.
static uint64_t lay_out(const std::vector<Tensor>& tensors, uint32_t alignment,
                        std::unordered_map<const std::byte*, uint64_t>& offsets) {
  uint64_t end = 0;
  for (const Tensor& t : tensors)
    if (offsets.emplace(t.data, end).second) end = round_up(end + t.bytes(), alignment);
  return end;
}

uint64_t Placements::bytes(const std::vector<Tensor>& tensors, const DeviceInfo& device) {
  if (device.unified) return 0;
  std::unordered_map<const std::byte*, uint64_t> offsets;
  return round_up(lay_out(tensors, device.alignment, offsets), device.granularity);
}

bool Placements::has(const Device& device) const {
  const std::lock_guard lock(mutex_);
  const auto found = placed_.find(&device);
  return found != placed_.end() && !found->second.expired();
}

Result<std::shared_ptr<const PlacedTensors>> Placements::place(const MappedFile& file,
                                                               const std::vector<Tensor>& tensors,
                                                               const std::shared_ptr<Device>& device) {
  // The lock is held while they are copied, so that a second session waits instead of copying them again.
  const std::lock_guard lock(mutex_);
  std::erase_if(placed_, [](const auto& p) { return p.second.expired(); });
  if (const auto found = placed_.find(device.get()); found != placed_.end())
    if (auto placed = found->second.lock()) return placed;

  auto placed = std::make_shared<PlacedTensors>();
  placed->device_ = device;
  const DeviceInfo info = device->info();
  if (info.unified) {
    THIMBLE_LET(buffer, device->import_host(file.data(), file.size()));
    placed->buffer_ = std::move(buffer);
    placed->file_ = file.data();
  } else {
    const uint64_t total = lay_out(tensors, info.alignment, placed->offsets_);
    THIMBLE_LET(buffer, device->alloc(MemKind::kWeights, round_up(total, info.granularity)));
    placed->buffer_ = std::move(buffer);
    for (const Tensor& t : tensors) THIMBLE_TRY(device->write(placed->weight(t), t.data));
  }
  placed_[device.get()] = placed;
  return std::shared_ptr<const PlacedTensors>(std::move(placed));
}

}  // namespace thimble
