// A model as the decoder sees it: shape, rotary scheme, and its weights by role. Immutable and shared.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/backend.h"
#include "base/mapped_file.h"
#include "gguf/gguf.h"
#include "runtime/model/controller.h"
#include "runtime/model/placed_tensors.h"
#include "templates/chat/writer.h"
#include "text/tokenizer.h"

namespace thimble {

// One matrix or vector in the mapped file; `data` is null where the model has none.
struct Tensor {
  const std::byte* data = nullptr;
  DType type = DType::kF32;
  uint32_t rows = 0, cols = 0;  // a vector has one row
  explicit operator bool() const { return data != nullptr; }
  uint64_t bytes() const { return dtype_bytes(type, uint64_t(rows) * cols); }
  Tensor row_range(uint32_t first, uint32_t count) const;  // rows of a fused matrix
  Tensor part(uint32_t first, uint32_t count) const;       // elements of a vector, which is f32
};

// How keys and queries rotate: enough to build the table of backends/backend.h for any number of positions.
struct RopeScheme {
  uint32_t pairing = kRopeAdjacent;  // kRopeAdjacent, kRopeHalves
  uint32_t n_rot = 0;
  std::vector<double> inverse_frequency;  // [n_rot / 2] radians a position; scaling and long factors included
  std::vector<double>
      inverse_frequency_short;    // longrope only: for sessions within original_context; else empty
  uint32_t original_context = 0;  // positions before scaling; longrope: where the short factors end
  double attention_factor = 1.0;  // scales cos and sin (yarn, longrope)
};

// Rows of the rope table that serve positions [0, positions).
uint32_t rope_table_rows(uint32_t positions);
// Fills [rope_table_rows(positions)][n_rot / 2][2] floats, computed in double. `context` chooses longrope's
// factors.
void fill_rope_table(const RopeScheme& rope, uint32_t positions, uint32_t context, float* table);

struct LayerWeights {
  uint32_t window = 0;  // attends to the last so many tokens, its own among them; 0: to all
  bool rotates = true;  // false: its queries and keys have no positions (smollm3)
  // f32 [d_model]: norms of what attention and the feed-forward read (olmo2 has none), and of what they add
  // to the stream (gemma, olmo2).
  Tensor attn_norm, ffn_norm, post_attn_norm, post_ffn_norm;
  Tensor q, k, v;                 // row ranges of one matrix where the file fuses them (phi3)
  Tensor q_bias, k_bias, v_bias;  // f32, qwen2 and some llama files
  Tensor q_norm, k_norm;          // f32, of each head's channels (qwen3) or of all (olmo2)
  Tensor sinks;                   // f32 [heads]: logits that carry no value (gpt-oss)
  Tensor attn_output, attn_output_bias;
  Tensor gate, up, down;                       // of all experts one below the other where there are experts
  Tensor router, router_bias;                  // [experts][d_model], f32 [experts]
  Tensor gate_bias, up_bias, down_bias;        // f32, of experts (gpt-oss)
  Tensor shared_gate, shared_up, shared_down;  // of the expert that every token passes (granite)
};

// What gives each token its retention scores: small trained networks, one a layer, from a sidecar file; or
// one for all layers that works on the host.
struct Retainer {
  enum class Kind { kLocret, kLinear, kMlp, kSink, kAdore };
  enum class Input { kQkv, kX };  // its query, key and value before RoPE, or what W_q reads

  // Those that the kind lacks are empty, and all are in a layer with a window, which keeps its last tokens.
  struct Layer {
    Tensor fc1, fc1_bias;  // locret, mlp: [hidden][input], and f32 of an mlp: [hidden]
    Tensor fc2, fc2_bias;  // what makes scores of that, or of the input: [Hkv][hidden], f32 [Hkv]
    // sink: a query for each head and a key for each KV head, of `rank` channels; the norms' weights; the
    // sinks' keys; and what is added to a query's product with the key.
    Tensor q, q_bias, k;      // [H rank][input], f32 [H rank], [Hkv rank][input]
    Tensor q_norm, k_norm;    // f32 [rank]
    Tensor sinks, sink_bias;  // f32 [Hkv sinks][rank], [H]
  };

