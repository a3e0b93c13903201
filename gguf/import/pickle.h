// Reads the pickles that torch.save writes without executing anything they name. It knows the instructions
// that build dicts, lists, tuples, numbers, text and tensors, and a fixed list of class names.
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
  uint32_t bytes;      // per element
  std::optional<DType> dtype;
};

// Elements that are stored elsewhere in the file, under a key.
struct PickledStorage {
  std::string_view key;
  const StorageType* type;
  uint64_t elements;
};

// A row-major range of elements of a storage. It is within the size that the pickle states for the storage.
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
    kDict,     // items: alternating keys and values
    kGlobal,   // number: index of the known name
    kStorage,  // number: index into storages
    kTensor,   // number: index into tensors
    kOpaque    // values that no reader uses: floats, types, numpy arrays
  };
  Kind kind = Kind::kNone;
  int64_t number = 0;
  std::string_view text;
  std::vector<uint32_t> items;  // indices into values; they may form cycles
};

// A parsed pickle. Views point into the file's memory.
struct Pickle {
  std::vector<PickledValue> values;
  std::vector<PickledStorage> storages;
  std::vector<PickledTensor> tensors;
  uint32_t root = 0;  // index of the pickled value
};

// Reads one pickle and leaves the reader at the byte after it. `file` identifies the file in errors.
// Unsupported for unknown names and for protocols other than 2, Format for damaged pickles.
Result<Pickle> read_pickle(ByteReader& reader, const std::string& file);

}  // namespace thimble
