// A model for the decoder: shape, RoPE schemes, and weights by role. It is immutable and shared.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "backends/backend.h"
#include "base/mapped_file.h"
#include "base/system.h"
#include "gguf/gguf.h"
#include "runtime/model/controller.h"
#include "runtime/model/placed_tensors.h"
#include "templates/chat/writer.h"
#include "text/tokenizer.h"

namespace thimble {

// One matrix or vector in the mapped file. If the model has no such tensor, `data` is null.
struct Tensor {
  const std::byte* data = nullptr;
  DType type = DType::kF32;
  uint32_t rows = 0, cols = 0;  // a vector has one row
  float scale = 1;              // factor of all elements, from a tensor of its own
  explicit operator bool() const { return data != nullptr; }
  uint64_t bytes() const { return dtype_bytes(type, uint64_t(rows) * cols); }
  Tensor row_range(uint32_t first, uint32_t count) const;  // rows of a fused matrix
  Tensor part(uint32_t first, uint32_t count) const;       // elements of a vector, which is f32
};

// A matrix in host memory, because the file has its rows in another order.
struct ReorderedMatrix {
  Pages pages;
  uint64_t bytes = 0;
};

// The rotation of keys and queries: the data for a table of backends/backend.h of any number of positions.
struct RopeScheme {
  uint32_t pairing = kRopeAdjacent;  // kRopeAdjacent, kRopeHalves
  uint32_t n_rot = 0;
  std::vector<double> inverse_frequency;  // [n_rot / 2] radians per position, with scaling and long factors
  std::vector<double>
      inverse_frequency_short;    // longrope only, for sessions within original_context; else empty
  uint32_t original_context = 0;  // positions before scaling; longrope: up to which the short factors apply
  double attention_factor = 1.0;  // scales cos and sin (yarn, longrope)
};

// The rows of a RoPE table for positions [0, positions).
uint32_t rope_table_rows(uint32_t positions);
// Fills a table of [rope_table_rows(positions)][n_rot / 2][2] floats, computed in double. `context` decides
// which factors longrope uses.
void fill_rope_table(const RopeScheme& rope, uint32_t positions, uint32_t context, float* table);

// A matrix for each head, in rows of one tensor.
struct HeadMatrices {
  Tensor all;
  uint32_t first = 0, head_rows = 0;  // the first row, and the rows from one head's matrix to the next
  bool transposed = false;            // HeadLinearParams::transposed
};

// A mixer passes information from token to token. This one attends to the keys and values of earlier tokens.
struct AttentionMixer {
  uint32_t heads = 0, kv_heads = 0, head_dim = 0;
  // The index of its first KV head among the KV heads of all layers. Each KV head has a run of entries in the
  // pool, and a row in the table of HeadState, at this index.
  uint32_t first_run = 0;
  // The layer whose keys and values it attends to: its own, or an earlier one (gemma4). `kv_heads` and
  // `first_run` are then those of that layer. The last layer that attends to this one's: usually this one.
  uint32_t owner = 0, last_reader = 0;
  uint32_t window = 0;   // each token attends to so many most recent tokens, itself included; 0: to all
  bool rotates = true;   // false: queries and keys are not rotated (smollm3)
  bool norms_v = false;  // values are normed over the channels of each head, without a weight (gemma4)
  // Whether the output is multiplied by the sigmoid of a gate (qwen3.5). The rows of q are then, for each
  // head, those of its query and those of its gate, and there is a q_norm of each head.
  bool output_gate = false;
  // Row ranges of one matrix if the file fuses them (phi3). Without v, values are the keys before their norm
  // (gemma4). Without k and v, it attends to keys and values of an earlier layer.
  Tensor q, k, v;
  Tensor q_bias, k_bias, v_bias;  // f32, qwen2 and some llama files
  Tensor q_norm, k_norm;          // f32, over the channels of each head (qwen3) or of all heads (olmo2)
  // The norms follow the rotation (hunyuan-dense). A rotation does not change a norm, but their weights do
  // not commute with it. So queries and keys are normed without weights, and the rotated queries are
  // multiplied by both weights.
  bool norms_after_rotation = false;
  Tensor sinks;  // f32 [heads]: logits without a value (gpt-oss)
  Tensor output, output_bias;
  // Latent attention (deepseek2). The only KV head has keys of n_rot rotated channels (k_rotated) and then
  // latent() normed ones (k), which also are the value. Each head has a matrix that takes its query to latent
  // channels, and one that takes what it attended to from there to value_dim channels.
  uint32_t query_dim = 0, value_dim = 0;  // channels of a head's query, and of its value
  Tensor q_in, q_in_norm;                 // if queries come from a narrow vector: [cols of q][d_model], f32
  Tensor k_rotated;                       // [n_rot][d_model]
  HeadMatrices k_up, v_up;                // of query_dim - n_rot inputs; of latent() inputs

