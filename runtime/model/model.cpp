#include "runtime/model/model.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <numeric>
#include <tuple>

#include "base/fnv1a.h"
#include "runtime/model/load.h"

namespace thimble {
namespace {

Result<std::string> text(const Gguf& gguf, const char* key) {
  THIMBLE_LET(value, with_default(gguf.get_string(key), ""));
  return std::string(value);
}

Result<ModelInfo> load_info(const Gguf& gguf) {
  ModelInfo info;
  THIMBLE_LET(architecture, text(gguf, "general.architecture"));
  THIMBLE_LET(name, text(gguf, "general.name"));
  THIMBLE_LET(description, text(gguf, "general.description"));
  THIMBLE_LET(license, text(gguf, "general.license"));
  info.architecture = architecture, info.name = name, info.description = description, info.license = license;
  std::map<uint32_t, uint64_t> bytes_of_type;
  for (const GgufTensor& tensor : gguf.tensors()) {
    info.parameters += tensor.elements;
    bytes_of_type[tensor.type] += tensor.bytes;
  }
  const auto most = std::max_element(bytes_of_type.begin(), bytes_of_type.end(),
                                     [](const auto& a, const auto& b) { return a.second < b.second; });
  if (most != bytes_of_type.end()) info.quantization = gguf_type_name(most->first);
  return info;
}

}  // namespace

Tensor Tensor::row_range(uint32_t first, uint32_t count) const {
  return {.data = data + dtype_bytes(type, uint64_t(first) * cols),
          .type = type,
          .rows = count,
          .cols = cols,
          .scale = scale};
}

Tensor Tensor::part(uint32_t first, uint32_t count) const {
  return {.data = data + first * sizeof(float), .type = type, .rows = 1, .cols = count};
}

Result<std::shared_ptr<const Model>> Model::open(MappedFile file, std::string name) {
  std::vector<GgufFile> files;
  files.push_back({std::move(file), std::move(name)});
  return open(std::move(files));
}

Result<std::shared_ptr<const Model>> Model::open(std::vector<GgufFile> files) {
  const auto model = std::make_shared<Model>();
  model->files_ = std::move(files);
  THIMBLE_LET(parsed, Gguf::parse(model->files_));
  model->gguf_ = std::move(parsed);
  const Gguf& gguf = model->gguf_;

  THIMBLE_LET(kind, text(gguf, "general.type"));
  if (kind == "adapter")
    return error(Code::kFormat,
                 "%s is an adapter; open the model that it was made for, then this file as its heads",
                 gguf.name().c_str());
  THIMBLE_LET(info, load_info(gguf));
  model->info = info;
  for (const GgufFile& file : model->files_) model->info.file_bytes += file.map.size();
  if (!gguf.tensors().empty()) THIMBLE_TRY(load_weights(gguf, *model));

  // Weights without a usable vocabulary still work for callers that pass token ids.
  if (Result<Tokenizer> tokenizer = Tokenizer::load(gguf); tokenizer.ok())
    model->tokenizer = std::move(*tokenizer);
  else
    model->description_of_tokenizer_error = tokenizer.status().message();
  if (!model->tokenizer.ok() && gguf.find("tokenizer.ggml.model"))
    model->warnings.push_back(model->description_of_tokenizer_error);
  for (const std::string& warning : model->tokenizer.warnings()) model->warnings.push_back(warning);
  if (!model->has_weights() && !model->tokenizer.ok())
    return error(Code::kFormat, "%s holds no weights, and no vocabulary either: %s", gguf.name().c_str(),
                 model->description_of_tokenizer_error.c_str());
  if (model->has_weights() && model->tokenizer.size() > model->shape.vocab)
    return error(Code::kFormat,
                 "%s: the vocabulary has %u tokens, and tensor 'token_embd.weight' only %u rows",
                 gguf.name().c_str(), model->tokenizer.size(), model->shape.vocab);
  // Rows without a token only pad the matrix. They were not trained.
  if (model->has_weights() && model->tokenizer.ok())
    for (Model* m : {model.get(), model->draft_block.get()})
      if (m) m->output = m->output.row_range(0, model->tokenizer.size());
  THIMBLE_LET(chat_template, text(gguf, "tokenizer.chat_template"));
  THIMBLE_LET(default_template, text(gguf, "tokenizer.chat_template.default"));
  model->chat_template = chat_template.empty() ? default_template : chat_template;
  model->chat = ChatWriter::choose(model->chat_template);
  for (const GgufFile& file : model->files_) model->memory_.push_back(file.map.bytes());
  for (const ReorderedMatrix& matrix : model->reordered)
    model->memory_.emplace_back(matrix.pages.data(), matrix.bytes);
  if (model->draft_block) model->draft_block->memory_ = model->memory_;
  return std::shared_ptr<const Model>(model);
}

namespace {
constexpr std::string_view kNamedTemplate = "tokenizer.chat_template.";
}

std::vector<std::string_view> Model::chat_template_names() const {
  std::vector<std::string_view> names;
  for (const auto& [key, unused] : gguf_.metadata())
    if (key.starts_with(kNamedTemplate)) names.push_back(key.substr(kNamedTemplate.size()));
  return names;
}

Result<ChatWriter> Model::chat_named(std::string_view name) const {
  THIMBLE_LET(source, gguf_.get_string(std::string(kNamedTemplate).append(name)));
  if (source) return ChatWriter::from_source(*source);
  auto known = ChatWriter::from_name(name);
  if (known.ok()) return known;
  std::string names;
  for (const std::string_view own : chat_template_names())
    names.append(names.empty() ? "" : ", ").append(own);
  if (names.empty()) return known;
  return error(known.status().code(), "%s, or of the file's own templates: %s",
               known.status().message().c_str(), names.c_str());
}

const AttentionMixer* Layer::attention() const {
  for (const Mixer& mixer : mixers)
    if (const auto* found = std::get_if<AttentionMixer>(&mixer)) return found;
  return nullptr;
}

uint64_t Layer::state_bytes() const {
  uint64_t bytes = 0;
  for (const Mixer& mixer : mixers) bytes += std::visit([](const auto& m) { return m.state_bytes(); }, mixer);
  return bytes;
}

std::vector<Tensor> Layer::tensors() const {
  std::vector<Tensor> all{norm, ffn_norm, post_norm, post_ffn_norm};
  const auto add = [&](const auto& part) {
    const std::vector<Tensor> its = part.tensors();
    all.insert(all.end(), its.begin(), its.end());
  };
  for (const Mixer& mixer : mixers) std::visit(add, mixer);
  std::visit(add, feed_forward);
  add(token_branch);
  return all;
}

std::vector<Tensor> Model::tensors() const {
  const bool tied = output.data == token_embedding.data;  // the embedding may have more rows than output
  std::vector<Tensor> all{output_norm, tied ? token_embedding : output};
  for (const Layer& layer : layers) {
    const std::vector<Tensor> its = layer.tensors();
    all.insert(all.end(), its.begin(), its.end());
  }
  if (joined) all.insert(all.end(), {joined->embedding_norm, joined->row_norm, joined->join});
  const std::vector<Tensor> shared = target ? target->tensors() : std::vector<Tensor>();
  std::erase_if(all, [&](const Tensor& t) {
    return !t || std::any_of(shared.begin(), shared.end(),
                             [&](const Tensor& other) { return t.data == other.data; });
  });
  return all;
}

uint32_t Model::retained_head_dim() const {
  const auto found = std::find_if(layers.begin(), layers.end(), [](const Layer& l) { return l.retains(); });
  return found == layers.end() ? 0 : found->attention()->head_dim;
}

bool Model::has_states() const {
  return std::any_of(layers.begin(), layers.end(), [](const Layer& l) { return l.state_bytes() > 0; });
}

ModelShape Model::shape_of(const Layer& layer) const {
  ModelShape s = shape;
  if (const AttentionMixer* attention = layer.attention()) {
    s.heads = attention->heads;
    s.kv_heads = attention->kv_heads;
    s.head_dim = attention->head_dim;
  }
  if (const auto* experts = std::get_if<Experts>(&layer.feed_forward)) {
    s.d_ff = experts->d_ff();
  } else {
    s.d_ff = std::get<Dense>(layer.feed_forward).down.cols;
    s.experts = s.chosen_experts = s.d_ff_shared = 0;
  }
  return s;
}

uint64_t Model::resident_bytes() const {
  uint64_t bytes = 0;
  for (const GgufFile& file : files_) bytes += file.map.resident_bytes();
  return bytes;
}

Status Model::check_files() const {
  for (const GgufFile& file : files_) THIMBLE_TRY(file.map.check_whole(file.name));
  return {};
}

std::array<MatrixShape, 2> Retainer::matrices() const {
  for (const Networks& l : layers) {
    const auto& [first, second] = kind == Kind::kSink ? std::tie(l.q, l.k) : std::tie(l.fc1, l.fc2);
    if (second) return {{{first.rows, first.cols}, {second.rows, second.cols}}};
  }
  return {};
}

std::vector<Tensor> Retainer::tensors() const {
  std::vector<Tensor> all;
  for (const Networks& l : layers)
    all.insert(all.end(), {l.fc1, l.fc1_bias, l.fc2, l.fc2_bias, l.q, l.q_bias, l.k, l.q_norm, l.k_norm,
                           l.sinks, l.sink_bias});
  std::erase_if(all, [](const Tensor& t) { return !t; });
  return all;
}

uint64_t Model::host_bytes() const {
  const uint64_t matrices =
      std::accumulate(reordered.begin(), reordered.end(), reordered.capacity() * sizeof(ReorderedMatrix),
                      [](uint64_t sum, const ReorderedMatrix& matrix) { return sum + matrix.bytes; });
  return matrices + sizeof *this + gguf_.host_bytes() + (tokenizer.ok() ? tokenizer.host_bytes() : 0) +
         layers.capacity() * (sizeof(Layer) + sizeof(Mixer)) + layer_of_run.capacity() * sizeof(uint32_t) +
         chat_template.capacity() + chat.host_bytes() +
         (rope.inverse_frequency.capacity() + rope.inverse_frequency_short.capacity() +
          window_rope.inverse_frequency.capacity()) *
             sizeof(double);
}

uint64_t Model::fingerprint() const {
  uint64_t hash = fnv1a(info.architecture);
  const uint32_t counts[] = {shape.layers, shape.heads, shape.kv_heads,
                             shape.head_dim};  // in the host's byte order, which is little-endian
  hash = fnv1a(counts, sizeof counts, hash);
  for (const Layer& layer : layers)
    for (const Tensor& norm :
         {layer.norm ? layer.norm : layer.post_norm, layer.ffn_norm ? layer.ffn_norm : layer.post_ffn_norm})
      hash = fnv1a(norm.data, norm.bytes(), hash);
  return hash;
}

}  // namespace thimble
