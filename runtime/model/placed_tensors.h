// Tensors of mapped files as a device sees them. They belong to the files' owner: sessions on a device share
// them.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "backends/backend.h"

namespace thimble {

struct Tensor;

class PlacedTensors {
 public:
  Weight weight(const Tensor&) const;  // an empty one for a tensor that is not among them
  uint64_t bytes() const;  // of device memory that they were given; none where the file is read as it lies

 private:
  friend class Placements;
  // Tensors behind each other, each aligned as the device asks, in buffers as large as it allows.
  struct Layout {
    struct Place {
      size_t buffer;
      uint64_t offset;
    };
    Layout(const std::vector<Tensor>&, const DeviceInfo&);
    std::unordered_map<const std::byte*, Place> places;  // by a tensor's first byte in the file
    std::vector<uint64_t> sizes;                         // of the buffers
  };

  std::shared_ptr<Device> device_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<const std::byte*> files_;  // where the buffers show the files themselves: their first bytes
  std::unordered_map<const std::byte*, Layout::Place> places_;  // else where its tensors lie
};

// Where the tensors of a model or a retainer lie, by device. Any thread may ask.
class Placements {
 public:
  // Bytes that placing these tensors takes on such a device; none where it reads the file as it lies.
  static uint64_t bytes(const std::vector<Tensor>&, const DeviceInfo&);
  // Whether they lie on this device already, for as long as another session keeps them there.
  bool has(const Device&) const;
  // Copies them to the device, once for all who hold the result at the same time. `files`: the bytes that
  // they lie in.
  Result<std::shared_ptr<const PlacedTensors>> place(const std::vector<std::span<const std::byte>>& files,
                                                     const std::vector<Tensor>&,
                                                     const std::shared_ptr<Device>&);

 private:
  mutable std::mutex mutex_;
  std::map<const Device*, std::weak_ptr<const PlacedTensors>> placed_;
};

}  // namespace thimble