  bool has_keys() const { return bool(k); }
  bool is_latent() const { return bool(k_rotated); }
  uint32_t latent() const { return k.rows; }
  bool has_values() const { return has_keys() && !is_latent(); }  // apart from keys
  uint32_t group() const { return heads / kv_heads; }             // query heads of a KV head
  // The columns of a row of queries, of keys or values, and of all that the layer computes.
  uint32_t q_cols() const { return heads * head_dim; }
  uint32_t kv_cols() const { return kv_heads * head_dim; }
  uint32_t qkv_cols() const { return q_cols() + (has_keys() + has_values()) * kv_cols(); }
  // The columns of a row that attention returns, and of its product with v_up.
  uint32_t attended_cols() const { return is_latent() ? heads * latent() : q_cols(); }
  uint32_t value_cols() const { return is_latent() ? heads * value_dim : q_cols(); }

  // What every mixer says: its tensors; the columns of the rows that it computes first, of those in between
  // (here queries with gates, or the queries and values of latent attention), and of those that it returns
  // before its last matrix; the bytes of its state, and the operations on it for one row.
  std::vector<Tensor> tensors() const {
    std::vector<Tensor> all{q,     k,      v,           q_bias, k_bias,    v_bias,    q_norm,  k_norm,
                            sinks, output, output_bias, q_in,   q_in_norm, k_rotated, k_up.all};
    if (v_up.all.data != k_up.all.data) all.push_back(v_up.all);
    return all;
  }
  uint32_t first_cols() const { return qkv_cols(); }
  uint32_t middle_cols() const {
    return is_latent() ? heads * std::max(query_dim, value_dim) : output_gate ? 2 * q_cols() : 0;
  }
  uint32_t last_cols() const { return std::max(attended_cols(), q_in.rows); }
  uint64_t state_bytes() const { return 0; }
  double state_flop() const { return 0; }
};

// A convolution over the last `taps` tokens of each channel, between two gates (lfm2). It keeps the inputs of
// the last taps - 1 tokens as its state.
struct ShortConvMixer {
  Tensor in;    // [3 d_model][d_model]: the input's gate, the output's gate, and the input
  Tensor conv;  // f32 [d_model][taps], oldest token first
  Tensor out;   // [d_model][d_model]

  uint32_t channels() const { return conv.rows; }
  uint32_t taps() const { return conv.cols; }

  std::vector<Tensor> tensors() const { return {in, conv, out}; }
  uint32_t first_cols() const { return in.rows; }
  uint32_t middle_cols() const { return 0; }
  uint32_t last_cols() const { return channels(); }
  uint64_t state_bytes() const { return uint64_t(taps() - 1) * channels() * sizeof(float); }
  double state_flop() const { return 0; }
};

// Linear attention by the gated delta rule (qwen35, qwen3next). A convolution over the last `taps` tokens of
// each channel makes queries, keys and values; each value head has a matrix from keys to values as its
// state; and its output is normed and gated. The state is the convolution's tail, and then the matrices.
struct DeltaNetMixer {
  uint32_t key_heads = 0, value_heads = 0, width = 0;  // channels of a key and of a value
  bool tiled = false;                                  // which key head a value head uses: see delta_net
  Tensor qkv;          // [channels][d_model]: queries, keys, values of all heads
  Tensor z;            // [value_cols][d_model]: the output's gate
  Tensor beta, alpha;  // [value_heads][d_model]
  Tensor conv;         // f32 [channels][taps], oldest token first
  Tensor a, dt;        // f32 [value_heads]
  Tensor norm;         // f32 [width], of each value head's output
  Tensor out;          // [d_model][value_cols]

