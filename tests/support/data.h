// Where test data lies, and how a test says that it is missing.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

namespace thimble {

// A file of the project.
std::string project_file(const std::string& path);
// A file of the shared test data, which does not travel with the project.
std::string shared_file(const std::string& path);

}  // namespace thimble

// Skips a test whose shared data is missing; fails it where the data must be there (CI).
#define THIMBLE_NEEDS(path)                                                                    \
  if (!std::filesystem::exists(path)) {                                                        \
    if (std::getenv("THIMBLE_REQUIRE_DATA")) FAIL() << "test data is missing: " << path;       \
    GTEST_SKIP() << "test data is missing: " << path;                                          \
  }                                                                                            \
  static_assert(true)
