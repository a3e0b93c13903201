// The tensors of mapped files in a device's memory. They belong to the owner of the files, and all sessions
// on a device share them.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "backends/backend.h"

namespace thimble {

struct Tensor;

class PlacedTensors {
 public:
  // The first bytes of tensors that stay in the host's memory although the device has its own.
  using InHost = std::unordered_set<const std::byte*>;

  Weight weight(const Tensor&) const;  // empty if the tensor was not placed
  // The bytes of device memory that the tensors take. 0: the device reads the mapped file.
  uint64_t bytes() const;

 private:
  friend class Placements;
  // Places tensors one after the other, each aligned as the device needs it, in buffers as large as the
  // device allows: first in the device's memory, then in the host's.
  struct Layout {
    struct Place {
      size_t buffer;
      uint64_t offset;
    };
    Layout(const std::vector<Tensor>&, const DeviceInfo&, const InHost&);
    uint64_t device_bytes() const;
    std::unordered_map<const std::byte*, Place> places;  // by a tensor's first byte in the file
    std::vector<uint64_t> sizes;                         // of the buffers
    size_t on_device = 0;  // how many of them, the first, are in the device's memory
  };

  std::shared_ptr<Device> device_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  uint64_t device_bytes_ = 0;
  std::vector<const std::byte*> files_;  // if buffers map the files: the files' first bytes
  std::unordered_map<const std::byte*, Layout::Place> places_;  // otherwise: the tensors' places
};

// The placed tensors of a model or a retainer, by device. Any thread may use it.
class Placements {
 public:
  // The bytes of a device's memory that placing these tensors takes. 0: the device reads the mapped file.
  static uint64_t bytes(const std::vector<Tensor>&, const DeviceInfo&, const PlacedTensors::InHost& = {});
  // Whether another session keeps the tensors on this device now.
  bool has(const Device&) const;
  // Copies the tensors to the device, and those that stay in the host's memory to where the device can read
  // them, once for all users that hold the result at the same time: who comes later gets the tensors where
  // they are. `files`: the mapped bytes that contain the tensors.
  Result<std::shared_ptr<const PlacedTensors>> place(const std::vector<std::span<const std::byte>>& files,
                                                     const std::vector<Tensor>&,
                                                     const std::shared_ptr<Device>&,
                                                     const PlacedTensors::InHost& = {});

 private:
  mutable std::mutex mutex_;
  std::map<const Device*, std::weak_ptr<const PlacedTensors>> placed_;
};

}  // namespace thimble