  uint32_t key_cols() const { return key_heads * width; }
  uint32_t value_cols() const { return value_heads * width; }
  uint32_t channels() const { return 2 * key_cols() + value_cols(); }
  uint32_t taps() const { return conv.cols; }
  // The columns of the rows that it computes first, after the channels of the convolution.
  uint32_t z_column() const { return channels(); }
  uint32_t beta_column() const { return z_column() + value_cols(); }
  uint32_t alpha_column() const { return beta_column() + (value_heads + 63) / 64 * 64; }  // aligned
  uint64_t tail_bytes() const { return uint64_t(taps() - 1) * channels() * sizeof(float); }

  std::vector<Tensor> tensors() const { return {qkv, z, beta, alpha, conv, a, dt, norm, out}; }
  uint32_t first_cols() const { return alpha_column() + value_heads; }
  uint32_t middle_cols() const { return channels(); }
  uint32_t last_cols() const { return value_cols(); }
  uint64_t state_bytes() const { return tail_bytes() + uint64_t(value_cols()) * width * sizeof(float); }
  // The delta rule multiplies a state by a key and by a query, and adds a product to it.
  double state_flop() const { return 6.0 * value_cols() * width; }
};

// Mamba-2: a convolution over tokens, and a state of each head that decays, takes up each token and is read
// by it (`ssm`).
struct SsmMixer {
  uint32_t heads = 0, groups = 0, width = 0, state = 0;  // SsmParams
  // [first_cols][d_model]: the output's gate, the channels of the convolution, and a number of each head
  Tensor in;
  Tensor conv, conv_bias;  // f32 [channels][taps], oldest token first; f32 [channels], or empty
  Tensor dt_bias, a, d;    // f32 [heads]
  Tensor norm;             // f32 [groups][value_cols / groups], or empty: the output has no norm (falcon-h1)
  Tensor out;              // [d_model][value_cols]

  uint32_t value_cols() const { return heads * width; }
  uint32_t key_cols() const { return groups * state; }
  // The channels of the convolution are those of x, B and C, in this order.
  uint32_t channels() const { return value_cols() + 2 * key_cols(); }
  uint32_t taps() const { return conv.cols; }
  // The columns of the rows that it computes first, after the gate.
  uint32_t channels_column() const { return value_cols(); }
  uint32_t dt_column() const { return channels_column() + channels(); }
  // The state begins with that of `ssm`, whose size is a multiple of 1 KiB.
  uint64_t ssm_bytes() const { return uint64_t(value_cols()) * state * sizeof(float); }

