#include "gguf/gguf.h"

#include <algorithm>
#include <bit>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "base/bits.h"
#include "base/byte_reader.h"
#include "base/dtype.h"

static_assert(std::endian::native == std::endian::little,
              "GGUF files are little-endian and mapped as they are");

namespace thimble {
namespace {

constexpr uint32_t kFirstVersion = 2, kLastVersion = 3;  // both versions have the same layout
constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kSmallestAlignment = 8, kLargestAlignment = 1 << 20;
// Mappings begin at a page boundary. No reader of weights needs a larger alignment.
constexpr uint64_t kPage = 4096;
// The least bytes that a table entry takes in a file. A count that needs more bytes than the file has left is
// invalid.
constexpr uint64_t kSmallestKey = 8 + 4 + 1;  // empty name, type, one byte
// Empty name, number of dimensions, one dimension, type, offset
constexpr uint64_t kSmallestTensor = 8 + 4 + 8 + 4 + 8;

struct TypeInfo {
  const char* name;
  uint64_t bytes;  // per element; 0: no fixed size
};
constexpr TypeInfo kTypes[] = {
    {"u8", 1},   {"i8", 1},     {"u16", 2},   {"i16", 2}, {"u32", 4}, {"i32", 4}, {"f32", 4},
    {"bool", 1}, {"string", 0}, {"array", 0}, {"u64", 8}, {"i64", 8}, {"f64", 8},
};

const TypeInfo& type_info(GgufType type) { return kTypes[static_cast<uint32_t>(type)]; }

// Reads GGUF values; strings are preceded by their length.
class Reader : public ByteReader {
 public:
  using ByteReader::ByteReader;
  using ByteReader::read;

