// Parses GGUF v3 files: metadata and tensor table. The bytes are not trusted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/mapped_file.h"
#include "base/status.h"

namespace thimble {

// Metadata value types, numbered as in the file.
enum class GgufType : uint32_t {
  kU8 = 0,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kF32,
  kBool,
  kString,
  kArray,
  kU64,
  kI64,
  kF64
};

struct GgufValue {
  GgufType type = GgufType::kU32;  // type of the value, or of an array's elements; never kArray
  bool is_array = false;
  uint64_t count = 1;  // elements
  std::span<const std::byte>
      bytes;  // the elements as stored in the file, strings with their lengths; checked
};

struct GgufTensor {
  std::string_view name;
  uint32_t type = 0;  // a GGUF type id, possibly one that this library cannot read
  uint32_t dims = 1;
  uint64_t shape[4] = {1, 1, 1, 1};  // fastest-varying first
  uint64_t elements = 0;             // product of the shape; does not overflow
  const std::byte* data = nullptr;   // points into the file; aligned, with enough bytes for shape and type
  uint64_t bytes = 0;                // 0 if the type is unknown
};

// Formats a string from a file for a message: in quotes, as printable ASCII or whole UTF-8 sequences, at most
// about 80 bytes.
std::string in_quotes(std::string_view text);
// Formats a value for people: strings in quotes, arrays by their first elements.
std::string printed(const GgufValue& value);

// A mapped file and its name for error messages.
struct GgufFile {
  MappedFile map;
  std::string name;
};
// Maps the file at `path`. If its name is that of a part of a model ("NAME-00002-of-00003.gguf"), maps the
// other parts in the same folder too.
Result<std::vector<GgufFile>> open_gguf(const std::string& path);

// Parsed GGUF metadata and tensors. Views point into the files' memory; the files must outlive this object.
class Gguf {
 public:
  // Reads header, metadata and tensor table. `name` identifies the file in errors. Each error is one sentence
  // that names the key or tensor: Format for invalid files; Unsupported for other versions, for one part of a
  // model and for nested arrays; InvalidArgument for lent memory whose address is not a multiple of the
  // file's alignment.
  static Result<Gguf> parse(const MappedFile& file, std::string name);
  // Parses a model in one file, or in several files in any order. The name and metadata are those of the
  // first part; the tensors are those of all parts. Format if a part is missing, given twice, or of another
  // model.
  static Result<Gguf> parse(std::span<const GgufFile> files);

  const std::string& name() const { return name_; }
  const std::vector<GgufTensor>& tensors() const { return tensors_; }
  const GgufTensor* tensor(std::string_view name) const;
  // Ok if each tensor begins where the previous one ends, as in files of all known writers. Otherwise the
  // type or shape of the previous tensor is wrong, or a tensor is missing. parse() does not fail because of
  // it, so that a missing tensor can be reported by name.
  const Status& layout() const { return layout_; }
  const GgufValue* find(std::string_view key) const;
  Status lacks(std::string_view key) const;  // the error for a required key that is missing
  const std::vector<std::pair<std::string_view, GgufValue>>& metadata() const { return metadata_; }

  // Typed reads. Integers of any width and sign are accepted if the value fits. Missing keys give nullopt (or
  // an error with `need_*`); a key of another type is a Format error that names it.
  Result<std::optional<uint64_t>> get_uint(std::string_view key) const;
  Result<std::optional<double>> get_float(std::string_view key) const;
  Result<std::optional<bool>> get_bool(std::string_view key) const;
  Result<std::optional<std::string_view>> get_string(std::string_view key) const;
  Result<std::optional<std::vector<std::string_view>>> get_strings(std::string_view key) const;
  Result<std::optional<std::vector<int64_t>>> get_ints(std::string_view key) const;
  Result<std::optional<std::vector<bool>>> get_bools(std::string_view key) const;
  Result<std::optional<std::vector<float>>> get_floats(std::string_view key) const;
  Result<uint64_t> need_uint(std::string_view key) const;
  Result<double> need_float(std::string_view key) const;
  Result<std::string_view> need_string(std::string_view key) const;

  // Approximate size in bytes of these tables in memory.
  uint64_t host_bytes() const;

 private:
  struct Part {
    uint64_t index, count;  // index from 0; a count of 1 means not split
    std::string text() const;
  };
  static Result<Gguf> parse_one(const MappedFile& file, std::string name);
  Result<Part> part() const;
  Status append(const Gguf& part);

  std::string name_;
  std::vector<std::pair<std::string_view, GgufValue>> metadata_;
  std::vector<GgufTensor> tensors_;
  Status layout_;
  std::unordered_map<std::string_view, size_t> metadata_index_, tensor_index_;
};

}  // namespace thimble