  std::vector<Tensor> tensors() const { return {in, conv, conv_bias, dt_bias, a, d, norm, out}; }
  uint32_t first_cols() const { return dt_column() + heads; }
  uint32_t middle_cols() const { return channels(); }
  uint32_t last_cols() const { return value_cols(); }
  uint64_t state_bytes() const { return ssm_bytes() + uint64_t(taps() - 1) * channels() * sizeof(float); }
  double state_flop() const { return 5.0 * value_cols() * state; }
};
using Mixer = std::variant<AttentionMixer, ShortConvMixer, DeltaNetMixer, SsmMixer>;

// The feed-forward of one expert, or of a layer without experts. Empty tensors: there is none.
struct Dense {
  Tensor gate, up, down;                 // [d_ff][d_model] twice, [d_model][d_ff]; gate may be empty
  Tensor gate_bias, up_bias, down_bias;  // f32 (granitehybrid, nemotron_h)
  // The columns that it needs for a row: with biases, the op glu cannot compute the product of gate and up.
  uint64_t hidden_cols() const { return uint64_t(down.cols) * (gate && (gate_bias || up_bias) ? 2 : 1); }
  std::vector<Tensor> tensors() const { return {gate, up, down, gate_bias, up_bias, down_bias}; }
};

struct Experts {
  RouteParams route = {};
  Tensor router, router_bias;  // [experts][d_model], f32 [experts]
  Tensor choice_bias;          // f32 [experts], added for the choice of experts only (lfm2moe)
  // The matrices of all experts, one after the other. If the file fuses gate and up, `gate` contains both: of
  // each expert first the rows of the gate. `up` is then empty.
  Tensor gate, up, down;
  Tensor gate_bias, up_bias, down_bias;     // f32 (gpt-oss)
  Tensor gate_scale, up_scale, down_scale;  // f32 [experts]: factors of their matrices
  // [latent][d_model], [d_model][latent]: the experts' input and output are that narrow (nemotron_h_moe)
  Tensor latent_down, latent_up;
  Dense shared;        // of the expert that processes every token (granite)
  Tensor shared_gate;  // [1][d_model]: the sigmoid of this product is a factor of its output (qwen35moe)
  float scale = 1;     // factor of the sum of all experts (cohere2moe)
  Tensor factor;       // f32 [experts], of the output of each expert (gemma4)
  // f32 [d_model], of gemma4, where the router, the experts and the shared expert have norms of their own.
  // The router and the experts norm the stream itself. Outputs are normed before they are added to each
  // other.
  Tensor router_norm, norm, post_norm, shared_post_norm;

  uint32_t d_ff() const { return down.cols; }                    // of one expert
  uint32_t width() const { return gate ? gate.cols : up.cols; }  // of its input and output
  std::vector<Tensor> tensors() const {
    std::vector<Tensor> all{gate,        up,          down,      router,      router_bias,
                            choice_bias, gate_bias,   up_bias,   down_bias,   gate_scale,
                            up_scale,    down_scale,  latent_up, latent_down, shared_gate,
                            factor,      router_norm, norm,      post_norm,   shared_post_norm};
    const std::vector<Tensor> its = shared.tensors();
    all.insert(all.end(), its.begin(), its.end());
    return all;
  }
};
using FeedForward = std::variant<Dense, Experts>;

// What a layer adds to the stream from the token itself (gemma4). Its width is that of a layer's part of
// Model::layer_embedding. Empty tensors: it adds nothing.
struct TokenBranch {
  Tensor project, project_norm;  // [width][d_model], f32 [width]: of the stream before the first layer
  Tensor gate;                   // [width][d_model]
  Tensor out, out_norm;          // [d_model][width], f32 [d_model]

  uint32_t width() const { return gate.rows; }
  std::vector<Tensor> tensors() const { return {project, project_norm, gate, out, out_norm}; }
};

// A layer describes itself completely. Layers of one model may differ in everything except d_model.
struct Layer {
  // f32 [d_model]. The first two normalize the input of the mixers and of the feed-forward (olmo2 has none).
  // The last two normalize their output before it is added to the stream (gemma, olmo2).
  Tensor norm, ffn_norm, post_norm, post_ffn_norm;
  std::vector<Mixer> mixers;
  FeedForward feed_forward;
  bool parallel = false;  // the feed-forward reads the normed input of the mixers, not their output (cohere2)
  TokenBranch token_branch;
  float scale = 1;  // factor of the stream after the layer (gemma4)

  // Null: the layer has no attention, and its tokens have no entries in the pool.
  const AttentionMixer* attention() const;
  bool has_window() const { return attention() && attention()->window; }
  // The bytes of the layer's recurrent state; 0: it has none.
  uint64_t state_bytes() const;
  // Whether each token attends to all earlier ones.
  bool attends_to_all() const { return attention() && !attention()->window; }
  // Whether it also has their keys itself, so that a retention policy decides which of them stay.
  bool retains() const { return attends_to_all() && attention()->has_keys(); }
  std::vector<Tensor> tensors() const;
};

// A retainer computes the retention scores of tokens. It consists of small trained networks from a sidecar
// file, one for each layer. A controller is one network for all layers, which runs on the host.
struct Retainer {
  enum class Kind { kLocret, kLinear, kMlp, kSink, kAdore };
  enum class Input { kQkv, kX };  // query, key and value before RoPE; or the input of W_q

