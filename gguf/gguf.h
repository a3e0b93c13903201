// GGUF v3 files: metadata and tensor table, read from memory and trusted in nothing.
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

// Value types of metadata, numbered as in the file.
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
  GgufType type = GgufType::kU32;  // of the value, or of an array's elements; never kArray
  bool is_array = false;
  uint64_t count = 1;  // elements
  std::span<const std::byte>
      bytes;  // the elements as they lie in the file, strings with their lengths; checked
};

struct GgufTensor {
  std::string_view name;
  uint32_t type = 0;  // a GGUF id, maybe of a type that this library cannot read
  uint32_t dims = 1;
  uint64_t shape[4] = {1, 1, 1, 1};  // fastest first
  uint64_t elements = 0;             // product of the shape, which does not overflow
  const std::byte* data = nullptr;   // inside the file, aligned, large enough for shape and type
  uint64_t bytes = 0;                // 0 where the type is unknown
};

// A string of a file as a message may show it: printable ASCII or whole UTF-8, at most about 80 bytes, in
// quotes.
std::string in_quotes(std::string_view text);
// A value for people: strings in quotes, of an array the first few elements.
std::string printed(const GgufValue& value);

// A file, and how error messages call it.
struct GgufFile {
  MappedFile map;
  std::string name;
};
// Maps the file at `path` and, where its name is that of a part of a model ("NAME-00002-of-00003.gguf"), the
// other parts beside it.
Result<std::vector<GgufFile>> open_gguf(const std::string& path);

// Views point into the files' memory; the files must outlive this object.
class Gguf {
 public:
  // Reads header, metadata and tensor table. `name` is how error messages call the file. Errors are Format,
  // one sentence naming the key or tensor; Unsupported for other versions, for a part of a model and nested
  // arrays; InvalidArgument for lent memory that begins at an address which is not a multiple of the file's
  // alignment.
  static Result<Gguf> parse(const MappedFile& file, std::string name);
  // The same of a model in one file or in several, in any order: the first part's metadata and name, and the
  // tensors of all. Format where a part is missing, there twice or of another model.
  static Result<Gguf> parse(std::span<const GgufFile> files);

  const std::string& name() const { return name_; }
  const std::vector<GgufTensor>& tensors() const { return tensors_; }
  const GgufTensor* tensor(std::string_view name) const;
  // Whether each tensor begins where the one before ends, as all writers have it: elsewhere the type or the
  // shape of that one is not what was written. No reason to refuse the file yet, since a tensor that is
  // missing leaves a gap, too, and is to be named then.
  const Status& layout() const { return layout_; }
  const GgufValue* find(std::string_view key) const;
  Status lacks(std::string_view key) const;  // the error of who needs a key that is not there
  const std::vector<std::pair<std::string_view, GgufValue>>& metadata() const { return metadata_; }

  // Typed reads. Integers of any width and sign are accepted where they fit. Absent keys give nullopt (or the
  // error of `need_*`); a key of the wrong type is a Format error that names it.
  Result<std::optional<uint64_t>> get_uint(std::string_view key) const;
  Result<std::optional<double>> get_float(std::string_view key) const;
  Result<std::optional<bool>> get_bool(std::string_view key) const;
  Result<std::optional<std::string_view>> get_string(std::string_view key) const;
  Result<std::optional<std::vector<std::string_view>>> get_strings(std::string_view key) const;
  Result<std::optional<std::vector<int64_t>>> get_ints(std::string_view key) const;
  Result<std::optional<std::vector<float>>> get_floats(std::string_view key) const;
  Result<uint64_t> need_uint(std::string_view key) const;
  Result<double> need_float(std::string_view key) const;
  Result<std::string_view> need_string(std::string_view key) const;

  // Bytes of memory that these tables take, about.
  uint64_t host_bytes() const;

 private:
  struct Part {
    uint64_t index, count;  // from 0; 1: not split
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
