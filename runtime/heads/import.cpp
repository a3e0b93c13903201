#include "runtime/heads/import.h"

#include <algorithm>
#include <charconv>
#include <cinttypes>
#include <cstring>
#include <map>

#include "base/bits.h"
#include "base/new_file.h"
#include "gguf/import/safetensors.h"
#include "gguf/import/torch_file.h"
#include "gguf/new_gguf.h"
#include "runtime/heads/sidecar.h"
#include "runtime/model/load.h"
#include "text/json.h"

namespace thimble {
namespace {

std::string shape_text(const std::vector<uint64_t>& shape) {
  std::string text;
  for (const uint64_t extent : shape) text += (text.empty() ? "" : " x ") + std::to_string(extent);
  return text.empty() ? "a single number" : text;
}

// The tensors of a file by name. It knows which of them were not taken.
class Source {
 public:
  static Result<Source> make(std::vector<ForeignTensor> tensors, std::string file) {
    Source source;
    source.file_ = std::move(file);
    for (ForeignTensor& tensor : tensors) {
      std::string name = tensor.name;
      if (!source.tensors_.emplace(name, std::move(tensor)).second)
        return error(Code::kFormat, "%s has the tensor %s twice", source.file_.c_str(),
                     in_quotes(name).c_str());
    }
    return source;
  }

  const std::string& file() const { return file_; }
  const std::map<std::string, ForeignTensor>& tensors() const { return tensors_; }

  // An extent of a tensor, from 1 to `most`, that does not follow from the model.
  Result<uint32_t> extent(const std::string& name, size_t dimension, uint64_t most) const {
    THIMBLE_LET(tensor, find(name));
    if (dimension >= tensor->shape.size() || tensor->shape[dimension] < 1 || tensor->shape[dimension] > most)
      return error(Code::kFormat, "%s: tensor %s is %s, which is not a valid shape for it", file_.c_str(),
                   in_quotes(name).c_str(), shape_text(tensor->shape).c_str());
    return static_cast<uint32_t>(tensor->shape[dimension]);
  }

  // Takes a tensor of this shape, in a type that the library can read.
  Result<const ForeignTensor*> take(const std::string& name, const std::vector<uint64_t>& shape) {
    THIMBLE_LET(tensor, find(name));
    if (tensor->shape != shape)
      return error(Code::kMismatch,
                   "%s was trained for another model: tensor %s is %s, where this model needs %s",
                   file_.c_str(), in_quotes(name).c_str(), shape_text(tensor->shape).c_str(),
                   shape_text(shape).c_str());
    if (!tensor->dtype)
      return error(Code::kUnsupported,
                   "%s: tensor %s is of type %s; float32, float16 and bfloat16 can be read", file_.c_str(),
                   in_quotes(name).c_str(), tensor->type);
    ++taken_[name];
    return tensor;
  }

  Status all_taken(const char* kind) const {
    for (const auto& [name, tensor] : tensors_)
      if (!taken_.count(name))
        return error(
            Code::kUnsupported,
            "%s: tensor %s has no place in a retainer of the kind %s; without it its scores would be wrong",
            file_.c_str(), in_quotes(name).c_str(), kind);
    return {};
  }

 private:
  Result<const ForeignTensor*> find(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end())
      return error(Code::kFormat, "%s lacks the tensor '%s'", file_.c_str(), name.c_str());
    return &found->second;
  }

  std::string file_;
  std::map<std::string, ForeignTensor> tensors_;
  std::map<std::string, uint32_t> taken_;
};

// ---- values ----

std::vector<std::byte> as_they_are(const ForeignTensor& tensor) {
  return {tensor.data, tensor.data + tensor.bytes};
}

std::vector<std::byte> as_f32(const ForeignTensor& tensor) {
  if (tensor.dtype == DType::kF32) return as_they_are(tensor);
  const uint64_t elements = tensor.bytes / sizeof(uint16_t);
  std::vector<std::byte> out(elements * sizeof(float));
  for (uint64_t i = 0; i < elements; ++i) {
    uint16_t half;
    std::memcpy(&half, tensor.data + i * sizeof half, sizeof half);
    const float value = tensor.dtype == DType::kF16 ? f16_to_f32(half) : bf16_to_f32(half);
    std::memcpy(out.data() + i * sizeof value, &value, sizeof value);
  }
  return out;
}

// The matrix with its columns in the order in which the model's file has the rows of q, k and v. If the file
// interleaves the two halves of each head's rotary channels (methods 2.8), the columns of q and k are
// interleaved, too.
std::vector<std::byte> in_file_order(const ForeignTensor& tensor, const Model& model) {
  std::vector<std::byte> out = as_they_are(tensor);
  if (model.rope.pairing != kRopeAdjacent) return out;
  const uint64_t rows = tensor.shape[0], cols = tensor.shape[1], size = tensor.bytes / (rows * cols);
  const uint64_t dim = model.shape.head_dim, heads = model.shape.heads + model.shape.kv_heads;
  for (uint64_t row = 0; row < rows; ++row)
    for (uint64_t head = 0; head < heads; ++head) {
      const uint64_t first = row * cols + head * dim;
      for (uint64_t c = 0; c < dim; ++c)
        std::memcpy(out.data() + (first + c) * size, tensor.data + (first + c % 2 * (dim / 2) + c / 2) * size,
                    size);
    }
  return out;
}

// ---- kinds ----

// A sidecar that is being built.
struct Sidecar {
  const Model& model;
  Source& source;
  NewGguf file;

