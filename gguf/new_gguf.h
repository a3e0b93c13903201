// GGUF v3 files that the library writes: sidecars.
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
  // Gives the values of a tensor, dtype_bytes() of them. Called once, when the file is written.
  using Values = std::function<std::vector<std::byte>()>;

  void set(std::string_view key, std::string_view value);
  void set(std::string_view key, uint32_t value);
  void set(std::string_view key, uint64_t value);
  void set(std::string_view key, const GgufValue& value);  // its bytes as they lie in a file
  // `shape` is that of GGUF, fastest first.
  void add(std::string name, std::vector<uint64_t> shape, DType type, Values values);

  // Writes the file, holding the values of one tensor at a time. Refuses a path where something is already.
  Status write(const std::string& path) const;
  // The same in the place of a file that may be there.
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
