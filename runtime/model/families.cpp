// The table of model families. A family is a row.
#include "runtime/model/families.h"

namespace thimble {
namespace {

constexpr Family kGptOss = {.name = "gpt-oss",
                            .pairing = kRopeHalves,
                            .ffn_norm = "post_attention_norm",
                            .act = kActClamped,
                            .period = 2,
                            .sinks = true,
                            .biases = true,
                            .needs_window = true,
                            .own_output = true,
                            .experts = HasExperts::kAlways,
                            .route = kRouteSoftmaxOfChosen};
constexpr Family kGranite = {.name = "granite",
                             .pairing = kRopeAdjacent,
                             .granite_scales = true,
                             .experts = HasExperts::kMay,
                             .shared_expert = true};
constexpr Family kLfm2 = {.name = "lfm2",
                          .pairing = kRopeHalves,
                          .qk_norm = QkNorm::kEachHead,
                          .period = UINT32_MAX,  // a window, if the file has one, is that of all layers
                          .short_conv = true};
constexpr Family lfm2moe() {
  Family a = kLfm2;
  a.name = "lfm2moe";
  a.experts = HasExperts::kAlways;
  a.gating_from_file = a.choice_bias = true;
  return a;
}
constexpr Family kQwen35 = {.name = "qwen35",
                            .pairing = kRopeHalves,
                            .qk_norm = QkNorm::kEachHead,
                            .ffn_norm = "post_attention_norm",
                            .rope = {.alternates = true},
                            .delta_net = DeltaNetHeads::kTiled};
constexpr Family qwen35moe() {
  Family a = kQwen35;
  a.name = "qwen35moe";
  a.experts = HasExperts::kAlways;
  a.shared_expert = a.shared_gate = true;
  return a;
}
constexpr Family qwen3next() {
  Family a = qwen35moe();
  a.name = "qwen3next";
  a.rope.alternates = false;
  a.delta_net = DeltaNetHeads::kGrouped;
  return a;
}
constexpr Family named(Family a, const char* name) {
  a.name = name;
  return a;
}
constexpr Family kFamilies[] = {
    {.name = "llama", .pairing = kRopeAdjacent, .experts = HasExperts::kMay},
    {.name = "mistral3",
     .pairing = kRopeAdjacent,
     .rope = {.reads_yarn = true},
     .experts = HasExperts::kMay,
     .grows_queries = true},
    {.name = "qwen2", .pairing = kRopeHalves},
    {.name = "qwen3", .pairing = kRopeHalves, .qk_norm = QkNorm::kEachHead},
    {.name = "qwen3moe",
     .pairing = kRopeHalves,
     .qk_norm = QkNorm::kEachHead,
     .experts = HasExperts::kAlways},
    {.name = "phi3", .pairing = kRopeHalves},
    {.name = "gemma2",
     .pairing = kRopeHalves,
     .norms = Norms::kBeforeAndBehind,
     .act = kActGelu,
     .period = 2,
     .window = 4096,
     .gemma = true,
     .attention_cap = 50,
     .logit_cap = 30,
     .layers_of_27b = 46},
    {.name = "gemma3",
     .pairing = kRopeHalves,
     .qk_norm = QkNorm::kEachHead,
     .norms = Norms::kBeforeAndBehind,
     .act = kActGelu,
     .period = 6,
     .rope = {.scales_windows = false, .window_base = 10000},
     .gemma = true,
     .layers_of_27b = 62},
    kGptOss,
    named(kGptOss, "gptoss"),
    {.name = "smollm3", .pairing = kRopeAdjacent, .unrotated_every = 4},
    kGranite,
    named(kGranite, "granitemoe"),
    {.name = "olmo2",
     .pairing = kRopeHalves,
     .qk_norm = QkNorm::kAllHeads,
     .norms = Norms::kBehind,
     .period = 4,
     .rope = {.scales_windows = false, .reads_window_base = false},
     .own_output = true},
    kLfm2,
    lfm2moe(),
    kQwen35,
    qwen35moe(),
    qwen3next(),
};

}  // namespace

Result<Family> find_family(const Gguf& gguf) {
  THIMBLE_LET(name, gguf.need_string("general.architecture"));
  std::string known;
  for (const Family& a : kFamilies) {
    if (name == a.name) return a;
    known += known.empty() ? a.name : std::string(", ") + a.name;
  }
  return error(Code::kUnsupported, "%s: the architecture %s is not supported (only %s)", gguf.name().c_str(),
               in_quotes(name).c_str(), known.c_str());
}

}  // namespace thimble
