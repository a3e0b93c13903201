// Writes GGUF files for tests: valid ones and, field by field, invalid ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/bits.h"
#include "base/mapped_file.h"
#include "gguf/gguf.h"

namespace thimble {

// Page-aligned memory, as of a mapping, with exactly the requested size, so that a sanitizer detects reads
// past its end.
template <typename T>
struct PageAllocator {
  using value_type = T;
  PageAllocator() = default;
  template <typename U>
  PageAllocator(const PageAllocator<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new (n * sizeof(T), std::align_val_t{4096})); }
  void deallocate(T* p, size_t) { ::operator delete (p, std::align_val_t{4096}); }
  bool operator==(const PageAllocator&) const { return true; }
};
using FileBytes = std::vector<std::byte, PageAllocator<std::byte>>;

inline MappedFile lend(const FileBytes& bytes) { return MappedFile::lend(bytes.data(), bytes.size()); }

inline void append(FileBytes& out, const void* data, size_t size) {
  if (size == 0) return;  // data may be null
  out.resize(out.size() + size);
  std::memcpy(out.data() + out.size() - size, data, size);
}
template <typename T>
requires std::is_arithmetic_v<T>
void append(FileBytes& out, T value) { append(out, &value, sizeof value); }
inline void append(FileBytes& out, std::string_view text) {
  append(out, static_cast<uint64_t>(text.size()));
  append(out, text.data(), text.size());
}

struct GgufWriter {
  struct Key {
    std::string name;
    GgufType type;
    FileBytes value;
  };
  struct Tensor {
    std::string name;
    std::vector<uint64_t> shape;  // fastest-varying first
    uint32_t type;
    FileBytes data;
  };

  uint32_t version = 3;
  uint64_t alignment = 32;  // of the layout; set() writes the key
  std::vector<Key> keys;
  std::vector<Tensor> tensors;
  std::map<std::string, uint64_t> offsets;  // overrides a tensor's offset

  // Sets a key, replacing one of the same name. Integers, floats, bools and strings have their C++ type.
  template <typename T>
  GgufWriter& set(const std::string& name, const T& value) {
    FileBytes bytes;
    if constexpr (std::is_arithmetic_v<T>)
      append(bytes, value);
    else
      append(bytes, std::string_view(value));
    return set(name, type_of<T>(), std::move(bytes));
  }
  // Sets an array.
  template <typename T>
  GgufWriter& set(const std::string& name, const std::vector<T>& values) {
    FileBytes bytes;
    append(bytes, static_cast<uint32_t>(type_of<T>()));
    append(bytes, static_cast<uint64_t>(values.size()));
    for (const auto& value : values) {
      if constexpr (std::is_arithmetic_v<T>)
        append(bytes, value);
      else
        append(bytes, std::string_view(value));
    }
    return set(name, GgufType::kArray, std::move(bytes));
  }
  // Sets any bytes with any type.
  GgufWriter& set(const std::string& name, GgufType type, FileBytes value) {
    erase(name);
    keys.push_back({name, type, std::move(value)});
    return *this;
  }
  GgufWriter& erase(const std::string& name) {
    std::erase_if(keys, [&](const Key& k) { return k.name == name; });
    return *this;
  }

  // Adds a tensor, replacing one of the same name.
  GgufWriter& tensor(const std::string& name, std::vector<uint64_t> shape, uint32_t type, FileBytes data) {
    erase_tensor(name);
    tensors.push_back({name, std::move(shape), type, std::move(data)});
    return *this;
  }
  GgufWriter& tensor(const std::string& name, std::vector<uint64_t> shape, const std::vector<float>& values) {
    FileBytes data;
    append(data, values.data(), values.size() * sizeof(float));
    return tensor(name, std::move(shape), 0, std::move(data));
  }
  GgufWriter& erase_tensor(const std::string& name) {
    std::erase_if(tensors, [&](const Tensor& t) { return t.name == name; });
    return *this;
  }

  // The file. Its last tensor is not padded, so every byte of it matters.
  FileBytes bytes() const {
    FileBytes out;
    append(out, "GGUF", 4);
    append(out, version);
    append(out, static_cast<uint64_t>(tensors.size()));
    append(out, static_cast<uint64_t>(keys.size()));
    for (const Key& key : keys) {
      append(out, std::string_view(key.name));
      append(out, static_cast<uint32_t>(key.type));
      append(out, key.value.data(), key.value.size());
    }
    uint64_t offset = 0;
    for (const Tensor& t : tensors) {
      append(out, std::string_view(t.name));
      append(out, static_cast<uint32_t>(t.shape.size()));
      for (uint64_t extent : t.shape) append(out, extent);
      append(out, t.type);
      append(out, offsets.count(t.name) ? offsets.at(t.name) : offset);
      offset = round_up(offset + t.data.size(), alignment);
    }
    for (const Tensor& t : tensors) {
      out.resize(round_up(out.size(), alignment));
      append(out, t.data.data(), t.data.size());
    }
    return out;
  }

  // The file in parts as they are published: the first has the keys; tensors are divided about equally.
  std::vector<GgufWriter> parts(uint16_t count) const {
    std::vector<GgufWriter> all(count);
    all[0].keys = keys;
    for (uint16_t i = 0; i < count; ++i) {
      all[i].set("split.no", i).set("split.count", count);
      all[i].set("split.tensors.count", static_cast<int32_t>(tensors.size()));
      const auto border = [&](size_t part) {
        return tensors.begin() + static_cast<std::ptrdiff_t>(tensors.size() * part / count);
      };
      all[i].tensors.assign(border(i), border(i + size_t{1}));
    }
    return all;
  }

  void write(const std::string& path) const {
    const FileBytes all = bytes();
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(all.data()), static_cast<std::streamsize>(all.size()));
  }

 private:
  template <typename T>
  static constexpr GgufType type_of() {
    if constexpr (std::is_same_v<T, bool>)
      return GgufType::kBool;
    else if constexpr (std::is_same_v<T, float>)
      return GgufType::kF32;
    else if constexpr (std::is_same_v<T, double>)
      return GgufType::kF64;
    else if constexpr (!std::is_arithmetic_v<T>)
      return GgufType::kString;
    else if constexpr (sizeof(T) == 1)
      return std::is_signed_v<T> ? GgufType::kI8 : GgufType::kU8;
    else if constexpr (sizeof(T) == 2)
      return std::is_signed_v<T> ? GgufType::kI16 : GgufType::kU16;
    else if constexpr (sizeof(T) == 4)
      return std::is_signed_v<T> ? GgufType::kI32 : GgufType::kU32;
    else
      return std::is_signed_v<T> ? GgufType::kI64 : GgufType::kU64;
  }
};

}  // namespace thimble
