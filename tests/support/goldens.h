// Shared by tests with files of expected logits and tokens.
#pragma once

#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/mapped_file.h"
#include "tests/support/sessions.h"

namespace thimble::test {

using Top = std::vector<std::pair<int32_t, float>>;  // token ids and their logits

inline nlohmann::json load_json(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

inline std::shared_ptr<const Model> open_model(const std::string& path) {
  return must(Model::open(must(MappedFile::open(path)), path));
}

}  // namespace thimble::test