  MappedFile file;
  Kind kind = Kind::kLocret;
  Input input = Input::kQkv;
  std::vector<Layer> layers;  // none of kind adore
  Controller controller;      // of kind adore alone
  uint32_t act = kActSilu;
  uint32_t hidden = 0;           // locret, mlp
  uint32_t rank = 0, sinks = 0;  // sink
  // What it was trained for; 0 where the file does not say.
  uint32_t budget = 0, chunk = 0, stabilizers = 0, local = 0;
  std::optional<uint32_t> protect_init;
  // What of the pools each KV head is worth, [layer][kv head], 1 on average; empty: all the same.
  std::vector<float> shares;
  // The retention that it is for, by its name: "locret", or what its check found better than its scores
  // alone.
  std::string retention = "locret";
  std::string warning;  // one sentence, where the base model could only be checked by its shape
  // Of the matrices of one layer: fc1, which may be empty, and fc2; or q and k.
  std::array<MatrixShape, 2> matrices() const;
  std::vector<Tensor> tensors() const;
  mutable Placements placements;
};
// What files call it: "locret", "linear", "mlp", "sink", "adore"; "silu", "gelu", "gelu_erf".
const char* name_of(Retainer::Kind);
const char* name_of_act(uint32_t act);

struct ModelInfo {
  std::string architecture, name, description, license;
  uint32_t context_length = 0;  // trained positions
  uint64_t parameters = 0, file_bytes = 0;
  std::string quantization;  // the type most bytes have
};

class Model {
 public:
  // Reads and checks everything but the weights' values; `name` is how error messages call the file.
  // Unsupported where the file asks for something that this library does not do, Format where it is damaged,
  // each naming the key or tensor.
  static Result<std::shared_ptr<const Model>> open(MappedFile file, std::string name);
  // The same of a model that lies in several files.
  static Result<std::shared_ptr<const Model>> open(std::vector<GgufFile> files);

  ModelInfo info;
  ModelShape shape;
  float norm_epsilon = 1e-5f;
  uint32_t act = kActSilu;
  RouteParams route = {};                // of models with experts
  float embedding_scale = 1;             // of embedding rows
  float residual_scale = 1;              // of what layers add to the stream
  float attention_scale = 1;             // of the products of queries and keys, usually 1 / sqrt(head_dim)
  float attention_cap = 0;               // these become cap * tanh(x / cap); 0: they stay
  float query_growth = 0;                // of queries with each rope.original_context positions; see scale
  float logit_scale = 1, logit_cap = 0;  // of the output
  RopeScheme rope;
  RopeScheme window_rope;  // of layers with a window; without frequencies: as the others
  // output is of token_embedding where they are tied. It has a row for each token that may follow: fewer than
  // shape.vocab where the vocabulary has fewer tokens than the embedding has rows.
  Tensor token_embedding, output_norm, output;
  std::vector<LayerWeights> layers;  // empty for a vocabulary-only file
  Tokenizer tokenizer;
  std::string chat_template;  // as in the file, the one without a name or "default", or empty
  ChatWriter chat;            // how conversations are written, by that template
  std::string description_of_tokenizer_error;  // why `tokenizer` is empty, where it is
  std::vector<std::string> warnings;           // what the file asks for and does not get, a sentence each

  bool has_weights() const { return !layers.empty(); }
  // The names of the file's further chat templates: "tool_use" for example.
  std::vector<std::string_view> chat_template_names() const;
  // The one of this name, else the known format; InvalidArgument, naming all, where there is neither.
  Result<ChatWriter> chat_named(std::string_view name) const;
  const Gguf& gguf() const { return gguf_; }
  std::span<const GgufFile> files() const { return files_; }
  // Their bytes, and how many of these are in memory now.
  std::vector<std::span<const std::byte>> memory() const;
  uint64_t resident_bytes() const;
  // Whether the files still have all that was mapped (MappedFile::check_whole).
  Status check_files() const;
  // Bytes of host memory that tables of this model take (vocabulary, merges, tensor table), estimated by
  // their contents.
  uint64_t host_bytes() const;
  // FNV-1a-64 over architecture, L, H, Hkv, dh and the bytes of all f32 attn_norm and ffn_norm tensors, or
  // where a layer has none of the norms behind attention and feed-forward.
  uint64_t fingerprint() const;

  // What a device needs of the model: all but the embedding where it only looks up rows of it. Those the host
  // can hand over with each step.
  std::vector<Tensor> tensors() const;
  mutable Placements placements;

  // Reads a sidecar and checks that it belongs to this model: Mismatch, saying what differs, where it does
  // not.
  Result<std::shared_ptr<const Retainer>> open_retainer(MappedFile file, std::string name) const;

 private:
  std::vector<GgufFile> files_;
  Gguf gguf_;
};

}  // namespace thimble
