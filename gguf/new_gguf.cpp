#include "gguf/new_gguf.h"

#include "base/bits.h"
#include "base/new_file.h"

namespace thimble {
namespace {

constexpr uint32_t kVersion = 3;
constexpr uint64_t kAlignment = 32;  // the format's default

template <typename T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void put_text(std::string& out, std::string_view text) {
  put(out, static_cast<uint64_t>(text.size()));
  out += text;
}

template <typename T>
std::string_view bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

}  // namespace

uint64_t NewGguf::Tensor::bytes() const {
  uint64_t elements = 1;
  for (const uint64_t extent : shape) elements *= extent;
  return dtype_bytes(type, elements);
}

void NewGguf::set(std::string_view key, GgufType type, std::string_view value) {
  put_text(metadata_, key);
  put(metadata_, static_cast<uint32_t>(type));
  metadata_ += value;
  ++keys_;
}

void NewGguf::set(std::string_view key, std::string_view value) {
  std::string text;
  put_text(text, value);
  set(key, GgufType::kString, text);
}
void NewGguf::set(std::string_view key, uint32_t value) { set(key, GgufType::kU32, bytes_of(value)); }
void NewGguf::set(std::string_view key, uint64_t value) { set(key, GgufType::kU64, bytes_of(value)); }

void NewGguf::set(std::string_view key, const GgufValue& value) {
  const std::string_view bytes(reinterpret_cast<const char*>(value.bytes.data()), value.bytes.size());
  if (!value.is_array) return set(key, value.type, bytes);
  std::string array;
  put(array, static_cast<uint32_t>(value.type));
  put(array, value.count);
  array += bytes;
  set(key, GgufType::kArray, array);
}

void NewGguf::add(std::string name, std::vector<uint64_t> shape, DType type, Values values) {
  tensors_.push_back({std::move(name), std::move(shape), type, std::move(values)});
}

Status NewGguf::write(const std::string& path) const {
  THIMBLE_LET(file, NewFile::create(path));
  return write_to(std::move(file));
}

Status NewGguf::replace(const std::string& path) const {
  THIMBLE_LET(file, NewFile::replace(path));
  return write_to(std::move(file));
}

Status NewGguf::write_to(NewFile file) const {
  std::string head = "GGUF";
  put(head, kVersion);
  put(head, static_cast<uint64_t>(tensors_.size()));
  put(head, keys_);
  head += metadata_;
  uint64_t offset = 0;
  for (const Tensor& tensor : tensors_) {
    put_text(head, tensor.name);
    put(head, static_cast<uint32_t>(tensor.shape.size()));
    for (const uint64_t extent : tensor.shape) put(head, extent);
    put(head, static_cast<uint32_t>(tensor.type));
    put(head, offset);
    offset = round_up(offset + tensor.bytes(), kAlignment);
  }
  head.resize(round_up(head.size(), kAlignment));

  THIMBLE_TRY(file.write(head.data(), head.size()));
  for (const Tensor& tensor : tensors_) {
    std::vector<std::byte> values = tensor.values();
    values.resize(round_up(tensor.bytes(), kAlignment));
    THIMBLE_TRY(file.write(values.data(), values.size()));
  }
  return file.complete();
}

}  // namespace thimble
