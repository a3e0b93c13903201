// Writes GGUF v3 files (sidecars).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/new_file.h"
#include "base/status.h"
#include "gguf/gguf.h"

namespace thimble {

class NewGguf {
 public:
  // Returns the values of a tensor, dtype_bytes() of them. Called once, when the file is written.
  using Values = std::function<std::vector<std::byte>()>;

  void set(std::string_view key, std::string_view value);
  void set(std::string_view key, uint32_t value);
  void set(std::string_view key, uint64_t value);
  void set(std::string_view key, const GgufValue& value);  // `bytes` of the value as stored in a file
  // `shape` is fastest-varying first, as in GGUF.
  void add(std::string name, std::vector<uint64_t> shape, DType type, Values values);

  // Writes the file, with the values of one tensor in memory at a time. Fails if the path already exists.
  Status write(const std::string& path) const;
  // Like write(), but replaces an existing file.
  Status replace(const std::string& path) const;

 private:
  struct Tensor {
    std::string name;
    std::vector<uint64_t> shape;
    DType type;
    Values values;
    uint64_t bytes() const;
  };
  void set(std::string_view key, GgufType type, std::string_view value);
  Status write_to(NewFile) const;

  uint64_t keys_ = 0;
  std::string metadata_;  // as in the file
  std::vector<Tensor> tensors_;
};

}  // namespace thimble
