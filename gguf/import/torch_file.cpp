#include "gguf/import/torch_file.h"

#include <cinttypes>
#include <cstring>
#include <unordered_map>

#include "gguf/gguf.h"
#include "gguf/import/pickle.h"
#include "gguf/import/stored_zip.h"

namespace thimble {
namespace {

using Kind = PickledValue::Kind;

// The older layout begins with a pickle of an 80-bit magic number, followed by a pickle of the version.
constexpr std::string_view kZip("PK\x03\x04", 4);
constexpr std::string_view kLegacy("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", 15);
constexpr int64_t kLegacyVersion = 1001;

// Containers may be shared and form cycles, so the walk is bounded. The limits are far above any known
// checkpoint.
constexpr uint32_t kDeepest = 16, kMostVisited = 1 << 20, kMostTensors = 1 << 16;
constexpr size_t kLongestPath = 256;

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Status damaged(const std::string& file) {
  return error(Code::kFormat, "%s is damaged or incomplete: a part that torch.save writes is missing",
               file.c_str());
}

Status big_endian(const std::string& file) {
  return error(Code::kUnsupported, "%s was saved on a big-endian machine; save it again on another",
               file.c_str());
}

using Storages = std::unordered_map<std::string_view, std::span<const std::byte>>;

// Collects the tensors that the root refers to.
class Walk {
 public:
  Walk(const Pickle& pickle, const Storages& storages, const std::string& file)
      : pickle_(pickle), storages_(storages), file_(file) {}

  Result<std::vector<ForeignTensor>> run() {
    THIMBLE_TRY(visit(pickle_.root, "", 0));
    return std::move(found_);
  }

 private:
  Status visit(uint32_t index, const std::string& path, uint32_t depth) {
    const PickledValue& value = pickle_.values[index];
    if (depth > kDeepest || path.size() > kLongestPath || ++visited_ > kMostVisited ||
        found_.size() > kMostTensors)
      return error(Code::kUnsupported, "%s holds more values, or deeper nested ones, than any checkpoint",
                   file_.c_str());
    const std::string inner = path.empty() ? "" : path + ".";
    if (value.kind == Kind::kTensor) return add(pickle_.tensors[static_cast<size_t>(value.number)], path);
    if (value.kind == Kind::kList || value.kind == Kind::kTuple) {
      for (size_t i = 0; i < value.items.size(); ++i)
        THIMBLE_TRY(visit(value.items[i], inner + std::to_string(i), depth + 1));
    }
    if (value.kind == Kind::kDict) {
      for (size_t i = 0; i < value.items.size(); i += 2) {
        const PickledValue& key = pickle_.values[value.items[i]];
        if (key.kind != Kind::kText && key.kind != Kind::kInt) return damaged(file_);
        const std::string name = key.kind == Kind::kText ? std::string(key.text) : std::to_string(key.number);
        THIMBLE_TRY(visit(value.items[i + 1], inner + name, depth + 1));
      }
    }
    return {};
  }

  Status add(const PickledTensor& tensor, const std::string& path) {
    const PickledStorage& storage = pickle_.storages[tensor.storage];
    const auto found = storages_.find(storage.key);
    const uint64_t room = found == storages_.end() ? 0 : found->second.size() / storage.type->bytes;
    if (found == storages_.end() || storage.elements > room)
      return error(Code::kFormat, "%s is damaged or incomplete: the values of tensor %s are missing",
                   file_.c_str(), in_quotes(path).c_str());
    found_.push_back({.name = path,
                      .type = storage.type->name,
                      .dtype = storage.type->dtype,
                      .shape = tensor.shape,
                      .data = found->second.data() + tensor.offset * storage.type->bytes,
                      .bytes = tensor.elements * storage.type->bytes});
    return {};
  }

