// Sidecar files with the retaining heads of a model, and the check that they belong to it.
#include <cinttypes>
#include <cmath>

#include "runtime/model/load.h"

namespace thimble {
namespace {

Status check_kind(const Gguf& gguf) {
  THIMBLE_LET(kind, with_default(gguf.get_string("adapter.type"), ""));
  if (kind == "locret") return {};
  return error(Code::kFormat, "%s holds no retaining heads: key 'adapter.type' is %s instead of 'locret'",
               gguf.name().c_str(), in_quotes(kind).c_str());
}

Status check_base(const Gguf& gguf, const Model& model, std::string& warning) {
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
      {"locret.base.block_count", model.shape.layers},
      {"locret.base.head_count", model.shape.heads},
      {"locret.base.head_count_kv", model.shape.kv_heads},
      {"locret.base.key_length", model.shape.head_dim},
  };
  for (const auto& [key, ours] : counts) {
    THIMBLE_LET(theirs, gguf.need_uint(key));
    if (theirs != ours)
      return error(Code::kMismatch,
                   "%s was trained for another model: key '%s' is %" PRIu64 ", and the model has %u", file,
                   key, theirs, ours);
  }
  THIMBLE_LET(fingerprint, gguf.get_uint("locret.base.fingerprint"));
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

// The heads' shares of the pools, where the file has them: positive numbers, then made to be 1 on average.
Result<std::vector<float>> get_shares(const Gguf& gguf, uint64_t heads) {
  THIMBLE_LET(shares, with_default(gguf.get_floats("retainer.budget"), {}));
  if (shares.empty()) return shares;
  double sum = 0;
  for (const float share : shares) {
    if (!(share > 0) || !std::isfinite(share))
      return error(Code::kFormat,
                   "%s: key 'retainer.budget' has a share of %g, where more than 0 is possible",
                   gguf.name().c_str(), static_cast<double>(share));
    sum += share;
  }
  if (shares.size() != heads)
    return error(Code::kMismatch,
                 "%s: key 'retainer.budget' has %zu shares, and the model has %" PRIu64
                 " KV heads in all layers",
                 gguf.name().c_str(), shares.size(), heads);
  for (float& share : shares) share = static_cast<float>(share * static_cast<double>(heads) / sum);
  return shares;
}

Result<uint32_t> read_act(const Gguf& gguf, uint32_t of_model) {
  THIMBLE_LET(name, gguf.get_string("locret.act"));
  if (!name) return of_model;
  if (*name == "silu") return kActSilu;
  if (*name == "gelu") return kActGelu;
  return error(Code::kUnsupported, "%s: key 'locret.act' is %s, where silu and gelu are supported",
               gguf.name().c_str(), in_quotes(*name).c_str());
}

}  // namespace

Result<std::shared_ptr<const RetainingHeads>> Model::open_heads(MappedFile file, std::string name) const {
  if (!has_weights())
    return error(Code::kInvalidArgument,
                 "%s: the model has no weights, so there is nothing for heads to belong to", name.c_str());
  const auto heads = std::make_shared<RetainingHeads>();
  heads->file = std::move(file);
  THIMBLE_LET(gguf, Gguf::parse(heads->file, std::move(name)));
  THIMBLE_TRY(check_kind(gguf));
  THIMBLE_TRY(check_base(gguf, *this, heads->warning));
  THIMBLE_LET(heads_act, read_act(gguf, act));
  heads->act = heads_act;
  THIMBLE_TRY(read_count(gguf, "locret.d_r", kMaxWidth, std::nullopt, heads->d_r));
  const struct {
    const char* key;
    uint32_t& to;
  } trained_for[] = {
      {"locret.budget", heads->budget},
      {"locret.chunk", heads->chunk},
      {"locret.stabilizers", heads->stabilizers},
      {"locret.local", heads->local},
  };
  for (const auto& [key, to] : trained_for) {
    THIMBLE_LET(value, with_default(gguf.get_uint(key), 0));
    if (value > UINT32_MAX)
      return error(Code::kFormat, "%s: key '%s' is %" PRIu64 ", which is too large", gguf.name().c_str(), key,
                   value);
    to = static_cast<uint32_t>(value);
  }

  THIMBLE_LET(shares, get_shares(gguf, uint64_t(shape.layers) * shape.kv_heads));
  heads->shares = std::move(shares);

  TensorSource tensors(gguf);
  for (uint32_t i = 0; i < shape.layers; ++i) {
    const std::string block = "blk." + std::to_string(i) + ".";
    const uint64_t qkv = (shape.heads + 2 * uint64_t(shape.kv_heads)) * shape.head_dim;
    THIMBLE_LET(fc1, tensors.matrix(block + "locret_fc1.weight", heads->d_r, qkv));
    THIMBLE_LET(fc2, tensors.matrix(block + "locret_fc2.weight", shape.kv_heads, heads->d_r));
    heads->layers.push_back({fc1, fc2});
  }
  THIMBLE_TRY(tensors.all_taken());
  return std::shared_ptr<const RetainingHeads>(heads);
}

}  // namespace thimble
