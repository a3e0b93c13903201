// What the files of a model family mean: the facts about its keys and tensors that its loader needs.
#pragma once

#include "runtime/model/load.h"

namespace thimble {

enum class QkNorm { kNone, kEachHead, kAllHeads };
enum class Norms { kBefore, kBeforeAndBehind, kBehind };  // of attention and feed-forward
enum class HasExperts {
  kNone,   // no experts
  kMay,    // if the file gives a number; as wide as the feed-forward of other layers
  kAlways  // always; with a width of their own
};

// Which key head a value head of delta_net uses (DeltaNetParams::tiled).
enum class DeltaNetHeads { kNone, kTiled, kGrouped };

// The meaning of the keys and tensors of an architecture (the facts are those of llama.cpp).
struct Family {
  const char* name;
  uint32_t pairing;
  QkNorm qk_norm = QkNorm::kNone;
  Norms norms = Norms::kBefore;
  const char* ffn_norm = "ffn_norm";
  uint32_t act = kActSilu;
  // `period`: every layer has a window, except each `period`-th one; the file may set another period. 0: no
  // layer has a window. `window`: its length. 0: the file must give it, or there is no window.
  uint32_t period = 0, window = 0;
  RopeRules rope = {};
  bool gemma = false;                      // scales embeddings by sqrt(d_model), has soft caps
  float attention_cap = 0, logit_cap = 0;  // of gemma, if the file does not give them
  uint32_t layers_of_27b = 0;  // layers of gemma's 27B, which scales by d_model / heads, not head_dim
  bool granite_scales = false;
  uint32_t unrotated_every = 0;  // every n-th layer does not rotate
  bool sinks = false;            // attention has sinks
  bool biases = false;           // attention's output, the router and the experts have biases
  bool needs_window = false;     // the file must give the window's length
  bool own_output = false;       // output is never the embedding
  HasExperts experts = HasExperts::kNone;
  uint32_t route = kRouteSoftmax;
  bool gating_from_file = false;  // the file says how logits become weights
  bool choice_bias = false;       // the choice of experts has a bias
  // Whether an expert that every token uses exists besides the others, if the file gives its width.
  bool shared_expert = false;
  bool shared_gate = false;  // the shared expert has a gate, and the file may give a scale of all experts
  // Whether layers without KV heads have a short convolution instead of attention.
  bool short_conv = false;
  // Whether layers have linear attention (delta_net) if the file says so, and the others an output gate.
  DeltaNetHeads delta_net = DeltaNetHeads::kNone;
  // Whether queries are scaled up by their position, if the file gives the growth.
  bool grows_queries = false;
};

// The family of a file, by `general.architecture`. Unsupported: there is none.
Result<Family> find_family(const Gguf& gguf);

}  // namespace thimble