  // The networks of one layer. Tensors that the kind does not use are empty. All tensors are empty if the
  // layer has no keys of its own, and in a windowed layer, because it keeps its most recent tokens.
  struct Networks {
    Tensor fc1, fc1_bias;  // locret, mlp: [hidden][input]; f32 [hidden], mlp only
    Tensor fc2, fc2_bias;  // scores from that or from the input: [Hkv][hidden], f32 [Hkv]
    // sink: a query for each head and a key for each KV head, with `rank` channels; the weights of their
    // norms; the sinks' keys; and a bias for the product of a query and the key.
    Tensor q, q_bias, k;      // [H rank][input], f32 [H rank], [Hkv rank][input]
    Tensor q_norm, k_norm;    // f32 [rank]
    Tensor sinks, sink_bias;  // f32 [Hkv sinks][rank], [H]
  };

  MappedFile file;
  Kind kind = Kind::kLocret;
  Input input = Input::kQkv;
  std::vector<Networks> layers;  // empty for kAdore
  Controller controller;         // kAdore only
  uint32_t act = kActSilu;
  uint32_t hidden = 0;           // locret, mlp
  uint32_t rank = 0, sinks = 0;  // sink
  // The options that it was trained for. 0: the file does not say.
  uint32_t budget = 0, chunk = 0, stabilizers = 0, local = 0;
  std::optional<uint32_t> protect_init;
  // Each KV head's share of the pool, in the order of runs, 1 on average. Empty: all shares are equal.
  std::vector<float> shares;
  // The name of the retention policy that suits the retainer: "locret", or a policy that was better in the
  // retainer's check than its scores alone.
  std::string retention = "locret";
  std::string warning;  // one sentence, if only the shape of the base model could be checked
  // The shapes of one layer's matrices: fc1 (which may be empty) and fc2, or q and k.
  std::array<MatrixShape, 2> matrices() const;
  std::vector<Tensor> tensors() const;
  mutable Placements placements;
};
// The names in files: "locret", "linear", "mlp", "sink", "adore"; "silu", "gelu", "gelu_erf".
const char* name_of(Retainer::Kind);
const char* name_of_act(uint32_t act);

// How the rows of a draft block begin: a matrix joins the embedding of a token and the last row of the model
// for the token before it.
struct JoinedInput {
  Tensor embedding_norm, row_norm;  // f32 [d_model]
  Tensor join;                      // [d_model][2 d_model]: of the normed embedding, and of the normed row
};

struct ModelInfo {
  std::string architecture, name, description, license;
  uint32_t context_length = 0;  // positions that the model was trained for
  uint64_t parameters = 0, file_bytes = 0;
  std::string quantization;  // the type of most bytes
};

class Model {
 public:
  // Reads and checks a model, except the values of the weights. Error messages call the file `name`.
  // Unsupported: the file needs a feature that the library lacks. Format: the file is damaged. Each error
  // names the key or tensor.
  static Result<std::shared_ptr<const Model>> open(MappedFile file, std::string name);
  // Like the other open(), for a model in several files.
  static Result<std::shared_ptr<const Model>> open(std::vector<GgufFile> files);

