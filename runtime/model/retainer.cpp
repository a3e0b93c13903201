// Reads the sidecar of a model's retainer, and checks that it belongs to the model.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <iterator>

#include "runtime/model/load.h"

namespace thimble {
namespace {

using Kind = Retainer::Kind;
using Input = Retainer::Input;

// ---- keys ----

// A word that a key may have as value, and its meaning.
template <typename T>
struct Word {
  const char* name;
  T meaning;
};
constexpr Word<Kind> kKinds[] = {
    {"locret", Kind::kLocret}, {"linear", Kind::kLinear}, {"mlp", Kind::kMlp}, {"sink", Kind::kSink}};
constexpr Word<Input> kInputs[] = {{"qkv", Input::kQkv}, {"x", Input::kX}};
constexpr Word<uint32_t> kActs[] = {{"silu", kActSilu}, {"gelu", kActGelu}, {"gelu_erf", kActGeluErf}};

// The meaning of the key's word, or `without` if the file lacks the key.
template <typename T, size_t n>
Result<T> read_word(const Gguf& gguf, const std::string& key, const Word<T> (&words)[n], T without) {
  THIMBLE_LET(name, gguf.get_string(key));
  if (!name) return without;
  std::string known;
  for (const Word<T>& word : words) {
    if (*name == word.name) return word.meaning;
    known += (known.empty() ? "" : &word == std::end(words) - 1 ? " and " : ", ") + std::string(word.name);
  }
  return error(Code::kUnsupported, "%s: key '%s' is %s, where %s are supported", gguf.name().c_str(),
               key.c_str(), in_quotes(*name).c_str(), known.c_str());
}

template <typename T, size_t n>
const char* word_of(const Word<T> (&words)[n], T meaning) {
  return std::find_if(words, words + n, [&](const Word<T>& word) { return word.meaning == meaning; })->name;
}

Status check_base(const Gguf& gguf, const std::string& prefix, const Model& model, std::string& warning) {
  const char* file = gguf.name().c_str();
  THIMBLE_LET(architecture, gguf.need_string("general.architecture"));
  if (architecture != model.info.architecture)
    return error(Code::kMismatch,
                 "%s was trained for the architecture %s, and the model is of architecture %s", file,
                 in_quotes(architecture).c_str(), in_quotes(model.info.architecture).c_str());
  const struct {
    const char* key;
    uint32_t ours;
  } counts[] = {
      {"base.block_count", model.shape.layers},
      {"base.head_count", model.shape.heads},
      {"base.head_count_kv", model.shape.kv_heads},
      {"base.key_length", model.shape.head_dim},
  };
  for (const auto& [name, ours] : counts) {
    const std::string key = prefix + name;
    THIMBLE_LET(theirs, gguf.need_uint(key));
    if (theirs != ours)
      return error(Code::kMismatch,
                   "%s was trained for another model: key '%s' is %" PRIu64 ", and the model has %u", file,
                   key.c_str(), theirs, ours);
  }
  THIMBLE_LET(fingerprint, gguf.get_uint(prefix + "base.fingerprint"));
  if (!fingerprint) {
    warning = gguf.name() + " has no fingerprint of its model: only the shapes could be checked";
  } else if (*fingerprint != model.fingerprint()) {
    return error(Code::kMismatch,
                 "%s was trained for another model of the same shape: the fingerprint is %016" PRIx64
                 ", and the model's is %016" PRIx64,
                 file, *fingerprint, model.fingerprint());
  }
  return {};
}

// Reads optional counts.
Status read_trained_for(const Gguf& gguf, const std::string& prefix, Retainer& retainer) {
  uint32_t protect_init = 0;
  const struct {
    std::string key;
    uint32_t& to;
  } counts[] = {
      {prefix == "adore." ? "adore.pool" : "locret.budget", retainer.budget},  // retainer.budget has shares
      {"locret.chunk", retainer.chunk},
      {"locret.local", retainer.local},
      {prefix + "stabilizers", retainer.stabilizers},
      {prefix + "protect_init", protect_init},
  };
  for (const auto& [key, to] : counts) {
    THIMBLE_LET(value, with_default(gguf.get_uint(key), 0));
    if (value > UINT32_MAX)
      return error(Code::kFormat, "%s: key '%s' is %" PRIu64 ", which is too large", gguf.name().c_str(),
                   key.c_str(), value);
    to = static_cast<uint32_t>(value);
  }
  THIMBLE_LET(says_first, gguf.get_uint(prefix + "protect_init"));
  if (says_first) retainer.protect_init = protect_init;
  return {};
}

// The KV heads' shares of the pool, scaled to 1 on average over the layers without a window.
Result<std::vector<float>> get_shares(const Gguf& gguf, const Model& model) {
  const size_t heads = model.layer_of_run.size();
  THIMBLE_LET(shares, retainer_shares(gguf));
  if (shares.empty()) return shares;
  if (shares.size() != heads)
    return error(Code::kMismatch,
                 "%s: key 'retainer.budget' has %zu shares, and the model has %zu KV heads in all layers",
                 gguf.name().c_str(), shares.size(), heads);
  double sum = 0, count = 0;
  for (size_t i = 0; i < heads; ++i) {
    if (model.owner_of_run(i).window) continue;
    sum += shares[i];
    ++count;
  }
  for (float& share : shares) share = static_cast<float>(share * count / sum);
  return shares;
}

Status read_kind(const Gguf& gguf, const std::string& prefix, uint32_t act_of_model, Retainer& retainer) {
  const bool old = prefix == "locret.";
  if (prefix == "adore.") {
    retainer.kind = Kind::kAdore;
    return {};
  }
  if (!old) THIMBLE_TRY(gguf.need_string("retainer.kind"));
  THIMBLE_LET(kind, read_word(gguf, prefix + "kind", kKinds, Kind::kLocret));
  const bool locret = kind == Kind::kLocret;
  THIMBLE_LET(input, read_word(gguf, prefix + "input", kInputs, locret ? Input::kQkv : Input::kX));
  retainer.kind = kind;
  retainer.input = input;
  if (locret || kind == Kind::kMlp) {
    THIMBLE_LET(act, read_word(gguf, prefix + "act", kActs, locret ? act_of_model : kActGeluErf));
    retainer.act = act;
    return read_count(gguf, old ? "locret.d_r" : "retainer.hidden", kMaxWidth, std::nullopt, retainer.hidden);
  }
  if (kind == Kind::kLinear) return {};
  THIMBLE_TRY(read_count(gguf, "retainer.rank", kMaxHeadDim, std::nullopt, retainer.rank));
  return read_count(gguf, "retainer.sinks", kMaxHeadDim, std::nullopt, retainer.sinks);
}

// ---- tensors ----

// Reads the tensors of one layer. Their names begin with `name`. `input`: the number of columns of the
// matrices that read the retainer's input.
Result<Retainer::Networks> read_networks(TensorSource& tensors, const std::string& name, const Retainer& r,
                                         const AttentionMixer& m, uint64_t input) {
  Retainer::Networks layer;
  const auto matrix = [&](const char* part, uint64_t rows, uint64_t cols, Tensor& to) -> Status {
    THIMBLE_LET(tensor, tensors.matrix(name + part, rows, cols));
    to = tensor;
    return {};
  };
  const auto floats = [&](const char* part, uint64_t rows, uint64_t cols, Tensor& to) -> Status {
    THIMBLE_LET(tensor, tensors.floats(name + part, rows, cols));
    to = tensor;
    return {};
  };
  const auto vector = [&](const char* part, uint64_t cols, Tensor& to) { return floats(part, 1, cols, to); };
  switch (r.kind) {
    case Kind::kLinear:
      THIMBLE_TRY(matrix(".weight", m.kv_heads, input, layer.fc2));
      THIMBLE_TRY(vector(".bias", m.kv_heads, layer.fc2_bias));
      break;
    case Kind::kMlp:
      THIMBLE_TRY(vector("_fc1.bias", r.hidden, layer.fc1_bias));
      THIMBLE_TRY(vector("_fc2.bias", m.kv_heads, layer.fc2_bias));
      [[fallthrough]];
    case Kind::kLocret:
      THIMBLE_TRY(matrix("_fc1.weight", r.hidden, input, layer.fc1));
      THIMBLE_TRY(matrix("_fc2.weight", m.kv_heads, r.hidden, layer.fc2));
      break;
    case Kind::kAdore:
      break;
    case Kind::kSink: {
      const uint64_t queries = uint64_t(m.heads) * r.rank, keys = uint64_t(m.kv_heads) * r.rank;
      THIMBLE_TRY(matrix("_q.weight", queries, input, layer.q));
      THIMBLE_TRY(vector("_q.bias", queries, layer.q_bias));
      THIMBLE_TRY(matrix("_k.weight", keys, input, layer.k));
      THIMBLE_TRY(vector("_q_norm.weight", r.rank, layer.q_norm));
      THIMBLE_TRY(vector("_k_norm.weight", r.rank, layer.k_norm));
      THIMBLE_TRY(floats("_kbase", uint64_t(m.kv_heads) * r.sinks, r.rank, layer.sinks));
      THIMBLE_TRY(vector("_b", m.heads, layer.sink_bias));
      break;
    }
  }
  return layer;
}

Result<Controller> read_controller(const Gguf& gguf, const Model& model) {
  Controller c;
  c.cols = model.shape.d_model;
  THIMBLE_TRY(read_count(gguf, "adore.width", Controller::kMostWidth, std::nullopt, c.width));
  TensorSource tensors(gguf);
  const uint32_t w = c.width;
  const struct {
    const char* name;
    uint32_t rows, cols;
    const float*& to;
  } parts[] = {{"adore.gru.weight_ih", 3 * w, c.cols, c.input},
               {"adore.gru.bias_ih", 1, 3 * w, c.input_bias},
               {"adore.gru.weight_hh", 3 * w, w, c.recurrent},
               {"adore.gru.bias_hh", 1, 3 * w, c.recurrent_bias},
               {"adore.position.weight", 1, w, c.age},
               {"adore.position.bias", 1, w, c.age_bias},
               {"adore.interaction.weight", w, w, c.interaction},
               {"adore.interaction.bias", 1, w, c.interaction_bias},
               {"adore.output.weight", 1, w, c.output},
               {"adore.output.bias", 1, 1, c.output_bias}};
  for (const auto& [name, rows, cols, to] : parts) {
    THIMBLE_LET(tensor, tensors.floats(name, rows, cols));
    to = reinterpret_cast<const float*>(tensor.data);
  }
  THIMBLE_TRY(tensors.all_taken());
  c.finish();
  return c;
}

}  // namespace

const char* name_of(Retainer::Kind kind) {
  return kind == Kind::kAdore ? "adore" : word_of(kKinds, kind);  // the controller's file has its own type
}
const char* name_of_act(uint32_t act) { return word_of(kActs, act); }

Result<std::string> retainer_prefix(const Gguf& gguf) {
  THIMBLE_LET(type, with_default(gguf.get_string("adapter.type"), ""));
  if (type == "retainer" || type == "locret" || type == "adore") return std::string(type) + ".";
  return error(Code::kFormat, "%s holds no retainer: key 'adapter.type' is %s instead of 'retainer'",
               gguf.name().c_str(), in_quotes(type).c_str());
}

Result<std::vector<float>> retainer_shares(const Gguf& gguf) {
  THIMBLE_LET(shares, with_default(gguf.get_floats("retainer.budget"), {}));
  for (const float share : shares)
    if (!(share > 0) || !std::isfinite(share))
      return error(Code::kFormat,
                   "%s: key 'retainer.budget' has a share of %g, where more than 0 is possible",
                   gguf.name().c_str(), static_cast<double>(share));
  return shares;
}

Result<std::shared_ptr<const Retainer>> Model::open_retainer(MappedFile file, std::string name) const {
  if (!has_weights())
    return error(Code::kInvalidArgument,
                 "%s: the model has no weights, so there is nothing for a retainer to belong to",
                 name.c_str());
  const auto retainer = std::make_shared<Retainer>();
  retainer->file = std::move(file);
  THIMBLE_LET(gguf, Gguf::parse(retainer->file, std::move(name)));
  THIMBLE_LET(prefix, retainer_prefix(gguf));
  THIMBLE_TRY(check_base(gguf, prefix, *this, retainer->warning));
  THIMBLE_TRY(read_kind(gguf, prefix, act, *retainer));
  THIMBLE_TRY(read_trained_for(gguf, prefix, *retainer));
  THIMBLE_LET(shares, get_shares(gguf, *this));
  retainer->shares = std::move(shares);
  THIMBLE_LET(retention, with_default(gguf.get_string("retainer.retention"), ""));
  if (retention == "locret" || retention == "keydiff" || retention == "mix")
    retainer->retention = retention;
  else if (!retention.empty())
    return error(Code::kUnsupported,
                 "%s: key 'retainer.retention' is %s, where locret, keydiff and mix are supported",
                 gguf.name().c_str(), in_quotes(retention).c_str());
  if (retainer->kind == Kind::kAdore) {
    retainer->retention = "adore";
    THIMBLE_LET(controller, read_controller(gguf, *this));
    retainer->controller = std::move(controller);
    return std::shared_ptr<const Retainer>(retainer);
  }

  const char* stem = prefix == "locret." ? "locret" : "retain";
  TensorSource tensors(gguf);
  for (uint32_t i = 0; i < shape.layers; ++i) {
    const std::string begin = "blk." + std::to_string(i) + "." + stem;
    Retainer::Networks& networks = retainer->layers.emplace_back();
    const AttentionMixer* attention = layers[i].attention();
    if (!attention || !attention->has_keys() || (attention->window && !tensors.has_any(begin))) continue;
    const uint32_t input = retainer->input == Input::kQkv ? attention->qkv_cols() : shape.d_model;
    THIMBLE_LET(read, read_networks(tensors, begin, *retainer, *attention, input));
    if (!attention->window) networks = read;
  }
  THIMBLE_TRY(tensors.all_taken());
  return std::shared_ptr<const Retainer>(retainer);
}

}  // namespace thimble
