// The table of model families. A family is a row.
#include "runtime/model/families.h"

#include <algorithm>
#include <iterator>

namespace thimble {
namespace {

constexpr Family kGptOss = {.name = "gpt-oss",
                            .pairing = kRopeHalves,
                            .ffn_norm = "post_attention_norm",
                            .act = kActClamped,
                            .windows = {.period = 2, .required = true},
                            .sinks = true,
                            .biases = true,
                            .own_output = true,
                            .experts = {.has = HasExperts::kAlways, .route = kRouteSoftmaxOfChosen}};
constexpr Family kGranite = {.name = "granite",
                             .pairing = kRopeAdjacent,
                             .scales = Scales::kGranite,
                             .experts = {.has = HasExperts::kMay, .shared = true}};
constexpr Family kLfm2 = {.name = "lfm2",
                          .pairing = kRopeHalves,
                          .qk_norm = QkNorm::kEachHead,
                          .windows = {.period = UINT32_MAX},  // if the file has one, it is that of all layers
                          .short_conv = true};
constexpr Family lfm2moe() {
  Family f = kLfm2;
  f.name = "lfm2moe";
  f.experts = {.has = HasExperts::kAlways, .route_from_file = true, .choice_bias = ChoiceBias::kMust};
  return f;
}
constexpr Family kQwen35 = {.name = "qwen35",
                            .pairing = kRopeHalves,
                            .qk_norm = QkNorm::kEachHead,
                            .ffn_norm = "post_attention_norm",
                            .rope = {.alternates = true},
                            .delta_net = DeltaNetHeads::kTiled,
                            .drafts = true};
constexpr Family qwen35moe() {
  Family f = kQwen35;
  f.name = "qwen35moe";
  f.experts = {.has = HasExperts::kAlways, .shared = true, .shared_gate = true};
  return f;
}
constexpr Family qwen3next() {
  Family f = qwen35moe();
  f.name = "qwen3next";
  f.rope.alternates = false;
  f.delta_net = DeltaNetHeads::kGrouped;
  return f;
}
constexpr Family granitehybrid() {
  Family f = kGranite;
  f.name = "granitehybrid";
  f.ssm = SsmLayers::kSome;
  return f;
}
constexpr Family kNemotronH = {.name = "nemotron_h",
                               .pairing = kRopeHalves,
                               .norm_kind = NormKind::kRmsOfLayer,
                               .act = kActReluSqr,
                               .rotates = Rotates::kNoLayer,
                               .ssm = SsmLayers::kSome,
                               .single_parts = true,
                               .gated = false};
constexpr Family nemotron_h_moe() {
  Family f = kNemotronH;
  f.name = "nemotron_h_moe";
  f.experts = {.has = HasExperts::kAlways,
               .route = kRouteSigmoid,
               .norm_from_file = true,
               .choice_bias = ChoiceBias::kMust,
               .shared = true};
  return f;
}
constexpr Family named(Family f, const char* name) {
  f.name = name;
  return f;
}
constexpr Family kFamilies[] = {
    {.name = "llama", .pairing = kRopeAdjacent, .experts = {.has = HasExperts::kMay}},
    {.name = "mistral3",
     .pairing = kRopeAdjacent,
     .rope = {.reads_yarn = true},
     .experts = {.has = HasExperts::kMay},
     .grows_queries = true},
    {.name = "qwen2", .pairing = kRopeHalves},
    {.name = "qwen3", .pairing = kRopeHalves, .qk_norm = QkNorm::kEachHead},
    {.name = "qwen3moe",
     .pairing = kRopeHalves,
     .qk_norm = QkNorm::kEachHead,
     .experts = {.has = HasExperts::kAlways}},
    {.name = "phi3", .pairing = kRopeHalves},
    {.name = "gemma2",
     .pairing = kRopeHalves,
     .norms = Norms::kBeforeAndBehind,
     .act = kActGelu,
     .windows = {.period = 2, .length = 4096},
     .gemma = true,
     .attention_cap = 50,
     .logit_cap = 30,
     .layers_of_27b = 46},
    {.name = "gemma3",
     .pairing = kRopeHalves,
     .qk_norm = QkNorm::kEachHead,
     .norms = Norms::kBeforeAndBehind,
     .act = kActGelu,
     .windows = {.period = 6},
     .rope = {.scales_windows = false, .window_base = 10000},
     .gemma = true,
     .layers_of_27b = 62},
    {.name = "gemma4", .pairing = kRopeHalves, .act = kActGelu, .gemma = true, .loads = load_gemma4},
    kGptOss,
    named(kGptOss, "gptoss"),
    {.name = "smollm3", .pairing = kRopeAdjacent, .rotates = Rotates::kThreeOfFour},
    kGranite,
    named(kGranite, "granitemoe"),
    granitehybrid(),
    kNemotronH,
    nemotron_h_moe(),
    {.name = "falcon-h1",
     .pairing = kRopeHalves,
     .ssm = SsmLayers::kAll,
     .attention_scale = true,
     .no_output_bias = true},
    {.name = "olmo2",
     .pairing = kRopeHalves,
     .qk_norm = QkNorm::kAllHeads,
     .norms = Norms::kBehind,
     .windows = {.period = 4},
     .rope = {.scales_windows = false, .reads_window_base = false},
     .own_output = true},
    kLfm2,
    lfm2moe(),
    kQwen35,
    qwen35moe(),
    qwen3next(),
    {.name = "seed_oss", .pairing = kRopeHalves, .ffn_norm = "post_attention_norm"},
    {.name = "ernie4_5", .pairing = kRopeAdjacent},
    {.name = "ernie4_5-moe",
     .pairing = kRopeAdjacent,
     .experts = {.has = HasExperts::kAlways, .choice_bias = ChoiceBias::kMay, .shared = true}},
    {.name = "glm4",
     .pairing = kRopeAdjacent,
     .norms = Norms::kBeforeAndBehind,
     .rope = {.halves_with_sections = true}},
    {.name = "glm4moe",
     .pairing = kRopeHalves,
     .qk_norm = QkNorm::kEachHeadIfAny,
     .ffn_norm = "post_attention_norm",
     .experts = {.has = HasExperts::kAlways,
                 .route = kRouteSigmoid,
                 .route_from_file = true,
                 .norm_from_file = true,
                 .choice_bias = ChoiceBias::kMust,
                 .shared = true},
     .drafts = true},
    {.name = "deepseek2",
     .pairing = kRopeAdjacent,
     .rope = {.scales_attention = true},
     .experts = {.has = HasExperts::kMayOfOwnWidth,
                 .route_from_file = true,
                 .norm_from_file = true,
                 .choice_bias = ChoiceBias::kMay,
                 .shared = true},
     .latent = true,
     .drafts = true,
     .grows_queries = true,
     .growth_period = "attention.temperature_length"},
    {.name = "exaone4",
     .pairing = kRopeHalves,
     .qk_norm = QkNorm::kEachHead,
     .norms = Norms::kBehind,
     .windows = {.period = 4, .length = 4096, .layers = 64},
     .rotates = Rotates::kWindows},
    {.name = "hunyuan-dense",
     .pairing = kRopeHalves,
     .qk_norm = QkNorm::kEachRotated,
     .rope = {.norms_rotated = true, .reads_alpha = true}},
    {.name = "minicpm", .pairing = kRopeAdjacent, .scales = Scales::kMiniCpm},
    {.name = "cohere2",
     .pairing = kRopeAdjacent,
     .norms = Norms::kOnce,
     .norm_kind = NormKind::kLayer,
     .windows = {.period = 4, .required = true},
     .rotates = Rotates::kWindows,
     .scales = Scales::kLogits},
    {.name = "cohere2moe",
     .pairing = kRopeAdjacent,
     .norms = Norms::kOnce,
     .norm_kind = NormKind::kByEpsilon,
     .windows = {.required = true, .first_is_full = true, .lists_layers = true},
     .rotates = Rotates::kWindows,
     .scales = Scales::kLogits,
     .experts = {.has = HasExperts::kAlways,
                 .route = kRouteSigmoid,
                 .route_from_file = true,
                 .norm_from_file = true,
                 .shared = true,
                 .scale_with_shared = 0.5f}},
};

// Families that are not supported, and the one that is most like each.
constexpr struct {
  const char *name, *nearest;
} kNearest[] = {
    {"qwen4exp", "qwen35moe"},      {"kimi-linear", "qwen3next"}, {"glm-dsa", "deepseek2"},
    {"deepseek4", "deepseek2"},     {"bailingmoe2", "glm4moe"},   {"hy_v3", "hunyuan-dense"},
    {"mistral4", "deepseek2"},      {"plm", "deepseek2"},         {"kimi-k3", "deepseek2"},
    {"laguna", "qwen3moe"},         {"mellum", "qwen3moe"},       {"step35", "qwen3moe"},
    {"gemma4-assistant", "gemma4"}, {"minicpm3", "minicpm"},      {"hunyuan-moe", "hunyuan-dense"}};

}  // namespace

Result<Family> find_family(const Gguf& gguf) {
  THIMBLE_LET(name, gguf.need_string("general.architecture"));
  const auto found = [](std::string_view wanted) {
    return std::find_if(std::begin(kFamilies), std::end(kFamilies),
                        [&](const Family& family) { return wanted == family.name; });
  };
  if (const Family* family = found(name); family != std::end(kFamilies)) return *family;
  std::string known, hint;
  for (const Family& family : kFamilies)
    known += known.empty() ? family.name : std::string(", ") + family.name;
  for (const auto& near : kNearest)
    if (name == near.name && found(near.nearest) != std::end(kFamilies))
      hint = std::string("; the nearest one is ") + near.nearest;
  return error(Code::kUnsupported, "%s: the architecture %s is not supported%s (only %s)",
               gguf.name().c_str(), in_quotes(name).c_str(), hint.c_str(), known.c_str());
}

}  // namespace thimble
