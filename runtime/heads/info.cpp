#include "runtime/heads/info.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "runtime/model/load.h"
#include "text/json.h"

namespace thimble {
namespace {

// Whether each layer takes part in dividing the pool. Windowed layers do not, nor those that read
// the keys of others. Without a model of as many
// layers, the layers for which the file has tensors take part, or all layers if it has none.
std::vector<bool> divided_layers(const Gguf& gguf, const Model* model, uint64_t layers) {
  std::vector<bool> divided(layers);
  for (uint64_t i = 0; i < layers; ++i)
    divided[i] = model && model->layers.size() == layers
                     ? model->layers[i].retains()
                     : TensorSource(gguf).has_any("blk." + std::to_string(i) + ".");
  if (std::find(divided.begin(), divided.end(), true) == divided.end()) divided.assign(layers, true);
  return divided;
}

// The layer of each share. Without the model, every layer has as many KV heads as the file says. Empty: the
// shares do not fit.
std::vector<uint32_t> layers_of_shares(const Model* model, size_t shares, uint64_t layers,
                                       uint64_t kv_heads) {
  if (model && model->layers.size() == layers && model->layer_of_run.size() == shares)
    return model->layer_of_run;
  if (layers == 0 || shares / layers != kv_heads || shares % layers != 0) return {};
  std::vector<uint32_t> all(shares);
  for (size_t i = 0; i < shares; ++i) all[i] = static_cast<uint32_t>(i / kv_heads);
  return all;
}

// The shares of the pool, scaled to 1 on average over the layers that take part. Each layer is a row, and
// rows of other layers contain null, or nothing if the layer has no KV heads. Empty: the file has no shares.
Result<std::string> shares_json(const Gguf& gguf, const Model* model, uint64_t layers, uint64_t kv_heads) {
  THIMBLE_LET(shares, retainer_shares(gguf));
  if (shares.empty()) return std::string();
  const std::vector<uint32_t> layer_of = layers_of_shares(model, shares.size(), layers, kv_heads);
  if (layer_of.empty())
    return error(Code::kFormat,
                 "%s: key 'retainer.budget' has %zu shares, which are not those of %" PRIu64
                 " layers of %" PRIu64 " KV heads",
                 gguf.name().c_str(), shares.size(), layers, kv_heads);
  const std::vector<bool> divided = divided_layers(gguf, model, layers);
  double sum = 0, count = 0;
  for (size_t i = 0; i < shares.size(); ++i) {
    if (!divided[layer_of[i]]) continue;
    sum += shares[i];
    ++count;
  }
  std::vector<JsonWriter> rows(layers);
  for (size_t i = 0; i < shares.size(); ++i) {
    char number[32] = "null";
    if (divided[layer_of[i]]) std::snprintf(number, sizeof number, "%.4g", shares[i] * count / sum);
    rows[layer_of[i]].element(number);
  }
  JsonWriter all;
  for (const JsonWriter& row : rows) all.element(row.array());
  return all.array();
}

// The training data and settings that the file states. Empty: it states none.
Result<std::string> trained_json(const Gguf& gguf, const std::string& trained) {
  JsonWriter json;
  for (const char* key : {"texts", "tokens", "steps", "seed"}) {
    THIMBLE_LET(number, gguf.get_uint(trained + key));
    if (number) json.number(key, *number);
  }
  THIMBLE_LET(data, gguf.get_string(trained + "data"));
  if (data) json.text("data", *data);
  return json.empty() ? std::string() : json.object();
}

std::string metadata_json(const Gguf& gguf) {
  JsonWriter keys;
  for (const auto& [key, value] : gguf.metadata()) {
    const auto string = gguf.get_string(key);
    keys.text(std::string(key), string.ok() ? **string : printed(value));
  }
  return keys.object();
}

}  // namespace

Result<std::string> describe_heads(const std::string& path, const Model* model) {
  THIMBLE_LET(file, MappedFile::open(path));
  THIMBLE_LET(gguf, Gguf::parse(file, path));
  THIMBLE_LET(prefix, retainer_prefix(gguf));
  const bool older = prefix == "locret.", controller = prefix == "adore.";
  const std::string implied_kind = older ? "locret" : controller ? "adore" : "";
  const std::string implied_input = older ? "qkv" : controller ? "embedding" : "";
  THIMBLE_LET(kind, with_default(gguf.get_string("retainer.kind"), implied_kind));
  THIMBLE_LET(input, with_default(gguf.get_string("retainer.input"), implied_input));
  THIMBLE_LET(target, with_default(gguf.get_string("retainer.target"), ""));
  THIMBLE_LET(name, with_default(gguf.get_string("general.name"), ""));
  THIMBLE_LET(architecture, gguf.need_string("general.architecture"));
  const std::string base = prefix + "base.";
  THIMBLE_LET(layers, gguf.need_uint(base + "block_count"));
  THIMBLE_LET(heads, gguf.need_uint(base + "head_count"));
  THIMBLE_LET(kv_heads, gguf.need_uint(base + "head_count_kv"));
  THIMBLE_LET(head_dim, gguf.need_uint(base + "key_length"));
  THIMBLE_LET(fingerprint, gguf.get_uint(base + "fingerprint"));
  THIMBLE_LET(shares, shares_json(gguf, model, layers, kv_heads));
  THIMBLE_LET(trained, trained_json(gguf, prefix + "trained."));
  uint64_t parameters = 0;
  for (const GgufTensor& tensor : gguf.tensors()) parameters += tensor.elements;

  JsonWriter json;
  json.text("name", name);
  json.text("kind", kind);
  json.text("input", input);
  json.text("target", target);
  json.text("architecture", architecture);
  json.number("layers", layers);
  json.number("heads", heads);
  json.number("kv_heads", kv_heads);
  json.number("head_dim", head_dim);
  char digits[20] = "";
  if (fingerprint) std::snprintf(digits, sizeof digits, "%016" PRIx64, *fingerprint);
  json.text("fingerprint", digits);
  json.number("parameters", parameters);
  json.number("file_bytes", file.size());
  if (model) {
    THIMBLE_LET(again, MappedFile::open(path));
    const Status fit = to_status(model->open_retainer(std::move(again), path));
    json.raw("fits", fit.ok() ? "true" : "false");
    if (!fit.ok()) json.text("misfit", fit.message());
  }
  if (!trained.empty()) json.raw("trained", trained);
  if (!shares.empty()) json.raw("shares", shares);
  json.raw("metadata", metadata_json(gguf));
  return json.object();
}

}  // namespace thimble
