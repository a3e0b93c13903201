// The name of a test that runs on a device: the device's name, with the characters that GoogleTest allows.
#pragma once

#include <gtest/gtest.h>

#include <cctype>
#include <string>

namespace thimble::test {

inline std::string device_test_name(const ::testing::TestParamInfo<std::string>& device) {
  std::string name = device.param;
  for (char& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  return name;
}

}  // namespace thimble::test