  bool read(std::string_view& text) {
    Reader ahead = *this;
    uint64_t length;
    if (!ahead.read(length) || !ahead.take(length, text)) return false;
    *this = ahead;
    return true;
  }
};

Status cut_short(const std::string& file, const std::string& where) {
  return error(Code::kFormat, "%s is damaged or incomplete: it ends inside %s", file.c_str(), where.c_str());
}

bool multiply(uint64_t a, uint64_t b, uint64_t& product) {
  if (b != 0 && a > UINT64_MAX / b) return false;
  product = a * b;
  return true;
}

struct Header {
  uint64_t tensors, keys;
};

Result<Header> read_header(Reader& reader, const std::string& file) {
  char magic[4] = {};
  if (reader.left() == 0) return error(Code::kFormat, "%s is empty", file.c_str());
  if (!reader.read(magic)) return error(Code::kFormat, "%s is too short to be a GGUF file", file.c_str());
  if (std::memcmp(magic, "GGUF", sizeof magic) != 0)
    return error(Code::kFormat, "%s is not a GGUF file: it begins with %s", file.c_str(),
                 in_quotes({magic, sizeof magic}).c_str());
  uint32_t version;
  Header header;
  if (!reader.read(version)) return cut_short(file, "the header");
  if (version != 0 && (version & 0xffff) == 0)
    return error(Code::kUnsupported, "%s is a big-endian GGUF file; convert the model to a little-endian one",
                 file.c_str());
  if (version < kFirstVersion || version > kLastVersion)
    return error(Code::kUnsupported,
                 "%s is of GGUF version %" PRIu32 ", and only versions 2 and 3 can be read%s", file.c_str(),
                 version, version < kFirstVersion ? "; convert the model again" : "");
  if (!reader.read(header.tensors) || !reader.read(header.keys)) return cut_short(file, "the header");
  if (header.keys > reader.left() / kSmallestKey)
    return error(Code::kFormat,
                 "%s is damaged or incomplete: it announces %" PRIu64 " keys, more than fit into it",
                 file.c_str(), header.keys);
  if (header.tensors > reader.left() / kSmallestTensor)
    return error(Code::kFormat,
                 "%s is damaged or incomplete: it announces %" PRIu64 " tensors, more than fit into it",
                 file.c_str(), header.tensors);
  return header;
}

Result<GgufValue> read_value(Reader& reader, const std::string& file, std::string_view key) {
  const std::string where = "the value of key " + in_quotes(key);
  GgufValue value;
  uint32_t type;
  if (!reader.read(type)) return cut_short(file, where);
  if (type == static_cast<uint32_t>(GgufType::kArray)) {
    value.is_array = true;
    if (!reader.read(type) || !reader.read(value.count)) return cut_short(file, where);
    if (type == static_cast<uint32_t>(GgufType::kArray))
      return error(Code::kUnsupported, "%s: key %s is an array of arrays, which cannot be read", file.c_str(),
                   in_quotes(key).c_str());
  }
  if (type >= std::size(kTypes))
    return error(Code::kFormat, "%s: key %s has the unknown value type %" PRIu32, file.c_str(),
                 in_quotes(key).c_str(), type);
  value.type = static_cast<GgufType>(type);

  const std::byte* first = reader.at();
  if (value.type == GgufType::kString) {
    std::string_view text;
    for (uint64_t i = 0; i < value.count; ++i)
      if (!reader.read(text)) return cut_short(file, where);
  } else {
    uint64_t bytes;
    if (!multiply(value.count, type_info(value.type).bytes, bytes) || !reader.skip(bytes))
      return cut_short(file, where);
  }
  value.bytes = {first, reader.at()};
  return value;
}

// Reads a row of the tensor table. `offset` is the start of the tensor's data in the data section.
Result<GgufTensor> read_tensor(Reader& reader, const std::string& file, uint64_t index, uint64_t& offset) {
  GgufTensor tensor;
  if (!reader.read(tensor.name)) return cut_short(file, "the name of tensor " + std::to_string(index));
  const std::string name = in_quotes(tensor.name);
  const auto cut = [&] { return cut_short(file, "the description of tensor " + name); };
  if (!reader.read(tensor.dims)) return cut();
  if (tensor.dims < 1 || tensor.dims > std::size(tensor.shape))
    return error(Code::kFormat, "%s: tensor %s has %" PRIu32 " dimensions instead of 1 to 4", file.c_str(),
                 name.c_str(), tensor.dims);
  tensor.elements = 1;
  for (uint32_t d = 0; d < tensor.dims; ++d) {
    if (!reader.read(tensor.shape[d])) return cut();
    if (tensor.shape[d] == 0 || !multiply(tensor.elements, tensor.shape[d], tensor.elements))
      return error(Code::kFormat, "%s: tensor %s has dimensions that are zero or too large", file.c_str(),
                   name.c_str());
  }
  if (!reader.read(tensor.type) || !reader.read(offset)) return cut();
  if (const DTypeInfo* info = find_dtype(tensor.type)) {
    if (tensor.shape[0] % info->block != 0)
      return error(Code::kFormat,
                   "%s: tensor %s has rows of %" PRIu64 " elements, not a multiple of the %" PRIu32
                   " in a block of %s",
                   file.c_str(), name.c_str(), tensor.shape[0], info->block, info->name);
    if (!multiply(tensor.elements / info->block, info->block_bytes, tensor.bytes))
      return error(Code::kFormat, "%s: tensor %s has dimensions that are zero or too large", file.c_str(),
                   name.c_str());
  }
  return tensor;
}

// Reads the elements of a value one by one; their bytes were checked when the file was parsed.
template <typename T>
T next(Reader& reader) {
  T value{};
  reader.read(value);
  return value;
}

// An integer of any type as sign and magnitude; nullopt for values of other types.
struct Integer {
  bool negative = false;
  uint64_t magnitude = 0;
};

std::optional<Integer> next_integer(Reader& reader, GgufType type) {
  const auto from = [](int64_t v) {
    return Integer{v < 0, v < 0 ? 0 - static_cast<uint64_t>(v) : uint64_t(v)};
  };
  switch (type) {
    case GgufType::kU8:
      return Integer{false, next<uint8_t>(reader)};
    case GgufType::kU16:
      return Integer{false, next<uint16_t>(reader)};
    case GgufType::kU32:
      return Integer{false, next<uint32_t>(reader)};
    case GgufType::kU64:
      return Integer{false, next<uint64_t>(reader)};
    case GgufType::kI8:
      return from(next<int8_t>(reader));
    case GgufType::kI16:
      return from(next<int16_t>(reader));
    case GgufType::kI32:
      return from(next<int32_t>(reader));
    case GgufType::kI64:
      return from(next<int64_t>(reader));
    default:
      return std::nullopt;
  }
}

std::optional<double> next_float(Reader& reader, GgufType type) {
  if (type == GgufType::kF32) return next<float>(reader);
  if (type == GgufType::kF64) return next<double>(reader);
  return std::nullopt;
}

Status wrong_type(const std::string& file, std::string_view key, const GgufValue& value,
                  const char* expected) {
  return error(Code::kFormat, "%s: key %s is %s%s, where %s is expected", file.c_str(),
               in_quotes(key).c_str(), value.is_array ? "an array of " : "of type ",
               type_info(value.type).name, expected);
}

// Length in bytes of the first UTF-8 sequence of `text` if it is well-formed and printable, otherwise 0.
size_t printable_prefix(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  if (byte(0) < 0x80) return byte(0) >= 0x20 && byte(0) != 0x7f;
  const size_t length = byte(0) >= 0xc2 && byte(0) < 0xe0   ? 2
                        : byte(0) >= 0xe0 && byte(0) < 0xf0 ? 3
                        : byte(0) >= 0xf0 && byte(0) < 0xf5 ? 4
                                                            : 0;
  if (length == 0 || length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  // Rejects overlong forms, surrogates, code points above U+10FFFF, and the control characters U+0080 to
  // U+009F.
  if ((byte(0) == 0xe0 && byte(1) < 0xa0) || (byte(0) == 0xed && byte(1) >= 0xa0)) return 0;
  if ((byte(0) == 0xf0 && byte(1) < 0x90) || (byte(0) == 0xf4 && byte(1) >= 0x90)) return 0;
  if (byte(0) == 0xc2 && byte(1) < 0xa0) return 0;
  return length;
}

// The file name of a part of a model: PREFIX-00001-of-00003.gguf.
struct PartName {
  std::string prefix;
  uint32_t count;

  std::string path(uint32_t part) const {
    char suffix[32];
    std::snprintf(suffix, sizeof suffix, "-%05" PRIu32 "-of-%05" PRIu32 ".gguf", part, count);
    return prefix + suffix;
  }
};
std::optional<PartName> part_name(const std::string& path) {
  constexpr size_t kSuffix = sizeof "-00001-of-00003.gguf" - 1;
  if (path.size() < kSuffix) return std::nullopt;
  const std::string prefix = path.substr(0, path.size() - kSuffix), suffix = path.substr(prefix.size());
  uint32_t part, count;
  if (std::sscanf(suffix.c_str(), "-%5" SCNu32 "-of-%5" SCNu32, &part, &count) != 2) return std::nullopt;
  const PartName name{prefix, count};
  if (part < 1 || part > count || name.path(part) != path) return std::nullopt;
  return name;
}

}  // namespace

std::string in_quotes(std::string_view text) {
  constexpr size_t kLongest = 80;
  std::string out = "'";
  while (!text.empty() && out.size() < kLongest) {
    const size_t length = printable_prefix(text);
    if (length == 0)
      out += '?';
    else
      out += text.substr(0, length);
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return out + (text.empty() ? "'" : "...'");
}

std::string printed(const GgufValue& value) {
  constexpr uint64_t kShown = 8;  // elements of an array that are shown
  Reader reader(value.bytes);
  std::string out;
  for (uint64_t i = 0; i < std::min(value.count, kShown); ++i) {
    if (i > 0) out += ", ";
    if (value.type == GgufType::kString) {
      out += in_quotes(next<std::string_view>(reader));
    } else if (value.type == GgufType::kBool) {
      out += next<uint8_t>(reader) ? "true" : "false";
    } else if (const auto real = next_float(reader, value.type)) {
      char text[32];
      std::snprintf(text, sizeof text, "%g", *real);
      out += text;
    } else if (const auto integer = next_integer(reader, value.type)) {
      out += (integer->negative ? "-" : "") + std::to_string(integer->magnitude);
    }
  }
  if (!value.is_array) return out;
  if (value.count > kShown) out += ", ... " + std::to_string(value.count) + " in all";
  return "[" + out + "]";
}

Result<std::vector<GgufFile>> open_gguf(const std::string& path) {
  std::vector<GgufFile> files;
  const auto name = part_name(path);
  if (!name) {
    THIMBLE_LET(map, MappedFile::open(path));
    files.push_back({std::move(map), path});
    return files;
  }
  for (uint32_t part = 1; part <= name->count; ++part) {
    const std::string part_path = name->path(part);
    Result<MappedFile> map = MappedFile::open(part_path);
    if (!map.ok())
      return error(map.status().code(), "part %" PRIu32 " of %" PRIu32 " of the model is missing: %s", part,
                   name->count, map.status().message().c_str());
    files.push_back({std::move(*map), part_path});
  }
  return files;
}

Result<Gguf> Gguf::parse(const MappedFile& file, std::string name) {
  THIMBLE_LET(gguf, parse_one(file, std::move(name)));
  THIMBLE_LET(part, gguf.part());
  if (part.count > 1)
    return error(Code::kFormat,
                 "%s is %s; open it by its name, PREFIX-00001-of-%05" PRIu64
                 ".gguf, with the other parts in the same folder, or pass all parts",
                 gguf.name_.c_str(), part.text().c_str(), part.count);
  return gguf;
}

Result<Gguf> Gguf::parse(std::span<const GgufFile> files) {
  if (files.size() == 1) return parse(files[0].map, files[0].name);
  std::vector<std::optional<Gguf>> parts(files.size());
  for (const GgufFile& file : files) {
    THIMBLE_LET(gguf, parse_one(file.map, file.name));
    THIMBLE_LET(part, gguf.part());
    if (part.count != files.size())
      return error(Code::kFormat, "%s is %s, and %zu files are given: give all parts of one model",
                   file.name.c_str(), part.text().c_str(), files.size());
    if (part.index >= part.count)
      return error(Code::kFormat, "%s is damaged: it says that it is %s", file.name.c_str(),
                   part.text().c_str());
    std::optional<Gguf>& place = parts[static_cast<size_t>(part.index)];
    if (place)
      return error(Code::kFormat, "%s and %s are both %s", place->name_.c_str(), file.name.c_str(),
                   part.text().c_str());
    place = std::move(gguf);
  }
  Gguf& whole = *parts[0];
  for (size_t i = 1; i < parts.size(); ++i) THIMBLE_TRY(whole.append(*parts[i]));
  THIMBLE_LET(tensors, whole.get_uint("split.tensors.count"));
  if (tensors && *tensors != whole.tensors_.size())
    return error(Code::kFormat,
                 "%s announces %" PRIu64 " tensors, and its %zu parts hold %zu: one is of another model",
                 whole.name_.c_str(), *tensors, parts.size(), whole.tensors_.size());
  return std::move(whole);
}

Status Gguf::lacks(std::string_view key) const {
  return error(Code::kFormat, "%s lacks the key %s", name_.c_str(), in_quotes(key).c_str());
}

Status Gguf::append(const Gguf& part) {
  // Parts other than the first need not repeat its metadata. If they do, the values must be equal, except the
  // part number.
  for (const auto& [key, value] : part.metadata_) {
    const GgufValue* ours = key == "split.no" ? nullptr : find(key);
    if (ours && !std::equal(ours->bytes.begin(), ours->bytes.end(), value.bytes.begin(), value.bytes.end()))
      return error(Code::kFormat, "%s and %s differ in the key %s: one is of another model", name_.c_str(),
                   part.name_.c_str(), in_quotes(key).c_str());
  }
  for (const GgufTensor& tensor : part.tensors_) {
    if (!tensor_index_.emplace(tensor.name, tensors_.size()).second)
      return error(Code::kFormat, "tensor %s is in %s and in another part: one is of another model",
                   in_quotes(tensor.name).c_str(), part.name_.c_str());
    tensors_.push_back(tensor);
  }
  if (layout_.ok()) layout_ = part.layout_;
  return {};
}

std::string Gguf::Part::text() const {
  if (count == 1) return "a whole model";
  return "part " + std::to_string(index + 1) + " of " + std::to_string(count) + " of a model";
}

Result<Gguf::Part> Gguf::part() const {
  THIMBLE_LET(count, get_uint("split.count"));
  THIMBLE_LET(index, get_uint("split.no"));
  return Part{index.value_or(0), std::max<uint64_t>(count.value_or(1), 1)};
}

Result<Gguf> Gguf::parse_one(const MappedFile& file, std::string name) {
  Gguf gguf;
  gguf.name_ = std::move(name);
  const std::string& shown = gguf.name_;
  Reader reader({file.data(), static_cast<size_t>(file.size())});
  THIMBLE_LET(header, read_header(reader, shown));

  for (uint64_t i = 0; i < header.keys; ++i) {
    std::string_view key;
    if (!reader.read(key)) return cut_short(shown, "the name of key " + std::to_string(i));
    THIMBLE_LET(value, read_value(reader, shown, key));
    if (!gguf.metadata_index_.emplace(key, gguf.metadata_.size()).second)
      return error(Code::kFormat, "%s has the key %s twice", shown.c_str(), in_quotes(key).c_str());
    gguf.metadata_.emplace_back(key, value);
  }

  THIMBLE_LET(alignment_key, gguf.get_uint("general.alignment"));
  const uint64_t alignment = alignment_key.value_or(kDefaultAlignment);
  if (!std::has_single_bit(alignment) || alignment < kSmallestAlignment || alignment > kLargestAlignment)
    return error(Code::kFormat,
                 "%s: key 'general.alignment' is %" PRIu64 " instead of a power of two from %" PRIu64
                 " to %" PRIu64,
                 shown.c_str(), alignment, kSmallestAlignment, kLargestAlignment);
  const uint64_t address = reinterpret_cast<uintptr_t>(file.data());
  if (address % std::min(alignment, kPage) != 0)
    return error(Code::kInvalidArgument,
                 "%s: the memory that holds it must begin at a multiple of %" PRIu64 " bytes", shown.c_str(),
                 std::min(alignment, kPage));

  std::vector<uint64_t> offsets;
  for (uint64_t i = 0; i < header.tensors; ++i) {
    THIMBLE_LET(tensor, read_tensor(reader, shown, i, offsets.emplace_back()));
    if (!gguf.tensor_index_.emplace(tensor.name, gguf.tensors_.size()).second)
      return error(Code::kFormat, "%s has the tensor %s twice", shown.c_str(),
                   in_quotes(tensor.name).c_str());
    gguf.tensors_.push_back(tensor);
  }

  if (gguf.tensors_.empty()) return gguf;
  if (!reader.skip(round_up(reader.position(), alignment) - reader.position()))
    return cut_short(shown, "the padding before the tensor data");
  // Where the data of the next tensor should begin, if the sizes of all tensors before it are known
  uint64_t next = 0;
  bool known = true;
  for (size_t i = 0; i < offsets.size(); ++i) {
    GgufTensor& tensor = gguf.tensors_[i];
    if (offsets[i] % alignment != 0)
      return error(Code::kFormat,
                   "%s: tensor %s begins at offset %" PRIu64
                   ", which is not a multiple of the alignment %" PRIu64,
                   shown.c_str(), in_quotes(tensor.name).c_str(), offsets[i], alignment);
    if (offsets[i] > reader.left() || tensor.bytes > reader.left() - offsets[i])
      return error(Code::kFormat, "%s is damaged or incomplete: tensor %s is past the end of the file",
                   shown.c_str(), in_quotes(tensor.name).c_str());
    if (known && gguf.layout_.ok() && offsets[i] != next)
      gguf.layout_ = error(Code::kFormat,
                           "%s is damaged: tensor %s begins at offset %" PRIu64
                           ", but by the types and shapes before it should begin at %" PRIu64,
                           shown.c_str(), in_quotes(tensor.name).c_str(), offsets[i], next);
    known = find_dtype(tensor.type) != nullptr;
    next = round_up(offsets[i] + tensor.bytes, alignment);
    tensor.data = reader.at() + offsets[i];
  }
  return gguf;
}

const GgufTensor* Gguf::tensor(std::string_view name) const {
  const auto found = tensor_index_.find(name);
  return found == tensor_index_.end() ? nullptr : &tensors_[found->second];
}

const GgufValue* Gguf::find(std::string_view key) const {
  const auto found = metadata_index_.find(key);
  return found == metadata_index_.end() ? nullptr : &metadata_[found->second].second;
}

Result<std::optional<uint64_t>> Gguf::get_uint(std::string_view key) const {
  const GgufValue* value = find(key);
  if (!value) return std::optional<uint64_t>();
  Reader reader(value->bytes);
  const auto integer = value->is_array ? std::nullopt : next_integer(reader, value->type);
  if (!integer) return wrong_type(name_, key, *value, "an integer");
  if (integer->negative)
    return error(Code::kFormat, "%s: key %s is negative", name_.c_str(), in_quotes(key).c_str());
  return std::optional(integer->magnitude);
}

Result<std::optional<double>> Gguf::get_float(std::string_view key) const {
  const GgufValue* value = find(key);
  if (!value) return std::optional<double>();
  Reader reader(value->bytes);
  const auto real = value->is_array ? std::nullopt : next_float(reader, value->type);
  if (!real) return wrong_type(name_, key, *value, "a floating-point number");
  return real;
}

Result<std::optional<bool>> Gguf::get_bool(std::string_view key) const {
  const GgufValue* value = find(key);
  if (!value) return std::optional<bool>();
  if (value->is_array || value->type != GgufType::kBool) return wrong_type(name_, key, *value, "a bool");
  return std::optional(value->bytes[0] != std::byte{0});
}

Result<std::optional<std::string_view>> Gguf::get_string(std::string_view key) const {
  const GgufValue* value = find(key);
  if (!value) return std::optional<std::string_view>();
  if (value->is_array || value->type != GgufType::kString) return wrong_type(name_, key, *value, "a string");
  Reader reader(value->bytes);
  return std::optional(next<std::string_view>(reader));
}

Result<std::optional<std::vector<std::string_view>>> Gguf::get_strings(std::string_view key) const {
  const GgufValue* value = find(key);
  if (!value) return std::optional<std::vector<std::string_view>>();
  if (!value->is_array || value->type != GgufType::kString)
    return wrong_type(name_, key, *value, "an array of strings");
  std::vector<std::string_view> strings(value->count);
  Reader reader(value->bytes);
  for (std::string_view& s : strings) reader.read(s);
  return std::optional(std::move(strings));
}

Result<std::optional<std::vector<int64_t>>> Gguf::get_ints(std::string_view key) const {
  const GgufValue* value = find(key);
  if (!value) return std::optional<std::vector<int64_t>>();
  std::vector<int64_t> ints;
  Reader reader(value->bytes);
  for (uint64_t i = 0; i < value->count; ++i) {
    const auto integer = value->is_array ? next_integer(reader, value->type) : std::nullopt;
    if (!integer) return wrong_type(name_, key, *value, "an array of integers");
    if (integer->magnitude > INT64_MAX)
      return error(Code::kFormat, "%s: key %s has an element that is too large", name_.c_str(),
                   in_quotes(key).c_str());
    const int64_t magnitude = static_cast<int64_t>(integer->magnitude);
    ints.push_back(integer->negative ? -magnitude : magnitude);
  }
  return std::optional(std::move(ints));
}

Result<std::optional<std::vector<bool>>> Gguf::get_bools(std::string_view key) const {
  const GgufValue* value = find(key);
  if (!value) return std::optional<std::vector<bool>>();
  if (!value->is_array || value->type != GgufType::kBool)
    return wrong_type(name_, key, *value, "an array of bools");
  std::vector<bool> bools;
  for (uint64_t i = 0; i < value->count; ++i) bools.push_back(value->bytes[i] != std::byte{0});
  return std::optional(std::move(bools));
}

Result<std::optional<std::vector<float>>> Gguf::get_floats(std::string_view key) const {
  const GgufValue* value = find(key);
  if (!value) return std::optional<std::vector<float>>();
  std::vector<float> floats;
  Reader reader(value->bytes);
  for (uint64_t i = 0; i < value->count; ++i) {
    const auto real = value->is_array ? next_float(reader, value->type) : std::nullopt;
    if (!real) return wrong_type(name_, key, *value, "an array of floating-point numbers");
    floats.push_back(static_cast<float>(*real));
  }
  return std::optional(std::move(floats));
}

Result<uint64_t> Gguf::need_uint(std::string_view key) const {
  THIMBLE_LET(value, get_uint(key));
  if (!value) return lacks(key);
  return *value;
}

Result<double> Gguf::need_float(std::string_view key) const {
  THIMBLE_LET(value, get_float(key));
  if (!value) return lacks(key);
  return *value;
}

Result<std::string_view> Gguf::need_string(std::string_view key) const {
  THIMBLE_LET(value, get_string(key));
  if (!value) return lacks(key);
  return *value;
}

uint64_t Gguf::host_bytes() const {
  // A hash-table node holds the pair and two words; the table itself takes one word per node.
  constexpr uint64_t kNode = sizeof(std::pair<std::string_view, size_t>) + 3 * sizeof(void*);
  return metadata_.capacity() * sizeof metadata_[0] + tensors_.capacity() * sizeof tensors_[0] +
         (metadata_.size() + tensors_.size()) * kNode;
}

}  // namespace thimble
