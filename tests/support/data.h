// Where test data is stored, and what a test does if it is missing.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

namespace thimble {

// A file of the repository.
std::string project_file(const std::string& path);
// A file of the shared test data, which is not part of the repository.
std::string shared_file(const std::string& path);

}  // namespace thimble

// Skips a test if its shared data is missing; fails it if the data is required (CI).
#define THIMBLE_NEEDS(path)                                                                    \
  if (!std::filesystem::exists(path)) {                                                        \
    if (std::getenv("THIMBLE_REQUIRE_DATA")) FAIL() << "test data is missing: " << path;       \
    GTEST_SKIP() << "test data is missing: " << path;                                          \
  }                                                                                            \
  static_assert(true)
