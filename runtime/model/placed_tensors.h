// The tensors of mapped files in a device's memory. They belong to the owner of the files, and all sessions
// on a device share them.
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
  Weight weight(const Tensor&) const;  // empty if the tensor was not placed
  // The bytes of device memory that the tensors take. 0: the device reads the mapped file.
  uint64_t bytes() const;

 private:
  friend class Placements;
  // Places tensors one after the other, each aligned as the device needs it, in buffers as large as the
  // device allows.
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
  std::vector<const std::byte*> files_;  // if buffers map the files: the files' first bytes
  std::unordered_map<const std::byte*, Layout::Place> places_;  // otherwise: the tensors' places
};

// The placed tensors of a model or a retainer, by device. Any thread may use it.
class Placements {
 public:
  // The bytes that placing these tensors takes on such a device. 0: the device reads the mapped file.
  static uint64_t bytes(const std::vector<Tensor>&, const DeviceInfo&);
  // Whether another session keeps the tensors on this device now.
  bool has(const Device&) const;
  // Copies the tensors to the device, once for all users that hold the result at the same time. `files`: the
  // mapped bytes that contain the tensors.
  Result<std::shared_ptr<const PlacedTensors>> place(const std::vector<std::span<const std::byte>>& files,
                                                     const std::vector<Tensor>&,
                                                     const std::shared_ptr<Device>&);

 private:
  mutable std::mutex mutex_;
  std::map<const Device*, std::weak_ptr<const PlacedTensors>> placed_;
};

}  // namespace thimble
