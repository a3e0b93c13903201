// Writes torch.save and safetensors files for tests, valid ones and invalid ones: pickles instruction by
// instruction, both layouts of torch.save, zip archives.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/support/gguf_writer.h"

namespace thimble {

inline FileBytes file_bytes(std::string_view text) {
  FileBytes bytes;
  append(bytes, text.data(), text.size());
  return bytes;
}

template <typename T>
std::string raw(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

// Values as float32, float16 or bfloat16. The values in the tests are exact in all three.
inline std::string packed(const std::vector<float>& values, const std::string& type) {
  std::string out;
  for (const float v : values) {
    const uint32_t bits = std::bit_cast<uint32_t>(v);
    if (type == "Float" || type == "F32")
      out += raw(v);
    else
      out += raw(type == "Half" || type == "F16" ? f32_to_f16(v) : static_cast<uint16_t>(bits >> 16));
  }
  return out;
}

// ---- pickles ----

struct PickleWriter {
  std::string out = "\x80\x02";

  PickleWriter& op(std::string_view bytes) {
    out += bytes;
    return *this;
  }
  PickleWriter& text(std::string_view t) { return op("X").op(raw(static_cast<uint32_t>(t.size()))).op(t); }
  PickleWriter& integer(int64_t v) {
    return v == static_cast<int32_t>(v) ? op("J").op(raw(static_cast<int32_t>(v)))
                                        : op(std::string_view("\x8a\x08", 2)).op(raw(v));
  }
  PickleWriter& global(const std::string& module, const std::string& name) {
    return op("c" + module + "\n" + name + "\n");
  }
  PickleWriter& integers(const std::vector<int64_t>& values) {
    op("(");
    for (const int64_t v : values) integer(v);
    return op("t");
  }
  // A persistent id: 'storage', its type, key, device, elements.
  PickleWriter& storage(const std::string& type, const std::string& key, int64_t elements, bool legacy) {
    op("(").text("storage").global("torch", type + "Storage").text(key).text("cpu").integer(elements);
    return (legacy ? op("N") : *this).op("tQ");
  }
  PickleWriter& tensor(const std::string& type, const std::string& key, int64_t elements, int64_t offset,
                       const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
                       bool legacy = false) {
    global("torch._utils", "_rebuild_tensor_v2").op("(").storage(type, key, elements, legacy).integer(offset);
    integers(shape).integers(strides);
    return op("\x89").global("collections", "OrderedDict").op(")RtR");
  }
  std::string end() const { return out + "."; }
};

// ---- zip archives ----

struct ZipEntry {
  std::string name, content;
  uint16_t method = 0;
};

inline std::string zip(const std::vector<ZipEntry>& entries) {
  std::string out, directory;
  for (const ZipEntry& e : entries) {
    const auto size = static_cast<uint32_t>(e.content.size());
    const std::string common = raw(uint16_t{0}) + raw(e.method) + raw(uint32_t{0}) + raw(uint32_t{0}) +
                               raw(size) + raw(size) + raw(static_cast<uint16_t>(e.name.size())) +
                               raw(uint16_t{0});
    directory += "PK\x01\x02" + raw(uint16_t{20}) + raw(uint16_t{20}) + common + std::string(10, '\0') +
                 raw(static_cast<uint32_t>(out.size())) + e.name;
    out += "PK\x03\x04" + raw(uint16_t{20}) + common + e.name + e.content;
  }
  const auto count = static_cast<uint16_t>(entries.size());
  const auto offset = static_cast<uint32_t>(out.size());
  return out + directory + "PK\x05\x06" + std::string(4, '\0') + raw(count) + raw(count) +
         raw(static_cast<uint32_t>(directory.size())) + raw(offset) + raw(uint16_t{0});
}

// ---- checkpoints ----

struct CheckpointTensor {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<float> values;
};

inline std::vector<int64_t> strides_of(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0; stride *= shape[d]) strides[d] = stride;
  return strides;
}

// {name: tensor}, as torch.save writes it; each tensor has its own storage. `type` is Float, Half or
// BFloat16.
inline std::string state_dict(const std::vector<CheckpointTensor>& tensors, const std::string& type,
                              bool legacy) {
  PickleWriter w;
  w.global("collections", "OrderedDict").op(")R(");
  for (size_t i = 0; i < tensors.size(); ++i) {
    const CheckpointTensor& t = tensors[i];
    w.text(t.name).tensor(type, std::to_string(i), static_cast<int64_t>(t.values.size()), 0, t.shape,
                          strides_of(t.shape), legacy);
  }
  return w.op("u").end();
}

inline std::string torch_zip(const std::string& pickle, const std::vector<CheckpointTensor>& tensors,
                             const std::string& type, const std::string& byteorder = "little") {
  std::vector<ZipEntry> entries = {{"m/data.pkl", pickle}, {"m/byteorder", byteorder}};
  for (size_t i = 0; i < tensors.size(); ++i)
    entries.push_back({"m/data/" + std::to_string(i), packed(tensors[i].values, type)});
  return zip(entries);
}

inline std::string torch_legacy(const std::string& pickle, const std::vector<CheckpointTensor>& tensors,
                                const std::string& type, bool little_endian = true) {
  PickleWriter version, system, keys;
  system.op("}").text("little_endian").op(little_endian ? "\x88" : "\x89").op("s");
  keys.op("](");
  std::string data;
  for (size_t i = 0; i < tensors.size(); ++i) {
    keys.text(std::to_string(i));
    data += raw(static_cast<int64_t>(tensors[i].values.size())) + packed(tensors[i].values, type);
  }
  const std::string magic = "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";
  return magic + version.integer(1001).end() + system.end() + pickle + keys.op("e").end() + data;
}

// `type` is F32, F16 or BF16.
inline std::string safetensors(const std::vector<CheckpointTensor>& tensors, const std::string& type) {
  std::string header = R"({"__metadata__":{"format":"pt"})", data;
  for (const CheckpointTensor& t : tensors) {
    std::string shape;
    for (const int64_t extent : t.shape) shape += (shape.empty() ? "" : ",") + std::to_string(extent);
    const std::string values = packed(t.values, type);
    header += ",\"" + t.name + R"(":{"dtype":")" + type + R"(","shape":[)" + shape + R"(],"data_offsets":[)" +
              std::to_string(data.size()) + "," + std::to_string(data.size() + values.size()) + "]}";
    data += values;
  }
  header += "}";
  header.resize(round_up(header.size(), 8), ' ');
  return raw(static_cast<uint64_t>(header.size())) + header + data;
}

}  // namespace thimble
