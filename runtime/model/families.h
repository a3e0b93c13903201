// What the files of a model family mean: the facts about its keys and tensors that its loader needs.
#pragma once

#include "runtime/model/load.h"

namespace thimble {

enum class QkNorm {
  kNone,
  kEachHead,       // one vector for each head's channels (qwen3)
  kEachHeadIfAny,  // if the file has it (glm4moe)
  kEachRotated,    // the same vectors, after the rotation (hunyuan-dense)
  kAllHeads        // one vector for the channels of all heads (olmo2)
};
enum class Norms {  // of attention and feed-forward
  kBefore,
  kBeforeAndBehind,
  kBehind,
  kOnce  // one norm before both, which read the same input (cohere2)
};
enum class NormKind {
  kRms,
  kLayer,       // subtracts the mean (cohere2)
  kRmsOfLayer,  // kRms, with the epsilon of kLayer if the file only has that (nemotron_h)
  kByEpsilon    // kLayer if the file only has the epsilon of that (cohere2moe)
};
enum class Scales {  // of embeddings, of what layers add to the stream, of attention and of logits
  kNone,
  kGranite,  // all four; logits are divided by theirs
  kMiniCpm,  // the same, with other values if the file does not give them
  kLogits    // logits are multiplied by theirs (cohere2)
};
enum class Rotates {
  kAllLayers,
  kNoLayer,      // (nemotron_h)
  kThreeOfFour,  // every fourth layer does not rotate (smollm3)
  // If the model has windows, layers without one do not rotate (exaone4, cohere2), except the first ones that
  // have no experts although others do (cohere2moe).
  kWindows
};

// The layers that have a window.
struct Windows {
  // Every layer has a window, except each `period`-th one; the file may set another period. 0: no layer has a
  // window unless the file gives a period.
  uint32_t period = 0;
  uint32_t length = 0;         // 0: the file must give it, or there is no window
  bool required = false;       // the file must give length and period, except those given here
  bool first_is_full = false;  // the layer without a window is the first of a period, not the last
  bool lists_layers = false;   // the file may instead list all layers: whether each has a window
  uint32_t layers = 0;         // only models with so many layers have windows; 0: all
};

enum class HasExperts {
  kNone,           // no experts
  kMay,            // if the file gives a number; as wide as the feed-forward of other layers
  kMayOfOwnWidth,  // if the file gives a number; with a width of their own (deepseek2)
  kAlways          // always; with a width of their own
};
enum class ChoiceBias { kNone, kMay, kMust };  // added for the choice of experts only
struct ExpertFacts {
  HasExperts has = HasExperts::kNone;
  uint32_t route = kRouteSoftmax;  // how logits become weights
  bool route_from_file = false;    // the file may say it
  // Whether the weights of a token are divided by their sum only if the file says so. Otherwise they always
  // are.
  bool norm_from_file = false;
  ChoiceBias choice_bias = ChoiceBias::kNone;
  // Whether an expert that every token uses exists besides the others, if the file gives its width.
  bool shared = false;
  bool shared_gate = false;     // that expert has a gate
  float scale_with_shared = 1;  // factor of the sum of all experts if there is a shared one
};

// Which key head a value head of delta_net uses (DeltaNetParams::tiled).
enum class DeltaNetHeads { kNone, kTiled, kGrouped };

// Which layers have Mamba-2 (ssm): those without KV heads and feed-forward, or all, next to attention.
enum class SsmLayers { kNone, kSome, kAll };

// The meaning of the keys and tensors of an architecture (the facts are those of llama.cpp).
struct Family {
  const char* name;
  uint32_t pairing;
  QkNorm qk_norm = QkNorm::kNone;
  Norms norms = Norms::kBefore;
  NormKind norm_kind = NormKind::kRms;
  const char* ffn_norm = "ffn_norm";
  uint32_t act = kActSilu;
  Windows windows = {};
  RopeRules rope = {};
  Rotates rotates = Rotates::kAllLayers;
  Scales scales = Scales::kNone;
  bool gemma = false;                      // scales embeddings by sqrt(d_model), has soft caps
  float attention_cap = 0, logit_cap = 0;  // of gemma, if the file does not give them
  uint32_t layers_of_27b = 0;  // layers of gemma's 27B, which scales by d_model / heads, not head_dim
  bool sinks = false;          // attention has sinks
  bool biases = false;         // attention's output, the router and the experts have biases
  bool own_output = false;     // output is never the embedding
  ExpertFacts experts = {};
  // Whether layers without KV heads have a short convolution instead of attention.
  bool short_conv = false;
  // Whether layers have linear attention (delta_net) if the file says so, and the others an output gate.
  DeltaNetHeads delta_net = DeltaNetHeads::kNone;
  SsmLayers ssm = SsmLayers::kNone;
  bool latent = false;  // keys and values are made of a few latent channels (MLA)
  // Whether a layer is a norm and one mixer or one feed-forward.
  bool single_parts = false;
  bool gated = true;             // whether feed-forwards have a gate
  bool attention_scale = false;  // the file may give the factor of query-key products
  bool no_output_bias = false;   // a bias of attention's output is skipped
  // Whether a layer that drafts tokens is one of this family's layers with attention.
  bool drafts = false;
  // Whether queries are scaled up by their position, if the file gives the growth.
  bool grows_queries = false;
  const char* growth_period = nullptr;  // the key of its period; null: the positions before scaling
  // Loads sizes, scales, rotation, windows and layers, for a family that differs in too much. Null: the
  // common loader (architecture.cpp).
  Status (*loads)(const Gguf&, const Family&, Model&) = nullptr;
};

// gemma4.cpp
Status load_gemma4(const Gguf&, const Family&, Model&);

// The family of a file, by `general.architecture`. Unsupported: there is none.
Result<Family> find_family(const Gguf& gguf);

}  // namespace thimble
