// The pickles that torch.save writes, read without running anything that they name: of Python's instructions
// those that build dicts, lists, tuples, numbers, text and tensors, and of its classes a list of known names.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/byte_reader.h"
#include "base/status.h"
#include "gguf/import/foreign.h"

namespace thimble {

struct StorageType {
  const char* python;  // "BFloat16Storage"
  const char* name;    // "bfloat16"
  uint32_t bytes;      // of an element
  std::optional<DType> dtype;
};

// Elements that lie elsewhere in the file, under a key.
struct PickledStorage {
  std::string_view key;
  const StorageType* type;
  uint64_t elements;
};

// Elements of a storage from an offset on, row by row; they lie within what the pickle says of the storage.
struct PickledTensor {
  uint32_t storage;
  uint64_t offset, elements;
  std::vector<uint64_t> shape;
};

struct PickledValue {
  enum class Kind {
    kNone,
    kBool,     // number
    kInt,      // number
    kText,     // text
    kTuple,    // items
    kList,     // items
    kDict,     // items: keys and values in turn
    kGlobal,   // number: which of the known names
    kStorage,  // number: index into storages
    kTensor,   // number: index into tensors
    kOpaque    // what nobody asks for: floats, types, numpy's arrays
  };
  Kind kind = Kind::kNone;
  int64_t number = 0;
  std::string_view text;
  std::vector<uint32_t> items;  // indices into values; they may form cycles
};

// Views point into the file's memory.
struct Pickle {
  std::vector<PickledValue> values;
  std::vector<PickledStorage> storages;
  std::vector<PickledTensor> tensors;
  uint32_t root = 0;  // the value that was pickled
};

// Reads one pickle and leaves the reader behind it. `file` is how error messages call it. Unsupported for
// names that are not known and for other protocols than 2, Format for what is damaged.
Result<Pickle> read_pickle(ByteReader& reader, const std::string& file);

}  // namespace thimble
