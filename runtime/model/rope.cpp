// RoPE: computes frequencies from a model's keys and factors, and the table of cosines and sines.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstring>
#include <numbers>
#include <optional>

#include "base/bits.h"
#include "runtime/model/load.h"

namespace thimble {
namespace {

constexpr uint32_t kBlock = 64;  // positions that share a row in the second part of the table

// Parameters of yarn. Pairs that turn at least `fast_turns` times within the original context keep their
// frequency. Pairs that turn at most `slow_turns` times are fully scaled.
struct Yarn {
  double fast_turns = 32, slow_turns = 1;
};

// The fraction of its unscaled frequency that each channel pair keeps under yarn: a ramp between the two
// pairs.
std::vector<double> yarn_shares(const Yarn& yarn, uint32_t n_rot, double original_context, double base) {
  const auto pair = [&](double turns) {  // fractional index of the pair that turns `turns` times
    return n_rot * std::log(original_context / (turns * 2 * std::numbers::pi)) / (2 * std::log(base));
  };
  const double first = std::max(0.0, std::floor(pair(yarn.fast_turns)));
  const double last = std::min(n_rot - 1.0, std::ceil(pair(yarn.slow_turns)));
  std::vector<double> shares(n_rot / 2);
  for (uint32_t i = 0; i < shares.size(); ++i)
    shares[i] = 1 - std::clamp((i - first) / std::max(0.001, last - first), 0.0, 1.0);
  return shares;
}

// Reads a positive number. If the file lacks the key, returns the fallback.
Result<double> read_positive(const Gguf& gguf, const std::string& key, double fallback) {
  THIMBLE_LET(value, with_default(gguf.get_float(key), fallback));
  if (!std::isfinite(value) || value <= 0)
    return error(Code::kFormat, "%s: key %s is %g instead of a positive number", gguf.name().c_str(),
                 in_quotes(key).c_str(), value);
  return value;
}

// Like read_positive(), but 0 also gives the fallback.
Result<double> read_positive_or_0(const Gguf& gguf, const std::string& key, double fallback) {
  THIMBLE_LET(value, with_default(gguf.get_float(key), 0));
  return value == 0 ? fallback : read_positive(gguf, key, fallback);
}

// Reads frequency divisors from a tensor, [n_rot / 2].
Result<std::vector<double>> read_divisors(const Gguf& gguf, TensorSource& tensors, const std::string& name,
                                          uint32_t n_rot) {
  THIMBLE_LET(tensor, tensors.vector(name, n_rot / 2));
  std::vector<double> divisors;
  for (uint32_t i = 0; i < tensor.cols; ++i) {
    float divisor;
    std::memcpy(&divisor, tensor.data + i * sizeof divisor, sizeof divisor);
    if (!std::isfinite(divisor) || divisor <= 0)
      return error(Code::kFormat, "%s: element %" PRIu32 " of tensor '%s' is %g instead of a positive number",
                   gguf.name().c_str(), i, name.c_str(), static_cast<double>(divisor));
    divisors.push_back(divisor);
  }
  return divisors;
}

Result<double> read_base(const Gguf& gguf, const std::string& key, double fallback) {
  THIMBLE_LET(base, read_positive(gguf, key, fallback));
  if (base <= 1)
    return error(Code::kFormat, "%s: key %s is %g, where more than 1 is needed", gguf.name().c_str(),
                 in_quotes(key).c_str(), base);
  return base;
}

// Checks that no pair of channels turns by the fourth position, which is 0 in text. Of each three pairs, one
// turns by the position in time, one by the height and one by the width, as long as the sections allow.
Status check_sections(const Gguf& gguf, const std::string& key, uint32_t pairs) {
  THIMBLE_LET(sections, gguf.get_ints(key));
  if (!sections) return {};
  int64_t sum = 0;
  bool possible = sections->size() == 4;
  for (const int64_t section : *sections) {
    possible = possible && section >= 0 && section <= int64_t(kMaxHeadDim);
    sum += possible ? section : 0;
  }
  if (!possible || sum == 0)
    return error(Code::kFormat, "%s: key %s does not hold four sections", gguf.name().c_str(),
                 in_quotes(key).c_str());
  for (int64_t i = 0; i < pairs; ++i)
    if (const int64_t at = i % sum; at >= 3 * (*sections)[size_t(at % 3)])
      return error(Code::kUnsupported, "%s: key %s has sections that do not rotate by text positions",
                   gguf.name().c_str(), in_quotes(key).c_str());
  return {};
}

// Reads how many channels of a head rotate.
Status read_rotating(const Gguf& gguf, const std::string& key, uint32_t head_dim, uint32_t& n_rot) {
  THIMBLE_TRY(read_count(gguf, key, head_dim, head_dim, n_rot));
  if (n_rot % 2 == 0) return {};
  return error(Code::kFormat, "%s: key '%s' is %" PRIu32 ", which is odd", gguf.name().c_str(), key.c_str(),
               n_rot);
}

// The scaling of a base's frequencies.
struct Scaling {
  double factor = 1;
  std::optional<Yarn> yarn;
  std::vector<double> divisors, short_divisors;  // of each channel pair; short_divisors for longrope only
};

// Returns the scheme with its frequencies.
RopeScheme with_base(RopeScheme rope, const Scaling& scaling, double base) {
  std::vector<double> shares(rope.n_rot / 2, 0.0);
  if (scaling.yarn) shares = yarn_shares(*scaling.yarn, rope.n_rot, rope.original_context, base);
  const auto frequencies = [&](const std::vector<double>& divisors) {
    std::vector<double> out;
    for (uint32_t i = 0; i < divisors.size(); ++i) {
      const double unscaled = std::pow(base, -2.0 * i / rope.n_rot) / divisors[i];
      out.push_back(unscaled * (shares[i] + (1 - shares[i]) / scaling.factor));
    }
    return out;
  };
  rope.inverse_frequency = frequencies(scaling.divisors);
  rope.inverse_frequency_short = frequencies(scaling.short_divisors);
  return rope;
}

}  // namespace

Status load_rope(const Gguf& gguf, const std::string& prefix, const RopeRules& rules, TensorSource& tensors,
                 Model& model) {
  RopeScheme& rope = model.rope;
  const std::string keys = prefix + ".rope.", scaling_keys = keys + "scaling.";
  const uint32_t head_dim = model.shape.head_dim;
  THIMBLE_TRY(read_rotating(gguf, keys + "dimension_count", head_dim, rope.n_rot));
  if (rules.alternates) THIMBLE_TRY(check_sections(gguf, keys + "dimension_sections", rope.n_rot / 2));
  THIMBLE_LET(base, read_base(gguf, keys + "freq_base", 10000));
  if (rules.reads_alpha && head_dim > 2) {
    THIMBLE_LET(alpha, read_positive(gguf, scaling_keys + "alpha", 1));
    base *= std::pow(alpha, head_dim / (head_dim - 2.0));
  }
  if (rules.halves_with_sections && gguf.find(keys + "dimension_sections")) rope.pairing = kRopeHalves;
  double window_base = rules.window_base != 0 ? rules.window_base : base;
  if (rules.reads_window_base) {
    THIMBLE_LET(given, read_base(gguf, keys + "freq_base_swa", window_base));
    window_base = given;
  }

  // As in llama.cpp, a factor without a type means linear. The type yarn only adds yarn's ramp. longrope is
  // recognised by its tensors.
  THIMBLE_LET(type, with_default(gguf.get_string(scaling_keys + "type"), "linear"));
  if (type != "none" && type != "linear" && type != "yarn" && type != "longrope")
    return error(Code::kUnsupported, "%s: key '%stype' is %s, which is not supported", gguf.name().c_str(),
                 scaling_keys.c_str(), in_quotes(type).c_str());
  Scaling scaling;
  const bool legacy = !gguf.find(scaling_keys + "factor") && gguf.find(keys + "scale_linear");
  const std::string factor_key = legacy ? keys + "scale_linear" : scaling_keys + "factor";
  THIMBLE_LET(factor, read_positive_or_0(gguf, factor_key, 1));
  if (type != "none") scaling.factor = factor;
  THIMBLE_TRY(read_count(gguf, scaling_keys + "original_context_length", kMaxPositions,
                         model.info.context_length, rope.original_context));
  const double original = rope.original_context, context = model.info.context_length;
  const bool longrope = tensors.has("rope_factors_long.weight") || tensors.has("rope_factors_short.weight");
  if (type == "longrope" && !longrope)
    return error(Code::kFormat, "%s lacks the tensor 'rope_factors_long.weight'", gguf.name().c_str());
  // Phi-3's formula, for files that lack its result.
  const double longrope_factor = longrope && context > original && original > 1
                                     ? std::sqrt(1 + std::log(context / original) / std::log(original))
                                     : 1;
  THIMBLE_LET(attention_factor, read_positive(gguf, scaling_keys + "attn_factor", longrope_factor));
  rope.attention_factor = attention_factor;
  // As in llama.cpp: what the scaling adds to the length of queries and keys is divided between cos and sin
  // and the factor of attention's products.
  const double growth = 0.1 * std::log(std::max(scaling.factor, 1.0));
  double multiplier = 0;
  if (rules.reads_yarn || rules.scales_attention) {
    THIMBLE_LET(given, read_positive_or_0(gguf, scaling_keys + "yarn_log_multiplier", 0));
    multiplier = rules.scales_attention ? 10 * given : given;  // deepseek2's files give a tenth
  }
  const bool in_products = rules.scales_attention && multiplier > 0 && type == "yarn";
  if (rules.scales_attention) {
    const double longer = attention_factor * (1 + multiplier * growth) * (in_products ? 1 : 1 + growth);
    model.attention_scale *= static_cast<float>(longer * longer);
  }
  if (type == "yarn") {
    Yarn yarn;
    if (rules.reads_yarn) {
      THIMBLE_LET(fast, read_positive(gguf, scaling_keys + "yarn_beta_fast", yarn.fast_turns));
      THIMBLE_LET(slow, read_positive(gguf, scaling_keys + "yarn_beta_slow", yarn.slow_turns));
      yarn = {fast, slow};
    }
    if (!in_products) rope.attention_factor *= (1 + growth) / (1 + multiplier * growth);
    scaling.yarn = yarn;
  }
  if (rules.norms_rotated) rope.attention_factor = 1;

  const std::vector<double> ones(rope.n_rot / 2, 1.0);
  scaling.divisors = ones;
  if (longrope) {
    THIMBLE_LET(long_divisors, read_divisors(gguf, tensors, "rope_factors_long.weight", rope.n_rot));
    THIMBLE_LET(short_divisors, read_divisors(gguf, tensors, "rope_factors_short.weight", rope.n_rot));
    scaling.divisors = long_divisors, scaling.short_divisors = short_divisors;
  } else if (tensors.has("rope_freqs.weight")) {
    THIMBLE_LET(llama3_divisors, read_divisors(gguf, tensors, "rope_freqs.weight", rope.n_rot));
    scaling.divisors = llama3_divisors;
  }
  uint32_t window_rot = rope.n_rot;
  if (rules.window_head_dim)
    THIMBLE_TRY(read_rotating(gguf, keys + "dimension_count_swa", rules.window_head_dim, window_rot));
  if (!rules.scales_windows)
    model.window_rope = with_base({.pairing = rope.pairing, .n_rot = window_rot},
                                  {.divisors = std::vector<double>(window_rot / 2, 1.0)}, window_base);
  else if (window_base != base)
    model.window_rope = with_base(rope, scaling, window_base);
  rope = with_base(rope, scaling, base);
  return {};
}

uint32_t rope_table_rows(uint32_t positions) {
  return kBlock + static_cast<uint32_t>(ceil_div(positions, kBlock));
}

void fill_rope_table(const RopeScheme& rope, uint32_t positions, uint32_t context, float* table) {
  const bool is_short = !rope.inverse_frequency_short.empty() && context <= rope.original_context;
  const std::vector<double>& frequency = is_short ? rope.inverse_frequency_short : rope.inverse_frequency;
  const uint32_t rows = rope_table_rows(positions);
  for (uint32_t row = 0; row < rows; ++row) {
    const double position = row < kBlock ? row : uint64_t(row - kBlock) * kBlock;
    const double scale = row < kBlock ? 1.0 : rope.attention_factor;
    for (double f : frequency) {
      *table++ = static_cast<float>(scale * std::cos(position * f));
      *table++ = static_cast<float>(scale * std::sin(position * f));
    }
  }
}

}  // namespace thimble
