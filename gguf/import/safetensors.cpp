#include "gguf/import/safetensors.h"

#include <algorithm>
#include <cinttypes>

#include "base/byte_reader.h"
#include "gguf/gguf.h"
#include "text/json.h"

namespace thimble {
namespace {

constexpr uint64_t kLongestHeader = 100'000'000;  // the limit that the format states
constexpr size_t kMostDimensions = 8;

struct Type {
  const char *name, *usual;
  uint32_t bytes;
  std::optional<DType> dtype;
};
constexpr Type kTypes[] = {
    {"F32", "float32", 4, DType::kF32},    {"F16", "float16", 2, DType::kF16},
    {"BF16", "bfloat16", 2, DType::kBF16}, {"F64", "float64", 8, std::nullopt},
    {"I64", "int64", 8, std::nullopt},     {"I32", "int32", 4, std::nullopt},
    {"I16", "int16", 2, std::nullopt},     {"I8", "int8", 1, std::nullopt},
    {"U8", "uint8", 1, std::nullopt},      {"BOOL", "bool", 1, std::nullopt},
};

// Reads {"dtype", "shape", "data_offsets"}; `data` is the part of the file after the header.
Result<ForeignTensor> read_tensor(JsonReader& json, std::span<const std::byte> data, const std::string& name,
                                  const std::string& file) {
  ForeignTensor tensor{.name = name};
  std::string type_name;
  std::vector<uint64_t> offsets;
  THIMBLE_TRY(json.object([&](const std::string& member) -> Status {
    std::vector<uint64_t>* const numbers = member == "shape"          ? &tensor.shape
                                           : member == "data_offsets" ? &offsets
                                                                      : nullptr;
    if (member == "dtype") {
      THIMBLE_LET(text, json.string());
      type_name = text;
      return {};
    }
    if (!numbers) return json.skip();
    return json.array([&]() -> Status {
      THIMBLE_LET(number, json.uint());
      if (numbers->size() == kMostDimensions)
        return error(Code::kUnsupported, "%s: tensor %s has more than %zu dimensions", file.c_str(),
                     in_quotes(name).c_str(), kMostDimensions);
      numbers->push_back(number);
      return {};
    });
  }));
  const auto type =
      std::find_if(std::begin(kTypes), std::end(kTypes), [&](const Type& t) { return type_name == t.name; });
  if (type == std::end(kTypes))
    return error(Code::kUnsupported, "%s: tensor %s is of type %s, which cannot be read", file.c_str(),
                 in_quotes(name).c_str(), in_quotes(type_name).c_str());
  tensor.type = type->usual;
  tensor.dtype = type->dtype;
  const std::optional<uint64_t> elements = elements_of(tensor.shape);
  const bool in_order = offsets.size() == 2 && offsets[0] <= offsets[1] && offsets[1] <= data.size();
  if (!elements || !in_order || (offsets[1] - offsets[0]) % type->bytes != 0 ||
      (offsets[1] - offsets[0]) / type->bytes != *elements)
    return error(Code::kFormat, "%s is damaged or incomplete: tensor %s is not where its header says",
                 file.c_str(), in_quotes(name).c_str());
  tensor.data = data.data() + offsets[0];
  tensor.bytes = offsets[1] - offsets[0];
  return tensor;
}

}  // namespace

Result<std::vector<ForeignTensor>> read_safetensors(std::span<const std::byte> bytes,
                                                    const std::string& file) {
  ByteReader reader(bytes);
  uint64_t length;
  std::string_view header;
  if (!reader.read(length) || length > kLongestHeader || !reader.take(length, header) ||
      !header.starts_with('{'))
    return error(Code::kFormat, "%s is not a safetensors file, or is incomplete", file.c_str());
  const std::span<const std::byte> data(reader.at(), reader.left());
  std::vector<ForeignTensor> tensors;
  JsonReader json(header, "the header of " + file);
  THIMBLE_TRY(json.object([&](const std::string& name) -> Status {
    if (name == "__metadata__") return json.skip();
    THIMBLE_LET(tensor, read_tensor(json, data, name, file));
    tensors.push_back(std::move(tensor));
    return {};
  }));
  THIMBLE_TRY(json.end());
  return tensors;
}

}  // namespace thimble