  const Pickle& pickle_;
  const Storages& storages_;
  const std::string& file_;
  std::vector<ForeignTensor> found_;
  uint32_t visited_ = 0;
};

// A zip holds archive/data.pkl, archive/byteorder (newer versions of torch) and archive/data/KEY for each
// storage. The folder may have any name.
Result<std::vector<ForeignTensor>> read_zip(std::span<const std::byte> bytes, const std::string& file) {
  THIMBLE_LET(entries, read_stored_zip(bytes, file));
  constexpr std::string_view kPickle = "/data.pkl";
  std::string folder;
  const std::span<const std::byte>* pickled = nullptr;
  for (const auto& [name, contents] : entries) {
    if (!name.ends_with(kPickle)) continue;
    if (pickled) return damaged(file);
    pickled = &contents;
    folder = name.substr(0, name.size() - kPickle.size());
  }
  if (!pickled)
    return error(Code::kFormat, "%s is a zip archive, but not one of torch.save: it has no data.pkl",
                 file.c_str());
  if (const auto order = entries.find(folder + "/byteorder");
      order != entries.end() && as_text(order->second) != "little")
    return big_endian(file);

  ByteReader reader(*pickled);
  THIMBLE_LET(pickle, read_pickle(reader, file));
  Storages storages;
  const std::string data = folder + "/data/";
  for (const auto& [name, contents] : entries)
    if (name.starts_with(data)) storages.emplace(name.substr(data.size()), contents);
  return Walk(pickle, storages, file).run();
}

// Checks the description of the writing system: {"protocol_version", "little_endian", "type_sizes"}.
Status check_system(ByteReader& reader, const std::string& file) {
  THIMBLE_LET(pickle, read_pickle(reader, file));
  const PickledValue& system = pickle.values[pickle.root];
  if (system.kind != Kind::kDict) return damaged(file);
  for (size_t i = 0; i < system.items.size(); i += 2) {
    const PickledValue &key = pickle.values[system.items[i]], &value = pickle.values[system.items[i + 1]];
    if (key.kind != Kind::kText || key.text != "little_endian") continue;
    if (value.kind != Kind::kBool) return damaged(file);
    return value.number ? Status() : big_endian(file);
  }
  return damaged(file);
}

// The older layout: pickles of the version, the system, the saved object and the storages' keys; then each
// storage in the order of the keys, preceded by its number of elements.
Result<std::vector<ForeignTensor>> read_legacy(std::span<const std::byte> bytes, const std::string& file) {
  ByteReader reader(bytes.subspan(kLegacy.size()));
  THIMBLE_LET(version, read_pickle(reader, file));
  const PickledValue& number = version.values[version.root];
  if (number.kind != Kind::kInt || number.number != kLegacyVersion) return damaged(file);
  THIMBLE_TRY(check_system(reader, file));
  THIMBLE_LET(pickle, read_pickle(reader, file));
  THIMBLE_LET(keys, read_pickle(reader, file));
  const PickledValue& list = keys.values[keys.root];
  if (list.kind != Kind::kList) return damaged(file);

  std::unordered_map<std::string_view, const StorageType*> types;
  for (const PickledStorage& storage : pickle.storages) types.emplace(storage.key, storage.type);
  Storages storages;
  for (const uint32_t item : list.items) {
    const PickledValue& key = keys.values[item];
    const auto type = key.kind == Kind::kText ? types.find(key.text) : types.end();
    uint64_t elements;
    std::string_view values;
    if (type == types.end() || !reader.read(elements) || elements > reader.left() / type->second->bytes ||
        !reader.take(elements * type->second->bytes, values))
      return damaged(file);
    if (!storages.emplace(key.text, std::as_bytes(std::span(values))).second) return damaged(file);
  }
  return Walk(pickle, storages, file).run();
}

}  // namespace

bool is_torch_file(std::span<const std::byte> bytes) {
  return as_text(bytes).starts_with(kZip) || as_text(bytes).starts_with(kLegacy);
}

Result<std::vector<ForeignTensor>> read_torch_file(std::span<const std::byte> bytes,
                                                   const std::string& file) {
  if (as_text(bytes).starts_with(kZip)) return read_zip(bytes, file);
  if (as_text(bytes).starts_with(kLegacy)) return read_legacy(bytes, file);
  return error(Code::kFormat, "%s is not a torch.save file", file.c_str());
}

}  // namespace thimble