  ModelInfo info;
  ModelShape shape;  // the largest sizes of any layer
  float norm_epsilon = 1e-5f;
  bool norms_center = false;  // the norms of layers and output subtract the mean (cohere2)
  uint32_t act = kActSilu;
  float embedding_scale = 1;  // factor of embedding rows
  float residual_scale = 1;   // factor of what layers add to the stream
  float attention_scale = 1;  // factor of query-key products, usually 1 / sqrt(head_dim)
  float attention_cap = 0;    // query-key products become cap * tanh(x / cap); 0: no cap
  float query_growth = 0;     // growth of queries every query_period positions; see the op `scale`
  uint32_t query_period = 0;
  float logit_scale = 1, logit_cap = 0;  // factor and cap of the logits
  RopeScheme rope;
  RopeScheme window_rope;  // of windowed layers; without frequencies: like the others
  const RopeScheme& rope_of(const AttentionMixer& m) const {
    return m.window && !window_rope.inverse_frequency.empty() ? window_rope : rope;
  }
  // With tied embeddings, `output` consists of rows of token_embedding. It has one row for each token that
  // may follow: fewer than shape.vocab if the vocabulary has fewer tokens than the embedding has rows.
  Tensor token_embedding, output_norm, output;
  // For each token, the parts of its row that the layers' token branches read, one after the other. A device
  // gets only the rows of a step's tokens.
  Tensor layer_embedding;
  std::vector<Layer> layers;  // empty for a vocabulary-only file
  // The layer of the file that drafts tokens (multi-token prediction), as a model of its own, which belongs
  // to this one and reads its files. Null: the file has none, or one that cannot be used, with the reason.
  std::unique_ptr<Model> draft_block;
  std::string description_of_draft_block_error;
  // Of a draft block: how its rows begin, and the model that it belongs to.
  std::optional<JoinedInput> joined;
  const Model* target = nullptr;
  std::vector<ReorderedMatrix> reordered;
  // The layer of each run: the KV heads of the first layer, then those of the next one.
  std::vector<uint32_t> layer_of_run;
  Tokenizer tokenizer;
  std::string chat_template;  // the file's template without a name or named "default"; or empty
  ChatWriter chat;            // writes conversations with that template
  std::string description_of_tokenizer_error;  // why `tokenizer` is empty, if it is
  std::vector<std::string> warnings;           // sentences on features of the file that are ignored

  bool has_weights() const { return !layers.empty(); }
  // The names of the file's other chat templates, for example "tool_use".
  std::vector<std::string_view> chat_template_names() const;
  // The chat template with this name, or else the known format with this name. InvalidArgument, with all
  // names: neither exists.
  Result<ChatWriter> chat_named(std::string_view name) const;
  const Gguf& gguf() const { return gguf_; }
  std::span<const GgufFile> files() const { return files_; }
  // The bytes of the files and of the matrices in host memory, which contain all tensors. Those of a draft
  // block are its model's.
  const std::vector<std::span<const std::byte>>& memory() const { return memory_; }
  // The bytes of the files that are in physical memory now.
  uint64_t resident_bytes() const;
  // Whether the files still have all bytes that were mapped (MappedFile::check_whole).
  Status check_files() const;
  // The bytes of host memory of the model's tables (vocabulary, merges, tensor table), estimated from their
  // contents, and of the matrices in host memory.
  uint64_t host_bytes() const;
  // FNV-1a-64 over architecture, L, H, Hkv, dh and the bytes of all f32 attn_norm and ffn_norm tensors. For a
  // layer that has neither, it uses the norms after attention and feed-forward.
  uint64_t fingerprint() const;

  // `shape` with the sizes of this layer.
  ModelShape shape_of(const Layer&) const;
  // The channels of a key in the first layer that retains; 0: there is none.
  uint32_t retained_head_dim() const;
  // Whether any layer has a recurrent state.
  bool has_states() const;
  // The attention mixer that owns a run.
  const AttentionMixer& owner_of_run(size_t run) const { return *layers[layer_of_run[run]].attention(); }

  // The tensors that a device needs. The embedding is left out if the device only looks up its rows, because
  // the host can pass these rows with each step. A draft block leaves out those that its target has.
  std::vector<Tensor> tensors() const;
  mutable Placements placements;

  // Reads a sidecar and checks that it belongs to this model. Mismatch: it does not; the message says what
  // differs.
  Result<std::shared_ptr<const Retainer>> open_retainer(MappedFile file, std::string name) const;

 private:
  std::vector<GgufFile> files_;
  Gguf gguf_;
  std::vector<std::span<const std::byte>> memory_;
};

}  // namespace thimble
