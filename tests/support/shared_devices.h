// Devices that all tests of a program share, so that a pipeline which one test has compiled is not compiled
// again in the next.
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
  // A driver may be unloaded by the time static objects are destroyed, so devices are closed before that.
  void TearDown() override { by_name.clear(); }
};
inline const auto* const kSharedDevices = ::testing::AddGlobalTestEnvironment(new SharedDevices);

// The device of this name: what `open` returned when it was first asked for. Null, and asked for again, after
// `open` has failed.
template <typename Open>
std::shared_ptr<Device> shared_device(const std::string& name, const Open& open) {
  std::shared_ptr<Device>& device = SharedDevices::by_name[name];
  if (!device) device = open();
  return device;
}

}  // namespace thimble::test
