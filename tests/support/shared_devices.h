// Devices that all tests of a program share, so that each pipeline is compiled only once.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>

#include "backends/backend.h"

namespace thimble::test {

class SharedDevices : public ::testing::Environment {
 public:
  static inline std::map<std::string, std::shared_ptr<Device>> by_name;
  // A driver may be unloaded before static objects are destroyed, so devices are closed here.
  void TearDown() override { by_name.clear(); }
};
inline const auto* const kSharedDevices = ::testing::AddGlobalTestEnvironment(new SharedDevices);

// The device of this name, which `open` returned when it was first requested. Null after `open` failed; then
// the next call tries again.
template <typename Open>
std::shared_ptr<Device> shared_device(const std::string& name, const Open& open) {
  std::shared_ptr<Device>& device = SharedDevices::by_name[name];
  if (!device) device = open();
  return device;
}

}  // namespace thimble::test
