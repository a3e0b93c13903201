// The interface between runtime/ and backends/: memory, the ops of a step, and programs that are recorded
// once and replayed.
//
// runtime/decoder.cpp writes a step as a list of ops. An op is a value, and a backend decides how to launch
// it. StepParams and HeadState (op_params.h) contain everything that changes from step to step, so a Program
// can be replayed unchanged.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <variant>

#include "backends/host.h"
#include "backends/op_params.h"
#include "base/dtype.h"
#include "base/status.h"

namespace thimble {

// ---- memory ----

enum class MemKind : uint8_t {
  kWeights,
  kPool,
  kWorkspace,
  kIo,          // mapped, and visible to the host, on every device
  kHostWeights  // in the host's memory, where a card reads them over the bus; mapped, too
};

struct Buffer {
  virtual ~Buffer() = default;
  uint64_t size = 0;
  void* mapped = nullptr;  // host address, or null if the host cannot access it
};

// A range of a buffer. An empty view (no buffer) means that an op runs without this operand.
struct View {
  Buffer* buffer = nullptr;
  uint64_t offset = 0, bytes = 0;
  explicit operator bool() const { return buffer != nullptr; }
  View slice(uint64_t first, uint64_t count) const { return {buffer, offset + first, count}; }
};
struct In : View {  // the op reads it
  In() = default;
  In(const View& v) : View(v) {}
};
struct Out : View {  // the op writes it, and may read it
  Out() = default;
  Out(const View& v) : View(v) {}
};
// A model's matrix: `rows` rows of `cols` elements of `type`, row after row, all multiplied by `scale`. y = W
// x has one element per row. Only the products of linear and glu read the scale; experts have operands for
// theirs.
struct Weight : In {
  DType type = DType::kF32;
  uint32_t rows = 0, cols = 0;
  float scale = 1;
};

// Keys or values of one layer or chunk: [entries][head_dim] of `type`. For q8_0 and q4_0, the type says how
// many bits a channel has; the order of these bits is that of isa/kv_formats.h in backends/cpu, not that of
// tensors.
struct KvArray {
  View values;
  DType type = DType::kF16;
  explicit operator bool() const { return bool(values); }
};
// Bytes of the channels of one entry and head. Rows of blocks have whole words.
inline uint64_t kv_bytes(DType type, uint32_t head_dim) {
  const uint64_t bytes = dtype_bytes(type, head_dim);
  return dtype_info(type).block == 1 ? bytes : (bytes + 3) / 4 * 4;
}
// Whether rows of this many channels can have the type: they consist of whole blocks.
inline bool kv_fits(DType type, uint32_t head_dim) { return head_dim % dtype_info(type).block == 0; }

// The state of one recurrent mixer in each slot. A step reads slot state_from and writes slot state_to of
// StepParams.
struct StateArray {
  View block0;               // the state in slot 0
  uint64_t slot_stride = 0;  // bytes between slots, a multiple of 4
  uint32_t slots = 0;
  View slot(uint32_t i) const { return {block0.buffer, block0.offset + i * slot_stride, block0.bytes}; }
  // From the state in slot 0 to the end of the state in the last slot; between two states may be others.
  View all() const {
    return {block0.buffer, block0.offset, (slots ? slots - 1 : 0) * slot_stride + block0.bytes};
  }
};

// ---- the shapes from which a device computes its needs ----

struct MatrixShape {
  uint32_t rows = 0, cols = 0;
  bool operator==(const MatrixShape&) const = default;
};
struct ModelShape {
  uint32_t layers = 0, d_model = 0, heads = 0, kv_heads = 0, head_dim = 0, d_ff = 0, vocab = 0;
  uint32_t experts = 0, chosen_experts = 0;  // experts of a layer, and per token; d_ff is then per expert
  uint32_t d_ff_shared = 0;                  // of the shared expert, which every token passes; 0: none
  uint32_t delta_keys = 0, delta_values = 0, delta_width = 0;  // heads of delta_net, and their width; 0: none
  uint32_t ssm_heads = 0;                                      // of ssm; 0: none
  uint32_t mixer_in = 0, mixer_out = 0;  // of recurrent mixers: rows of the first matrix, columns of the last
  std::array<MatrixShape, 2> retainer = {};  // its matrices in a layer; 0 x 0 without a retainer
  bool operator==(const ModelShape&) const = default;
};
struct SessionShape {
  uint32_t chunk = 0;          // rows of the largest program
  uint32_t run_capacity = 0;   // entries in the longest head's run
  uint32_t layer_entries = 0;  // entries of all heads' runs in the largest layer
  uint32_t reach = 0;          // entries that a step can see: the longest run plus the chunk
  uint32_t view_capacity = 0;  // entries in the view
  uint32_t positions = 0;      // bound on positions in a layer vote; 0: no selection
  uint32_t heads = 0;          // rows of the table of HeadState
  bool labels = false;         // whether its programs contain the op label
  uint32_t stored_pages = 0;   // of each head, that the op attend_all reads; 0: they do not contain it
  bool recalls = false;        // whether they contain the op kv_recall
  uint32_t voted_pages = 0;    // of each head, that the op page_vote reads
  uint32_t voters = 0;         // the latest tokens whose queries vote for them
};
struct Needs {
  uint64_t fixed =
      0;  // context, pipelines, library workspace: measured at device creation, once for all sessions
  uint64_t programs = 0;  // device memory that the recorded programs of one session take
  // Scratch memory of the backend, allocated by the runtime and passed to open_stream.
  uint64_t workspace = 0;
};
struct DeviceInfo {
  std::string name;         // "cpu", "cuda:0"
  std::string description;  // for people: processor or card, driver, or why it cannot be used
  bool usable = true;
  bool software = false;  // a driver that computes on the CPU; "auto" skips it
  uint64_t total_bytes = 0, free_bytes = 0;
  uint64_t max_binding = 0;              // largest range of one operand
  uint64_t max_allocation = UINT64_MAX;  // largest buffer
  uint32_t alignment = 64;               // of every view's offset, in bytes
  uint64_t granularity = 1;              // allocations are rounded up to a multiple of it
  bool unified =
      true;  // host and device share memory: every buffer is mapped, and files are imported without a copy
  bool pages_files = false;         // the system may drop pages of imported files and read them again
  uint32_t view_element_bytes = 2;  // kv_view's scratch: 2 (f16) or 4 (f32)
  bool stages_weights = false;      // copies weights from the host's memory next to other ops (stage)
  bool lifts_views = false;         // has the op lift_view, and attention to its view
  bool votes_pages = false;         // has the op page_vote
  uint32_t pool_rows = 1;           // rows of a step that attends to the pool itself (kFromPool)
};

// Measured speeds of a device.
struct Rates {
  double bytes_per_second = 0;  // of device memory, in a large copy; counts bytes read and bytes written
  double flop_per_second = 0;   // of its matrix units, at the precision of the matrix products in prefill
};

// The largest number of rows that get logits in one step.
inline constexpr uint32_t kMostLogitRows = 16;

// ---- the ops ----
// Shapes are row-major, innermost last. `rows` is StepParams::n_rows unless the parameters say n_logit_rows.
// Elements are f32 unless said otherwise. Hkv and H are the numbers of KV and query heads, dh is head_dim. KV
// head j serves query heads [j*group, (j+1)*group).
// [run] marks a layer's array. In it, each KV head has a run of entries at the place that its HeadState
// gives; n_entries is per head.
// A list is [Hkv][list_capacity] uints: the count, then that many entries of the head, ascending. An entry >=
// n_entries is a chunk row. An op with an empty `list` works on all n_entries + n_rows entries (kFromPool:
// the rows are already appended).
//
// The rope table is [64 + blocks][n_rot / 2] pairs (cos, sin), times the model's attention factor. Row i < 64
// is position i; row 64 + a is position 64 * a. The rotation of position p is the complex product of rows 64
// + p / 64 and p % 64: R(64a + i) = R(64a) R(i).
// Weights of queries may follow the table (RopeParams::query_weight). They do not commute with rotations.

// x[r] = scale * columns of table[tokens[r]], or of table[r] without tokens
struct Embed {
  In tokens;     // int32 [rows], or empty
  Weight table;  // [vocab][columns]
  Out x;         // [rows][cols]
  EmbedParams p;
};
// y = x / sqrt(mean(x^2) + eps) * weight, or y += that, for each vector of `cols`; y may be x. With `center`,
// x minus its mean takes the place of x. In x, other numbers may be between the vectors.
struct RmsNorm {
  In x, weight;  // weight: f32 [cols], or empty: 1
  Out y;
  RmsNormParams p;
};
// y = W x + bias, or y += W x + bias
struct Linear {
  In x;      // [rows][x_stride]
  Weight w;  // [out_cols][in_cols]
  In bias;   // f32 [out_cols], or empty
  Out y;     // [rows][y_stride]
  LinearParams p;
  // x is not rounded, even where a product of many rows is computed in f16. For few columns.
  bool exact = false;
};
// h = act(Wg x) * (Wu x)
struct Glu {
  In x;             // [rows][in_cols]
  Weight gate, up;  // [out_cols][in_cols]
  Out h;            // [rows][out_cols]
  GluParams p;
};
// y = cap(s x), or y += that; y may be x. s is `scale`. If `growth` is not 0, s is scale * (1 + growth log(1
// + floor(position / period))), where position is the row's position in the text.
struct Scale {
  In x;   // [rows][row_stride]
  Out y;  // [rows][row_stride]
  ScaleParams p;
  In positions = {};  // as in kv_append; empty: rows have consecutive positions
};
// Mixture of experts. A row's token goes to the `chosen` experts with the best router logits; ties go to the
// lower expert. With a bias or groups, the weights decide, before they are divided by their sum, plus the
// bias. Only experts of the best groups are then chosen. The value of a group is the sum of its two best
// experts' values; ties go to the lower group. A slot is one pair of a row and an expert that serves it.
// Slots are ordered by expert and then by row, so the slots of an expert are contiguous.
struct Route {
  In logits;   // [rows][experts], may contain values that are not finite; NaN counts as -inf
  In bias;     // f32 [experts], added only for the choice; or empty
  Out first;   // uint [experts + 1]: the first slot of each expert
  Out row;     // uint [rows * chosen]: the row of each slot
  Out weight;  // f32 [rows * chosen]: the weight of the slot's output
  RouteParams p;
  In each = {};  // f32 [experts]: factors of the weights, applied last; or empty
};
// h[slot] = act(sg Wg x + bg) * (su Wu x + bu), or without a gate act(su Wu x + bu), where x is the slot's
// row and s, W and b belong to its expert
struct ExpertGlu {
  In x;  // [rows][in_cols]
  // [experts][out_cols][in_cols], with rows_between other rows between two experts; gate: or empty
  Weight gate, up;
  In gate_bias, up_bias;  // f32 [experts][out_cols], or empty
  In first, row;          // outputs of route
  Out h;                  // [rows * chosen][out_cols]
  ExpertGluParams p;
  In gate_scale = {}, up_scale = {};  // f32 [experts]; or empty, for 1
};
// y[row] += weight (scale W h[slot] + bias), over the row's slots in order; scale, W and bias belong to the
// slot's expert
struct ExpertLinear {
  In h;                   // [rows * chosen][in_cols]
  Weight w;               // [experts * out_cols][in_cols]
  In bias;                // f32 [experts][out_cols], or empty
  In first, row, weight;  // outputs of route
  Out y;                  // [rows][out_cols]
  ExpertLinearParams p;
  In scale = {};  // f32 [experts]; or empty, for 1
};
// x = act(x) * times
struct Activation {
  Out x;  // [rows][cols]
  ActivationParams p;
  In times = {};  // [rows][cols], or empty: 1
};
// A causal convolution of each channel, over the step's rows and the rows before them:
//   u_t = x_t * times_t
//   y_t = gate_t * act(bias + sum over j < taps of w[j] * u_(t - taps + 1 + j)),
// where x, times and gate are columns of x. w[0] meets the oldest row. The state is the tail: the last taps -
// 1 rows of u, oldest first. From kNoState they are zeros. The tail after the step consists of rows of the
// tail before it if the step has fewer rows.
struct ShortConv {
  In x;             // [rows][x_stride]
  In w;             // f32 [channels][taps]
  In bias;          // f32 [channels], or empty
  StateArray tail;  // f32 [taps - 1][channels]
  Out y;            // [rows][y_stride]; not x
  ShortConvParams p;
};
// The gated delta rule. For each value head, with q, k and v of the row, q and k divided by sqrt(sum of
// squares + eps), beta' = sigmoid(beta), and gamma = a softplus(alpha + dt) (softplus(x) is x above 20):
//   M = e^gamma M;  delta = beta' (v - M^T k);  M = M + k delta^T;  y = M^T q / sqrt(width)
// A step without rows copies the state. A key of zeros leaves M only decayed. NaN stays in its head.
struct DeltaNet {
  In qkv;        // [rows][qkv_stride]; q and k: [key_heads][width], v: [value_heads][width]
  In gates;      // [rows][gates_stride]; alpha and beta: [value_heads]
  In a, dt;      // f32 [value_heads]
  StateArray m;  // f32 [value_heads][width of keys][width of values]; from kNoState: zeros
  Out y;         // [rows][y_stride]; [value_heads][width]
  DeltaNetParams p;
};
// Mamba-2. For each head, with x of the row, B and C of the head's group, which is head * groups / heads, and
// delta = softplus(dt + dt_bias) (softplus(x) is x above 20):
//   S = e^(delta a) S + B (delta x)^T;  y = S^T C + d x
// A step without rows copies the state. NaN stays in the heads of its group, and in its row and later ones.
struct Ssm {
  In xbc;            // [rows][xbc_stride]; x: [heads][width], B and C: [groups][state]
  In dt;             // [rows][dt_stride]; [heads]
  In dt_bias, a, d;  // f32 [heads]
  StateArray s;      // f32 [heads][state][width]; from kNoState: zeros
  Out y;             // [rows][y_stride]; [heads][width]
  SsmParams p;
};
// y = norm(x) act(z), norm(x act(z)), or x act(z), for each vector of `cols`, where norm is that of rms_norm;
// y may be x.
struct GatedNorm {
  In x, z;    // [rows][row_stride], [rows][z_stride]
  In weight;  // f32 [cols] or [groups][cols]; empty: ones
  Out y;      // [rows][row_stride]
  GatedNormParams p;
};
// x = x * sigmoid(g)
struct Gate {
  In g;   // [rows][g_stride]
  Out x;  // [rows][x_stride]
  GateParams p;
};
// A matrix product in each head: of x's head
//   [in_cols inputs | `copied` channels],
// y's head becomes
//   [the `copied` channels | out_cols outputs].
// x and y do not overlap. Of w, only the scale and the rows of the heads' matrices are read.
struct HeadLinear {
  In x;      // [rows][x_stride]; [heads][x_head_stride]
  Weight w;  // for each head [out_cols][in_cols], or transposed [in_cols][out_cols]
  Out y;     // [rows][y_stride]; [heads][y_head_stride]
  HeadLinearParams p;
};
// Appends k and v rows, and their positions. If the format is f16 or has blocks, values beyond f16's range
// become its largest number. A NaN in a block makes all channels of the block NaN.
struct KvAppend {
  In qkv;  // [rows][row_stride]
  In rope;
  // [run][dh], or in the chunk: [Hkv][chunk_capacity][dh]. In this op and in those that gather, compact and
  // merge entries, all v are empty if values are channels of the keys.
  KvArray k, v;
  Out pos;        // int32, in the same layout without dh
  Out saturated;  // one uint; the op adds the number of values beyond f16's range
  KvAppendParams p;
  In positions = {};  // int32 [rows], if positions are not consecutive (kRopeList); or empty
};
// The scores of a sink retainer from its queries and keys. For query i of a KV head
//   weight_i = exp(q_i k + bias_i) / (exp(q_i k + bias_i) + sum over sinks s of exp(q_i s)),
// where q and k are normed and all products scaled. The score is the mean of the weights.
struct SinkScore {
  In q;               // [rows][Hkv][group][width]
  In k;               // [rows][Hkv][width]
  In q_norm, k_norm;  // f32 [width]: weights of the norms
  In sinks;           // f32 [Hkv][sinks][width], not normed
  In bias;            // f32 [Hkv][group]
  Out score;          // [rows][Hkv]
  SinkScoreParams p;
};
// Stores the retention scores of the step's rows.
struct CisStore {
  In score;  // [rows][Hkv], kCisHead only
  Out cis;   // [run], or in the chunk: [Hkv][chunk_capacity]
  CisStoreParams p;
};
// Stores the retention scores of all entries, which come from the host and are the same in every head.
struct GivenScore {
  In score;       // [n_entries + n_rows]: scores of the entries, then of the rows
  Out cis;        // [run]; scores of the rows go after the entries, or
  Out chunk_cis;  // into the chunk: [Hkv][chunk_capacity]
  GivenScoreParams p;
};
// Gathers the keys and values that prefill attention reads. Under kRopeList it also rotates them by list
// index.
struct KvView {
  KvArray pool_k, pool_v;    // [run][dh]
  KvArray chunk_k, chunk_v;  // [Hkv][chunk_capacity][dh]
  In list, rope;
  Out k, v;  // [Hkv][view_capacity][dh], DeviceInfo::view_element_bytes per element
  KvViewParams p;
};
// y = softmax(cap(q k^T * scale), causal over the last rows) v, with GQA. Without v, the value of an entry
// consists of the channels of its key that do not rotate.
struct Attention {
  In q;  // [rows][row_stride], unrotated; row i of n has list index count - n + i (its own entry)
  // The view, [Hkv][view_capacity][dh] of DeviceInfo::view_element_bytes, or one layer's pool, [run][dh].
  KvArray k, v;
  In list, rope;
  In sinks;  // f32 [H]: logits that add to the softmax's sum but have no value; or empty
  Out y;     // [rows][y_stride]; [H][value_cols()]
  Out ml;    // f32 [rows][H][2]: running maximum and sum between passes
  AttentionParams p;
  // uint [rows], ascending: the list index of each row's own entry, if the rows are not the last entries of
  // the list. Only for the view under kRopeList, without a window. Or empty.
  In row_index = {};
  // A view that lift_view made: all heads attend to the entries of head 0. The channels of a value, the first
  // ones of its row; 0: it is another view. And the first channel of a query that rotates.
  struct Lifted {
    uint32_t value_dim = 0, rope_first = 0;
  } lifted = {};
  // The channels of a value.
  uint32_t value_cols() const {
    return lifted.value_dim ? lifted.value_dim : p.head_dim - (v ? 0 : p.rope.n_rot);
  }
};
// Makes keys and values of every head from a view whose rows are rotated channels, and latent ones. A key is
// the product of the latent channels and the head's matrix, and then the rotated channels. The rows of a
// value are as wide as those of a key; channels after value_cols are not written.
struct LiftView {
  In view;  // [view_capacity][rotated + latent]
  In list;
  Weight k_up,
      v_up;  // for each head [key_cols][latent], or transposed [latent][key_cols]; [value_cols][latent]
  Out k, v;  // [heads][view_capacity][rotated + key_cols]
  LiftViewParams p;
};
// Attention, as above, to the entries of a head's run, the step's rows, and the entries of the head's pages
// in a store, which stay where they are. Entries have the order of their positions in the text; under
// kRopeList, that of an entry is its index in this order. The step's rows come last, and no position occurs
// twice. The store may be host memory that the device reads.
struct AttendAll {
  In q;          // as for attention
  KvArray k, v;  // [run][dh]
  In pos;        // [run]
  // [Hkv][chunk_capacity][dh]: the step's rows. Empty: they are one row, after the run's entries.
  KvArray chunk_k, chunk_v;
  // Four words for each page: its number, which is its first position / kStoredPage; in the low 16 bits of
  // the second word, which of its positions have an entry; and two words that the op does not read.
  In pages;  // [Hkv at stored_stride][page_capacity]
  In order;  // uint [Hkv at stored_stride][page_capacity]: indices of pages, by ascending number
  // A page's rows: the keys of kStoredPage positions, then their values. `stored_v` begins where the values
  // of the first page do. Both may have other formats than the run. [Hkv at rows_stride][page_capacity]
  KvArray stored_k, stored_v;
  In count;  // uint [Hkv]: how many of the pages in `order` the step reads
  In rope;
  In sinks;  // as for attention
  Out y;     // [rows][y_stride]; [H][dh]
  AttendAllParams p;
};
// Overwrites the pool, in place and in order, with the listed entries of pool and chunk.
struct KvCompact {
  In list;                   // empty: all entries; the chunk's rows are then appended to the pool's entries
  KvArray chunk_k, chunk_v;  // empty without a chunk: the step's rows then follow the pool's entries
  In chunk_pos, chunk_cis;   // chunk_cis is empty without retention
  KvArray k, v;              // [run][dh]
  Out pos, cis;              // [run]
  KvCompactParams p;
};
// Copies the entries of pool and chunk that a list lacks, in order, before kv_compact overwrites them. The
// copies may have another format than pool and chunk.
struct KvSpill {
  In list;
  KvArray pool_k, pool_v, chunk_k, chunk_v;  // as for kv_compact
  In pool_pos, pool_cis, chunk_pos, chunk_cis;
  KvArray k, v;  // [Hkv][spill_capacity][dh]
  Out keys;      // f32 [Hkv][spill_capacity][dh]: the keys once more
  Out pos, cis;  // int32, f32 [Hkv][spill_capacity]
  Out count;     // uint [1 + Hkv]: 1 + head_state, and the number of copies of each head
  KvSpillParams p;
};
// Rewrites runs: of the entries, the listed ones stay, and rows come between them in the order of positions.
// Both are ascending, and no row has the position of a listed entry. The rows' retention scores become -inf.
// n_entries of HeadState is the number of both.
struct KvRecall {
  In list;
  KvArray row_k, row_v;  // [Hkv][row_capacity][dh]; may have another format than the pool
  In row_pos;            // int32 [Hkv][row_capacity]
  In count;              // uint [Hkv]: rows of each head
  KvArray k, v;          // [run][dh]
  Out pos, cis;          // [run]
  KvRecallParams p;
};
// kept[(position + row) % ring] = q[row], for the last `ring` rows of the step
struct QueryKeep {
  In q;      // [rows][row_stride]
  Out kept;  // [ring][cols]
  QueryKeepParams p;
};
// The votes of the latest queries for pages of a store, which may be host memory that the device reads. A
// query head votes for a page with the largest share that any of its queries would pay to the page, of all
// attention to pages. Under kRopeList, the keys of a page rotate to where its middle would be among the
// listed entries, and the query of age i to that of the i-th last of the listed entries and those ahead.
struct PageVote {
  In queries;  // [ring][cols], as query_keep stores them
  In asked;  // uint [3]: how many of them vote, the position of the latest, and how many are of tokens ahead
             // of the run's entries
  In list, pos;     // of the run's own entries: as in kv_recall, and [run]
  In pages, order;  // as in attend_all
  KvArray stored_k;
  In count;
  In rope;
  Out votes;  // [Hkv][page_capacity], in the order of `order`
  PageVoteParams p;
};
// The state of the selection cache, per layer. The runtime clears it, and only reads `hits` and `misses`.
struct GateState {
  uint32_t hit;         // whether this step uses the cached selection
  uint32_t valid;       // whether a selection is cached
  uint32_t generation;  // StepParams::generation when the selection was made
  int32_t position;     // StepParams::position when the selection was made
  uint32_t hits, misses;
  uint32_t selecting;  // number of KV heads that were selected from when the selection was made
  uint32_t reserved;
};
// hit = the cache is valid, has the same generation and the same number of KV heads to select from, is at
// most n_local / 2 tokens old, and cos(q, cached) >= theta (methods 3.6). If no head is selected from, the
// cache becomes invalid, and neither a hit nor a miss is counted.
struct QueryGate {
  In q;        // [1][cols], unrotated, because rotation by a common position does not change the cosine
  Out cached;  // [cols]; replaced on a miss
  Out gate;    // GateState
  QueryGateParams p;
};
// s_h(i) = mean over rows of q rotated at n_local + row, dot k_i unrotated, for the entries i of the middle
// (methods 3.1, 3.5)
struct TokenScore {
  In q;       // [rows][row_stride]
  KvArray k;  // [run][dh]
  In rope, gate;
  Out scores;  // [H][score_capacity], index = pool entry; only the middle is written
  Out lse;     // [H]: log-sum-exp of the scores of each head
  TokenScoreParams p;
};
// Log of the sum over heads of exp(s - lse), per KV head (group) or per position (layer). All others get
// -inf.
struct Vote {
  In scores, lse;
  In pos;  // int32 [run]; kVoteLayer only
  In gate;
  Out votes;  // group: [Hkv][vote_capacity] by entry or page; layer: [vote_capacity] by position
  VoteParams p;
};
// Quest (methods 4): the smallest and largest value of each channel among the keys of a page.
struct PageBounds {
  KvArray k;   // [run][dh]
  Out bounds;  // f16 [pages][2][dh]: smallest, largest; rounded if keys have blocks
  PageBoundsParams p;
};
// s_h(page) = scale * sum over channels of max(q * smallest, q * largest), for the pages of the middle
struct PageScore {
  In q;  // [rows][row_stride], one row; rotated to its position under kRopeOriginal, else unrotated
  In bounds, rope;
  Out scores;  // [H][score_capacity], index = page; only the middle is written
  Out lse;     // [H]: log-sum-exp of the scores of each head
  PageScoreParams p;
};
// Sorts a run by position. A compaction has left the kept rows of the step, at most kMostMergedRows, after
// the entries. Both parts are ascending.
struct KvMerge {
  KvArray k, v;  // [run][dh]
  Out pos, cis;  // [run]
  KvMergeParams p;
};
// Makes ascending lists from scores. NaN counts as -inf, and -0 as 0. Ties go to the larger entry, page or
// position.
struct TopK {
  In scores;        // the layout depends on p.by_position, p.in_runs and p.page
  In chunk_scores;  // scores of the chunk's rows: [Hkv][chunk_capacity]; or empty
  In pos;           // int32 [run], only with by_position
  In gate;          // on a hit, only the last n_local of the list are rewritten
  Out list;
  TopKParams p;
};
// Labels for training retainers: how much the marked rows attend to the entries that a KV head held before
// the step. For entry t, over the query heads h of its KV head and the marked rows p,
//   max_logit[t] = max(max_logit[t], least, cap(q_hp k_t * scale))
//   log_prob[t] = max(log_prob[t], least, cap(q_hp k_t * scale) - lse_hp + worth_ht),
// where lse_hp is the log-sum-exp of the logits of the entries in range, plus log |x_p| if there is x.
// Entries [0, sinks), [first, end), and from `own` up to the row's own entry are in range. Only entries
// [first, end) are labelled.
struct Label {
  In q;                // [rows][row_stride], unrotated
  In marked;           // uint [rows]: whether the row counts
  KvArray k, chunk_k;  // [run][dh]; in the chunk: [Hkv][chunk_capacity][dh]
  In rope;
  In range;                 // uint [4]: sinks, first, end, own, ascending
  In x;                     // [rows][x_cols], or empty
  In worth;                 // [H][label_capacity], by entry; empty means 0
  In sinks;                 // as in attention: logits that add to a row's sum
  Out lse;                  // [rows][H]; only values of marked rows are written
  Out max_logit, log_prob;  // [Hkv][label_capacity], by entry
  LabelParams p;
};
// Scores all entries, including the step's rows: minus the cosine of an entry's key and the mean of all keys,
// each divided by its length. A key of length 0 does not count in the mean. Its score is -1, which is also
// the score that the mean would get. If the mean has length 0, all scores are -1. A key that contains NaN
// does not count in the mean either, and its score is NaN.
struct KeyDiff {
  KvArray k, chunk_k;  // [run][dh]; in the chunk: [Hkv][chunk_capacity][dh], empty without a chunk
  Out sums;            // [Hkv][blocks][dh]: scratch
  Out cis, chunk_cis;  // [run], [Hkv][chunk_capacity]
  KeyDiffParams p;
};
// Adds two scores of different scales: mixed = z(scores) + z(mixed), where z(x) = (x - mean) / sd.
// Mean and standard deviation are those of the entries of a head that an eviction chooses from
// (kept_regions). Values that are not finite count in neither. If the deviation is 0, z is 0 for finite
// values. The op changes no other entries, and none of a head that keeps everything.
struct ScoreMix {
  In scores, chunk_scores;  // [run]; in the chunk: [Hkv][chunk_capacity], empty without a chunk
  Out mixed, chunk_mixed;   // the same
  ScoreMixParams p;
};
// Scores entries by the attention weights that queries give them: softmax(cap(q k^T * scale)) over the
// entries that a query sees, without values.
// kQueryLast uses the query of the last entry. It sees everything, and scores each entry by the mean of its
// weights in all query heads. All heads must hold equally many entries, and get the same scores. The last
// entry itself gets infinity.
// kQueryRows uses the queries of the step's rows. A row sees the first `sinks` entries, the n_rows entries
// before the step's, and the step's rows up to itself. Each of those n_rows entries gets the largest
// logarithm of a weight that a row gives it in a query head of its KV head.
// kQueryHeads uses the query of the last entry. It sees what it attended to as a row of attention: the last
// entries of a window, or of a list. In each KV head, each entry that it sees gets the sum of its weights in
// the query heads, stored at its index in the list if there is one.
// A weight whose logarithm is -inf or NaN counts for nothing. The largest of no weights is -inf.
struct QueryScore {
  In q;                // [queries][row_stride], unrotated
  KvArray k, chunk_k;  // [run][dh]; in the chunk: [Hkv][chunk_capacity][dh], empty without a chunk
  In list, rope;       // list: only for kQueryHeads, of entries in the pool
  In sinks;            // as in attention: logits that add to a row's sum
  Out sums;            // [Hkv][rows * group][kQueryScoreSums]: scratch
  Out cis, chunk_cis;  // [run]; [Hkv][chunk_capacity], for kQueryLast with a chunk
  QueryScoreParams p;
};
// Adds up the weights that heads give to a range of text positions: sums[i] = or += the weights of the
// entries at position StepParams::position + i. It adds head by head in ascending order, which defines the
// bits. The n-th weight of a run belongs to its n-th entry, or with a list to the n-th entry of the list, as
// query_score writes them. No position occurs twice in a head.
struct ScatterAdd {
  In pos;      // int32 [run], ascending
  In weights;  // f32 [run], or empty: each weight is 1
  In list;     // of entries in the pool
  Out sums;    // f32 [slots]
  ScatterAddParams p;
};
// Ties go to the lower id.
struct ArgMax {
  In x;       // [n_logit_rows][cols]
  Out index;  // int32 [n_logit_rows]; -1 if any x of the row is NaN or infinite
  ArgMaxParams p;
};
// y = log softmax(x)[target]
struct LogProb {
  In x;       // [n_logit_rows][cols]
  In target;  // int32 [n_logit_rows]
  Out y;      // [n_logit_rows]
  LogProbParams p;
};
struct Copy {
  In src;
  Out dst;
  CopyParams p;
};
// to = from, as many bytes. The copy ends with its segment, and may run at any time after the ops before it:
// no later op of the segment reads or writes `to`.
struct Stage {
  In from;
  Out to;
};

// Selecting ops work in units of `page` entries. A head has n = ceil((n_entries + n_rows) / page) units. The
// ops work only if n > n_init + select_k + n_local, on the middle [n_init, n - n_local). Otherwise top_k
// lists everything, and token_score, page_score and vote do nothing.

// The table of ops. A row contains an op's struct, its name in files, tests, messages and functions, and the
// backends that implement it. Op, op_name(), and each backend's declarations and dispatch are generated from
// this table. A backend that a row does not name reports the op as unsupported.
inline constexpr uint32_t kOnCpu = 1, kOnCuda = 2, kOnVulkan = 4, kOnAll = kOnCpu | kOnCuda | kOnVulkan;

#define THIMBLE_OPS(OP)                     \
  OP(Embed, embed, kOnAll)                  \
  OP(RmsNorm, rms_norm, kOnAll)             \
  OP(Linear, linear, kOnAll)                \
  OP(Glu, glu, kOnAll)                      \
  OP(Scale, scale, kOnAll)                  \
  OP(Route, route, kOnAll)                  \
  OP(ExpertGlu, expert_glu, kOnAll)         \
  OP(ExpertLinear, expert_linear, kOnAll)   \
  OP(Activation, activation, kOnAll)        \
  OP(ShortConv, short_conv, kOnAll)         \
  OP(DeltaNet, delta_net, kOnAll)           \
  OP(Ssm, ssm, kOnAll)                      \
  OP(GatedNorm, gated_norm, kOnAll)         \
  OP(Gate, gate, kOnAll)                    \
  OP(HeadLinear, head_linear, kOnAll)       \
  OP(KvAppend, kv_append, kOnAll)           \
  OP(SinkScore, sink_score, kOnAll)         \
  OP(CisStore, cis_store, kOnAll)           \
  OP(GivenScore, given_score, kOnAll)       \
  OP(KvView, kv_view, kOnAll)               \
  OP(Attention, attention, kOnAll)          \
  OP(LiftView, lift_view, kOnCpu | kOnCuda) \
  OP(AttendAll, attend_all, kOnAll)         \
  OP(KvCompact, kv_compact, kOnAll)         \
  OP(KvMerge, kv_merge, kOnAll)             \
  OP(KvSpill, kv_spill, kOnAll)             \
  OP(KvRecall, kv_recall, kOnAll)           \
  OP(QueryKeep, query_keep, kOnAll)         \
  OP(PageVote, page_vote, kOnCuda)          \
  OP(QueryGate, query_gate, kOnAll)         \
  OP(TokenScore, token_score, kOnAll)       \
  OP(PageBounds, page_bounds, kOnAll)       \
  OP(PageScore, page_score, kOnAll)         \
  OP(Vote, vote, kOnAll)                    \
  OP(TopK, top_k, kOnAll)                   \
  OP(Label, label, kOnAll)                  \
  OP(KeyDiff, key_diff, kOnAll)             \
  OP(ScoreMix, score_mix, kOnAll)           \
  OP(QueryScore, query_score, kOnAll)       \
  OP(ScatterAdd, scatter_add, kOnAll)       \
  OP(ArgMax, arg_max, kOnAll)               \
  OP(LogProb, log_prob, kOnAll)             \
  OP(Copy, copy, kOnAll)                    \
  OP(Stage, stage, kOnCpu | kOnCuda)

// Each row expands to a comma and its type, so one dummy type precedes the first comma.
template <typename, typename... Types>
using VariantOf = std::variant<Types...>;
#define THIMBLE_OP_TYPE(Type, name, backends) , Type
using Op = VariantOf<void THIMBLE_OPS(THIMBLE_OP_TYPE)>;
#undef THIMBLE_OP_TYPE

// The name of an op in files, tests and messages: "token_score".
inline const char* op_name(const Op& op) {
#define THIMBLE_OP_NAME(Type, name, backends) #name,
  static constexpr const char* kNames[] = {THIMBLE_OPS(THIMBLE_OP_NAME)};
#undef THIMBLE_OP_NAME
  return kNames[op.index()];
}

// Whether a backend (kOnCpu, kOnCuda or kOnVulkan) implements this op.
inline bool has_op(const Op& op, uint32_t backend) {
#define THIMBLE_OP_BACKENDS(Type, name, backends) backends,
  static constexpr uint32_t kBackends[] = {THIMBLE_OPS(THIMBLE_OP_BACKENDS)};
#undef THIMBLE_OP_BACKENDS
  return (kBackends[op.index()] & backend) != 0;
}

// Whether the op multiplies queries by weights (RopeParams::query_weight).
inline bool weighs_queries(const Op& op) {
  return std::visit(
      [](const auto& o) {
        if constexpr (requires { o.q, o.p.rope; })
          return o.p.rope.query_weight != 0;
        else
          return false;
      },
      op);
}

// Ops run in the order in which they are recorded. The first error is kept until finish() returns it.
struct Recorder {
  virtual ~Recorder() = default;
  virtual void segment() = 0;  // later ops belong to the next segment
  virtual void record(const Op&) = 0;
};

// A CUDA graph, command buffers or closures.
struct Program {
  virtual ~Program() = default;
  uint32_t segments = 0;
  // The number of parts of a segment, each run by one submit_part(). Long segments have several, so that they
  // can be interrupted.
  virtual uint32_t parts(uint32_t /*segment*/) const { return 1; }
  // Bytes of device memory that recording took: what the recorder allocated, plus the growth of memory in use
  // that the driver reports. Vulkan's driver does not report it per program; Needs contains it instead.
  uint64_t bytes = 0;
};

// ---- device and stream ----

// One session's queue on a device. Only one thread at a time may use it.
struct Stream {
  virtual ~Stream() = default;
  uint64_t bytes = 0;  // of device memory that opening the stream took, counted like Program::bytes
  // Starts recording a program for at most max_rows rows.
  virtual std::unique_ptr<Recorder> record(uint32_t max_rows) = 0;
  virtual Result<std::unique_ptr<Program>> finish(std::unique_ptr<Recorder>) = 0;
  // Runs segments [first, last) with these values. This is the whole hot path. It may return before the work
  // is done. `heads` has as many rows as the stream was opened for.
  virtual Status submit(Program&, uint32_t first, uint32_t last, const StepParams&,
                        std::span<const HeadState> heads) = 0;
  // Runs one of Program::parts() of a segment. All parts in order give the same bits as the whole segment.
  virtual Status submit_part(Program& program, uint32_t segment, uint32_t /*part*/, const StepParams& step,
                             std::span<const HeadState> heads) {
    return submit(program, segment, segment + 1, step, heads);
  }
  virtual Status wait() = 0;
};

// A device. Sessions on any threads share it; it locks its own queue.
struct Device {
  virtual ~Device() = default;
  // What its sessions use of the host. open_device() sets it for devices that have none of their own.
  std::shared_ptr<Host> host;
  virtual DeviceInfo info() const = 0;
  // What this device needs in addition to the runtime's arenas. If it does not support a shape: Unsupported,
  // with the shape and what would fit.
  virtual Result<Needs> needs(const ModelShape&, const SessionShape&) const = 0;
  virtual Result<std::unique_ptr<Buffer>> alloc(MemKind,
                                                uint64_t bytes) = 0;  // zeroed; a handful of calls a session
  // Makes host memory (the mapped model) available to the device without a copy. Unsupported if that is
  // impossible.
  virtual Result<std::unique_ptr<Buffer>> import_host(const void* data, uint64_t bytes) = 0;
  // Writes the whole view, through a bounded staging buffer.
  virtual Status write(View destination, const void* source) = 0;
  virtual Status read(void* destination, View source) = 0;
  virtual Status copy(View destination, View source) = 0;  // same size, not overlapping
  // Returns as much of this view's memory as possible to the system, and fills it with zeros. Returns the
  // number of bytes. Unsupported if a buffer can only be freed as a whole.
  virtual Result<uint64_t> release(View) {
    return error(Code::kUnsupported,
                 "%s gives memory back only when a session is freed; make a smaller session instead",
                 info().name.c_str());
  }
  // `heads` is the number of rows of the table of HeadState, over all layers.
  virtual Result<std::unique_ptr<Stream>> open_stream(View workspace, uint32_t heads) = 0;
  // Whether the device supports this op with these types and parameters.
  virtual bool supports(const Op&) const = 0;
  // Takes about a second. It frees the memory that it uses.
  virtual Result<Rates> measure() = 0;
};

}  // namespace thimble
