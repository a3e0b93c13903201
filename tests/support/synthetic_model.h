// Small models of random weights in the shape of a family, made by a script of the shared data.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>

#include "runtime/model/model.h"
#include "tests/support/data.h"
#include "tests/support/sessions.h"

namespace thimble::test {

// A file made by "SHAPE TYPE FILE ...", in the notation of the goldens. It is removed with this object.
class SyntheticFile {
 public:
  // `name`: the file's name, which no other test of the program uses.
  SyntheticFile(std::string command, const std::string& name)
      : path_(::testing::TempDir() + name + "." + std::to_string(getpid()) + ".gguf") {
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

// A small model of a family: "tiny-FAMILY" of tests/reference if it exists, otherwise one from the script.
// `test` names its file.
inline std::string project_family(std::string family) {
  std::replace(family.begin(), family.end(), '_', '-');
  return project_file("tests/reference/tiny-" + family + ".gguf");
}
inline bool is_project_family(const std::string& family) {
  return std::filesystem::exists(project_family(family));
}
inline std::shared_ptr<const Model> family_model(const std::string& family, const std::string& test) {
  const std::string path = project_family(family);
  if (is_project_family(family)) return must(Model::open(must(MappedFile::open(path)), path));
  const std::string shape = std::filesystem::path(path).stem().string();
  return SyntheticFile(shape + " f16 FILE --seed 4 --sharp 3", test + "_" + family).open();
}

}  // namespace thimble::test