  // Adds a matrix with its own type. Its values are read from the source when the file is written.
  Status matrix(const std::string& from, const std::string& to, uint64_t rows, uint64_t cols) {
    THIMBLE_LET(tensor, source.take(from, {rows, cols}));
    file.add(to, {cols, rows}, *tensor->dtype, [t = tensor] { return as_they_are(*t); });
    return {};
  }
  Status matrix_of_qkv(const std::string& from, const std::string& to, uint64_t rows, uint64_t cols) {
    THIMBLE_LET(tensor, source.take(from, {rows, cols}));
    file.add(to, {cols, rows}, *tensor->dtype, [t = tensor, &m = model] { return in_file_order(*t, m); });
    return {};
  }
  // Adds a tensor of another kind, converted to f32.
  Status f32(const std::string& from, const std::string& to, const std::vector<uint64_t>& shape,
             const std::vector<uint64_t>& gguf_shape) {
    THIMBLE_LET(tensor, source.take(from, shape));
    file.add(to, gguf_shape, DType::kF32, [t = tensor] { return as_f32(*t); });
    return {};
  }
  Status vector(const std::string& from, const std::string& to, uint64_t size) {
    return f32(from, to, {size}, {size});
  }
};

// Locret (methods 2.1): one hidden layer on q, k and v.
Status add_locret(Sidecar& s, const std::string& prefix) {
  const ModelShape& shape = s.model.shape;
  const uint64_t qkv = (shape.heads + 2 * uint64_t{shape.kv_heads}) * shape.head_dim;
  THIMBLE_LET(hidden, s.source.extent(prefix + "0.self_attn.fc1.weight", 0, kMaxWidth));
  s.file.set("retainer.input", "qkv");
  s.file.set("retainer.target", "max_logit");
  s.file.set("retainer.act", name_of_act(s.model.act));
  s.file.set("retainer.hidden", hidden);
  for (uint32_t i = 0; i < shape.layers; ++i) {
    const std::string from = prefix + std::to_string(i) + ".self_attn.";
    const std::string to = "blk." + std::to_string(i) + ".";
    THIMBLE_TRY(s.matrix_of_qkv(from + "fc1.weight", to + "retain_fc1.weight", hidden, qkv));
    THIMBLE_TRY(s.matrix(from + "fc2.weight", to + "retain_fc2.weight", shape.kv_heads, hidden));
  }
  return {};
}

// KVzap without a hidden layer.
Status add_linear(Sidecar& s, const std::string& prefix) {
  const ModelShape& shape = s.model.shape;
  s.file.set("retainer.input", "x");
  s.file.set("retainer.target", "log_kvzip_plus");
  for (uint32_t i = 0; i < shape.layers; ++i) {
    const std::string from = prefix + std::to_string(i) + ".", to = "blk." + std::to_string(i) + ".retain.";
    THIMBLE_TRY(s.matrix(from + "weight", to + "weight", shape.kv_heads, shape.d_model));
    THIMBLE_TRY(s.vector(from + "bias", to + "bias", shape.kv_heads));
  }
  return {};
}

// KVzap with a hidden layer.
Status add_mlp(Sidecar& s, const std::string& prefix) {
  const ModelShape& shape = s.model.shape;
  THIMBLE_LET(hidden, s.source.extent(prefix + "0.0.weight", 0, kMaxWidth));
  s.file.set("retainer.input", "x");
  s.file.set("retainer.target", "log_kvzip_plus");
  s.file.set("retainer.act", name_of_act(kActGeluErf));
  s.file.set("retainer.hidden", hidden);
  for (uint32_t i = 0; i < shape.layers; ++i) {
    const std::string from = prefix + std::to_string(i) + ".", to = "blk." + std::to_string(i) + ".";
    THIMBLE_TRY(s.matrix(from + "0.weight", to + "retain_fc1.weight", hidden, shape.d_model));
    THIMBLE_TRY(s.vector(from + "0.bias", to + "retain_fc1.bias", hidden));
    THIMBLE_TRY(s.matrix(from + "2.weight", to + "retain_fc2.weight", shape.kv_heads, hidden));
    THIMBLE_TRY(s.vector(from + "2.bias", to + "retain_fc2.bias", shape.kv_heads));
  }
  return {};
}

// Fast KVzip: a query for each head and a key for each KV head, with `rank` channels, compared with a few
// sinks.
Status add_sink(Sidecar& s, const std::string& prefix) {
  const ModelShape& shape = s.model.shape;
  const uint64_t kv_heads = shape.kv_heads, group = shape.heads / shape.kv_heads;
  THIMBLE_LET(rank, s.source.extent(prefix + "0.q_norm.weight", 0, kMaxHeadDim));
  THIMBLE_LET(sinks, s.source.extent(prefix + "0.k_base", 2, kMaxHeadDim));
  s.file.set("retainer.input", "x");
  s.file.set("retainer.target", "kvzip");
  s.file.set("retainer.rank", rank);
  s.file.set("retainer.sinks", sinks);
  for (uint32_t i = 0; i < shape.layers; ++i) {
    const std::string from = prefix + std::to_string(i) + ".", to = "blk." + std::to_string(i) + ".retain_";
    const uint64_t q_rows = kv_heads * group * rank;
    THIMBLE_TRY(s.matrix(from + "q_proj.weight", to + "q.weight", q_rows, shape.d_model));
    THIMBLE_TRY(s.vector(from + "q_proj.bias", to + "q.bias", q_rows));
    THIMBLE_TRY(s.matrix(from + "k_proj.weight", to + "k.weight", kv_heads * rank, shape.d_model));
    THIMBLE_TRY(s.vector(from + "q_norm.weight", to + "q_norm.weight", rank));
    THIMBLE_TRY(s.vector(from + "k_norm.weight", to + "k_norm.weight", rank));
    THIMBLE_TRY(s.f32(from + "k_base", to + "kbase", {kv_heads, 1, sinks, rank}, {rank, kv_heads * sinks}));
    THIMBLE_TRY(s.f32(from + "b", to + "b", {kv_heads, 1, group}, {kv_heads * group}));
  }
  return {};
}

struct Kind {
  Retainer::Kind kind;
  const char* prefix;  // of a layer's tensor names; the layer's number and a point follow
  const char* mark;    // a tensor of every layer of this kind, and of no other kind
  // The number of most recent entries that the published code always keeps. It also keeps no first entries,
  // or 4. Every retention of this library keeps the first 4, so no file states that number.
  uint32_t stabilizers;
  Status (*add)(Sidecar&, const std::string& prefix);
};
constexpr Kind kKinds[] = {
    {Retainer::Kind::kLocret, "model.layers.", "self_attn.fc1.weight", 2500, add_locret},
    {Retainer::Kind::kLinear, "layers.", "weight", 128, add_linear},
    {Retainer::Kind::kMlp, "layers.", "0.weight", 128, add_mlp},
    {Retainer::Kind::kSink, "module.", "q_proj.weight", 4096, add_sink},
};

// Splits "layers.12.0.weight" after "layers." into 12 and "0.weight".
std::optional<std::pair<uint32_t, std::string_view>> of_layer(std::string_view name,
                                                              std::string_view prefix) {
  if (!name.starts_with(prefix)) return std::nullopt;
  name.remove_prefix(prefix.size());
  uint32_t layer = 0;
  const auto read = std::from_chars(name.data(), name.data() + name.size(), layer);
  if (read.ec != std::errc()) return std::nullopt;
  name.remove_prefix(static_cast<size_t>(read.ptr - name.data()));
  if (!name.starts_with('.')) return std::nullopt;
  return std::pair(layer, name.substr(1));
}

Result<const Kind*> find_kind(const std::string& name, const Source& source) {
  std::string known;
  for (const Kind& kind : kKinds) {
    if (name == name_of(kind.kind)) return &kind;
    known += (known.empty() ? "" : ", ") + std::string(name_of(kind.kind));
  }
  if (!name.empty())
    return error(Code::kInvalidArgument, "%s is not a kind of retainer; the kinds are %s",
                 in_quotes(name).c_str(), known.c_str());
  for (const Kind& kind : kKinds)
    for (const auto& [tensor, unused] : source.tensors())
      if (const auto layer = of_layer(tensor, kind.prefix); layer && layer->second == kind.mark) return &kind;
  if (source.tensors().empty()) return error(Code::kFormat, "%s holds no tensors", source.file().c_str());
  return error(Code::kUnsupported,
               "%s holds no retainer of a kind that is known here (%s): its first tensor is %s",
               source.file().c_str(), known.c_str(), in_quotes(source.tensors().begin()->first).c_str());
}

Status check_layers(const Kind& kind, const Source& source, uint32_t of_model) {
  uint64_t layers = 0;
  for (const auto& [name, tensor] : source.tensors())
    if (const auto layer = of_layer(name, kind.prefix)) layers = std::max(layers, uint64_t{layer->first} + 1);
  if (layers == 0 || layers == of_model) return {};
  return error(Code::kMismatch,
               "%s was trained for another model: it has scores for %" PRIu64 " layers, and the model has %u",
               source.file().c_str(), layers, of_model);
}

// ---- files ----

std::span<const std::byte> contents(const MappedFile& file) {
  return {file.data(), static_cast<size_t>(file.size())};
}

// Checks config.json, which states the type of a published folder.
Status check_config(const std::string& path) {
  THIMBLE_LET(file, MappedFile::open(path));
  JsonReader json({reinterpret_cast<const char*>(file.data()), static_cast<size_t>(file.size())}, path);
  std::string type;
  THIMBLE_TRY(json.object([&](const std::string& name) -> Status {
    if (name != "model_type") return json.skip();
    THIMBLE_LET(text, json.string());
    type = text;
    return {};
  }));
  if (type == "kvzap") return {};
  return error(Code::kUnsupported, "%s: 'model_type' is %s, where retainers have 'kvzap'", path.c_str(),
               in_quotes(type).c_str());
}

Result<std::vector<ForeignTensor>> read_tensors(const MappedFile& file, const std::string& path) {
  const std::span<const std::byte> bytes = contents(file);
  if (is_torch_file(bytes)) return read_torch_file(bytes, path);
  constexpr char kGguf[] = {'G', 'G', 'U', 'F'};
  if (bytes.size() >= sizeof kGguf && std::memcmp(bytes.data(), kGguf, sizeof kGguf) == 0)
    return error(Code::kFormat, "%s is a GGUF file already; give it as it is with its model", path.c_str());
  // A safetensors file begins with the header's length. JSON follows.
  if (constexpr size_t kHeader = 8; bytes.size() > kHeader && bytes[kHeader] == std::byte{'{'})
    return read_safetensors(bytes, path);
  return error(Code::kFormat, "%s is neither a file of torch.save nor one of safetensors", path.c_str());
}

// Returns "KVzap-mlp-Qwen3-8B" for a folder of this name, and "q4_dim16_sink16" for q4_dim16_sink16.pt.
std::string base_name(std::string path, bool folder) {
  while (path.size() > 1 && (path.back() == '/' || path.back() == '\\')) path.pop_back();
  const size_t last = path.find_last_of("/\\");
  if (last != std::string::npos) path.erase(0, last + 1);
  const size_t point = path.rfind('.');
  return folder || point == std::string::npos ? path : path.substr(0, point);
}

}  // namespace

Status import_heads(const Model& model, const std::string& input, const std::string& kind_name,
                    const std::string& output) {
  if (!model.has_weights())
    return error(Code::kInvalidArgument,
                 "the model has no weights, so there is nothing for a retainer to belong to");
  const bool folder = is_folder(input);
  const std::string path = folder ? input + "/model.safetensors" : input;
  if (folder) THIMBLE_TRY(check_config(input + "/config.json"));
  THIMBLE_LET(file, MappedFile::open(path));
  THIMBLE_LET(tensors, read_tensors(file, path));
  THIMBLE_LET(source, Source::make(std::move(tensors), path));
  THIMBLE_LET(kind, find_kind(kind_name, source));
  THIMBLE_TRY(check_layers(*kind, source, model.shape.layers));

  Sidecar sidecar{model, source, {}};
  NewGguf& out = sidecar.file;
  begin_sidecar(out, model, base_name(input, folder), kind->kind);
  out.set("retainer.stabilizers", kind->stabilizers);
  THIMBLE_TRY(kind->add(sidecar, kind->prefix));
  THIMBLE_TRY(source.all_taken(name_of(kind->kind)));
  return out.write(output);
}

}  // namespace thimble
