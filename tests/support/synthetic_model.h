// Small models of random weights in the shape of a family, which a script of the shared data writes.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>

#include "runtime/model/model.h"
#include "tests/support/data.h"
#include "tests/support/sessions.h"

namespace thimble::test {

// A file made by "SHAPE TYPE FILE ...", as goldens name it, that goes with this object.
class SyntheticFile {
 public:
  // `name`: of the file, unlike that of any other test.
  SyntheticFile(std::string command, const std::string& name) : path_(::testing::TempDir() + name + ".gguf") {
    command.replace(command.find("FILE"), 4, "'" + path_ + "'");
    const std::string tool = shared_file("tools/synth_gguf.py");
    EXPECT_EQ(std::system(("/usr/bin/python3 '" + tool + "' " + command + " > /dev/null").c_str()), 0);
  }
  ~SyntheticFile() { std::filesystem::remove(path_); }
  SyntheticFile(const SyntheticFile&) = delete;
  SyntheticFile& operator=(const SyntheticFile&) = delete;

  const std::string& path() const { return path_; }
  std::shared_ptr<const Model> open() const {
    return must(Model::open(must(MappedFile::open(path_)), path_));
  }

 private:
  std::string path_;
};

}  // namespace thimble::test
