// The seam between runtime/ and backends/: memory, the ops of a step, and programs that are recorded once and
// replayed.
//
// runtime/decoder.cpp writes a step as a list of ops; an op is a value, a backend turns it into launches as
// it likes. What changes from step to step travels in StepParams and HeadState (op_params.h), so a Program is
// replayed unchanged.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <variant>

#include "backends/op_params.h"
#include "base/dtype.h"
#include "base/status.h"

namespace thimble {

// ---- memory ----

enum class MemKind : uint8_t {
  kWeights,
  kPool,
  kWorkspace,
  kIo
};  // kIo is mapped and host-visible on every device

struct Buffer {
  virtual ~Buffer() = default;
  uint64_t size = 0;
  void* mapped = nullptr;  // host address, or null where the host cannot reach it
};

// A range of a buffer. An empty view (no buffer) stands for an operand that an op does without.
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
// A matrix of a model: `rows` rows of `cols` elements of `type`, row after row; y = W x has one element a
// row.
struct Weight : In {
  DType type = DType::kF32;
  uint32_t rows = 0, cols = 0;
};

// Keys or values of one layer or chunk: [entries][head_dim] of `type`.
struct KvArray {
  View values;
  DType type = DType::kF16;
  explicit operator bool() const { return bool(values); }
};
// What so many channels of one entry take.
inline uint64_t kv_bytes(DType type, uint32_t head_dim) { return dtype_bytes(type, head_dim); }

// ---- what a device must know to say what it needs ----

struct MatrixShape {
  uint32_t rows = 0, cols = 0;
};
struct ModelShape {
  uint32_t layers = 0, d_model = 0, heads = 0, kv_heads = 0, head_dim = 0, d_ff = 0, vocab = 0;
  uint32_t experts = 0, chosen_experts = 0;  // of a layer, and for a token; then d_ff is that of one expert
  uint32_t d_ff_shared = 0;                  // of the expert beside those that every token passes; 0: none
  std::array<MatrixShape, 2> retainer = {};  // its matrices in a layer; 0 x 0 where there is none
};
struct SessionShape {
  uint32_t chunk = 0;          // rows of the largest program
  uint32_t run_capacity = 0;   // entries in the longest head's run
  uint32_t layer_entries = 0;  // entries of all heads' runs in the largest layer
  uint32_t reach = 0;          // entries of the longest run and the chunk that a step can see
  uint32_t view_capacity = 0;  // entries in the view
  uint32_t positions = 0;      // bound on positions in a layer vote; 0: no selection
  uint32_t heads = 0;          // rows of the table of HeadState
  bool labels = false;         // its programs have the op label
};
struct Needs {
  uint64_t fixed =
      0;  // context, pipelines, library workspace: measured at device creation, once for all sessions
  uint64_t programs = 0;   // what the recorded programs of one session take of the device's memory
  uint64_t workspace = 0;  // scratch of the backend's own, allocated by the runtime and handed to open_stream
};
struct DeviceInfo {
  std::string name;         // "cpu", "cuda:0"
  std::string description;  // for people: processor or card, driver; what keeps it from being used
  bool usable = true;
  bool software = false;  // a driver that computes on the processor, which "auto" passes over
  uint64_t total_bytes = 0, free_bytes = 0;
  uint64_t max_binding = 0;              // largest range an op can be given
  uint64_t max_allocation = UINT64_MAX;  // largest buffer
  uint32_t alignment = 64;               // of every view's offset
  uint64_t granularity = 1;              // allocations take whole multiples of it
  bool unified =
      true;  // host and device share memory: every buffer is mapped, and files are imported as they lie
  uint32_t view_element_bytes = 2;  // kv_view's scratch: 2 (f16) or 4 (f32)
};

// What a device can do, measured.
struct Rates {
  double bytes_per_second = 0;  // of its memory: a large copy, bytes read and bytes written
  double flop_per_second = 0;   // of its matrix units, at the precision of prefill's products
};

// Rows that get logits in one step, at most.
inline constexpr uint32_t kMostLogitRows = 16;

// ---- the ops ----
// Shapes are row-major, innermost last. `rows` is StepParams::n_rows unless the parameters say n_logit_rows.
// f32 unless said otherwise. Hkv, H: KV and query heads; dh: head_dim; a KV head j serves query heads
// [j*group, (j+1)*group). What is marked [run] is a layer's array, in which each KV head has the run of
// entries that its HeadState says; n_entries is the head's own. A list is [Hkv][list_capacity] uints: the
// count, then that many entries of the head, ascending; entry >= n_entries is a chunk row. An op that gets an
// empty `list` works on all n_entries + n_rows entries (kFromPool: the row is already appended).
//
// rope table: [64 + blocks][n_rot / 2] pairs (cos, sin). Row i < 64 is position i; row 64 + a is position 64
// * a, times the model's attention factor. Position p is the complex product of rows 64 + p / 64 and p % 64:
// R(64a + i) = R(64a) R(i).

struct Embed {   // x[r] = table[tokens[r]]
  In tokens;     // int32 [rows]
  Weight table;  // [vocab][cols]
  Out x;         // [rows][cols]
  EmbedParams p;
};
struct RmsNorm {  // y = x / sqrt(mean(x^2) + eps) * weight, or y += that, for each vector of `cols`; y may be
                  // x
  In x, weight;   // weight: f32 [cols]
  Out y;
  RmsNormParams p;
};
struct Linear {  // y = W x + bias, or y += W x + bias
  In x;          // [rows][x_stride]
  Weight w;      // [out_cols][in_cols]
  In bias;       // f32 [out_cols], or empty
  Out y;         // [rows][y_stride]
  LinearParams p;
};
struct Glu {        // h = act(Wg x) * (Wu x)
  In x;             // [rows][in_cols]
  Weight gate, up;  // [out_cols][in_cols]
  Out h;            // [rows][out_cols]
  GluParams p;
};
struct Scale {  // y = cap(s x), or y += that; y may be x. s is `scale`, or where there is a growth that times
                // 1 + growth log(1 + floor(position / period)), by the row's position in the text
  In x;         // [rows][row_stride]
  Out y;        // [rows][row_stride]
  ScaleParams p;
  In positions = {};  // as kv_append's; or empty: they follow each other
};
// Mixture of experts. A row's token goes to the `chosen` experts that its router likes best; ties go to the
// lower expert. Where a row is served by an expert is a slot; slots are ordered by expert and then by row, so
// that an expert's lie side by side.
struct Route {
  In logits;   // [rows][experts], all finite or not; NaN is chosen last
  In bias;     // f32 [experts], added for the choice alone; or empty
  Out first;   // uint [experts + 1]: an expert's first slot
  Out row;     // uint [rows * chosen]: which row a slot serves
  Out weight;  // f32 [rows * chosen]: what its output counts
  RouteParams p;
};
struct ExpertGlu {        // h[slot] = act(Wg x + bg) * (Wu x + bu), x being the slot's row, W its expert's
  In x;                   // [rows][in_cols]
  Weight gate, up;        // [experts * out_cols][in_cols]
  In gate_bias, up_bias;  // f32 [experts][out_cols], or empty
  In first, row;          // as route gives them
  Out h;                  // [rows * chosen][out_cols]
  ExpertGluParams p;
};
struct ExpertLinear {     // y[row] += weight (W h[slot] + bias), over the row's slots in order
  In h;                   // [rows * chosen][in_cols]
  Weight w;               // [experts * out_cols][in_cols]
  In bias;                // f32 [experts][out_cols], or empty
  In first, row, weight;  // as route gives them
  Out y;                  // [rows][out_cols]
  ExpertLinearParams p;
};
struct Activation {  // x = act(x)
  Out x;             // [rows][cols]
  ActivationParams p;
};
struct KvAppend {  // k, v rows as f16, and their positions; what is beyond f16's range becomes its largest
                   // number
  In qkv;          // [rows][row_stride]
  In rope;
  KvArray k, v;   // [run][dh], or of the chunk: [Hkv][chunk_capacity][dh]
  Out pos;        // int32, likewise
  Out saturated;  // one uint, to which the numbers are added that were beyond f16's range
  KvAppendParams p;
  In positions = {};  // int32 [rows], of rows that do not follow each other (kRopeList); or empty
};
// What a retainer of the kind "sink" makes of its queries and keys: a softmax weight among the sinks. For the
// queries i of a KV head
//   weight_i = exp(q_i k + bias_i) / (exp(q_i k + bias_i) + sum over sinks s of exp(q_i s)),
// where q and k are normed and all products scaled; the score is the mean of the weights.
struct SinkScore {
  In q;               // [rows][Hkv][group][width]
  In k;               // [rows][Hkv][width]
  In q_norm, k_norm;  // f32 [width]: weights of the norms
  In sinks;           // f32 [Hkv][sinks][width], not normed
  In bias;            // f32 [Hkv][group]
  Out score;          // [rows][Hkv]
  SinkScoreParams p;
};
struct CisStore {  // the retention scores of the step's rows
  In score;        // [rows][Hkv], kCisHead only
  Out cis;         // [run], or of the chunk: [Hkv][chunk_capacity]
  CisStoreParams p;
};
struct GivenScore {  // the retention scores of all entries as the host gives them, the same in every head
  In score;          // [n_entries + n_rows]: the entries', then the rows'
  Out cis;           // [run]; the rows' go behind the entries, or
  Out chunk_cis;     // to the chunk: [Hkv][chunk_capacity]
  GivenScoreParams p;
};
struct KvView {            // gathers, and rotates by list index under kRopeList: what prefill attention reads
  KvArray pool_k, pool_v;  // [run][dh]
  KvArray chunk_k, chunk_v;  // [Hkv][chunk_capacity][dh]
  In list, rope;
  Out k, v;  // [Hkv][view_capacity][dh], DeviceInfo::view_element_bytes an element
  KvViewParams p;
};
struct Attention {  // y = softmax(cap(q k^T * scale), causal over the last rows) v, GQA
  In q;             // [rows][row_stride], unrotated; row i of n has list index count - n + i (its own entry)
  KvArray k, v;  // the view, [Hkv][view_capacity][dh] of DeviceInfo::view_element_bytes; or one layer's pool,
                 // [run][dh]
  In list, rope;
  In sinks;  // f32 [H]: logits that count in the softmax's sum and carry no value; or empty
  Out y;     // [rows][y_stride]
  Out ml;    // f32 [rows][H][2]: running maximum and sum between passes
  AttentionParams p;
  // uint [rows], ascending: the list index of each row's own entry, where it is not among the last; of the
  // view under kRopeList, without a window. Or empty.
  In row_index = {};
};
struct KvCompact {           // pool = the listed entries of pool and chunk, in place, in order
  In list;                   // empty: all, which puts the chunk's rows behind the pool's entries
  KvArray chunk_k, chunk_v;  // empty where there is no chunk: the step's rows lie behind the pool's entries
  In chunk_pos, chunk_cis;   // cis empty without retention
  KvArray k, v;              // [run][dh]
  Out pos, cis;              // [run]
  KvCompactParams p;
};
// Per layer: what the selection cache remembers. The runtime clears it; `hits` and `misses` it only reads.
struct GateState {
  uint32_t hit;         // this step uses the cached selection
  uint32_t valid;       // a selection is cached
  uint32_t generation;  // StepParams::generation when it was made
  int32_t position;     // StepParams::position when it was made
  uint32_t hits, misses;
  uint32_t selecting;  // KV heads that were selected from when it was made
  uint32_t reserved;
};
struct QueryGate {  // hit = valid, same generation, as many KV heads to select from, at most n_local / 2
                    // tokens ago, cos(q, cached) >= theta (methods 3.6). While no head is selected from: not
                    // valid, and neither hit nor miss
  In q;             // [1][cols]; rotation at a common position leaves the cosine alone, so none is done
  Out cached;       // [cols]; replaced on a miss
  Out gate;         // GateState
  QueryGateParams p;
};
struct TokenScore {  // s_h(i) = mean over rows of q rotated at n_local + row, dot k_i unrotated, over the
                     // middle (methods 3.1, 3.5)
  In q;              // [rows][row_stride]
  KvArray k;         // [run][dh]
  In rope, gate;
  Out scores;  // [H][score_capacity], index = pool entry; only the middle is written
  Out lse;     // [H]: log-sum-exp of a head's scores
  TokenScoreParams p;
};
struct Vote {  // log of sum over heads of exp(s - lse): per KV head (group) or per position (layer); others
               // -inf
  In scores, lse;
  In pos;  // int32 [run]; kVoteLayer only
  In gate;
  Out votes;  // group: [Hkv][vote_capacity] by entry or page; layer: [vote_capacity] by position
  VoteParams p;
};
// Quest (methods 4): what the keys of a page lie between, channel by channel.
struct PageBounds {
  KvArray k;   // [run][dh]
  Out bounds;  // f16 [pages][2][dh]: smallest, largest
  PageBoundsParams p;
};
struct PageScore {  // s_h(page) = scale * sum over channels of max(q * smallest, q * largest), over the
                    // middle
  In q;  // [rows][row_stride], one row; rotated to its position under kRopeOriginal, else not at all
  In bounds, rope;
  Out scores;  // [H][score_capacity], index = page; only the middle is written
  Out lse;     // [H]: log-sum-exp of a head's scores
  PageScoreParams p;
};
// Sorts a run by position after a compaction left the step's rows that stay, at most kMostMergedRows, behind
// the entries: both ascend by themselves.
struct KvMerge {
  KvArray k, v;  // [run][dh]
  Out pos, cis;  // [run]
  KvMergeParams p;
};
struct TopK {       // scores -> ascending lists; NaN is -inf, -0 is 0, ties go to the larger entry, page or
                    // position
  In scores;        // as p.by_position, p.in_runs and p.page say
  In chunk_scores;  // of the chunk's rows: [Hkv][chunk_capacity]; or empty
  In pos;           // int32 [run], by_position only
  In gate;          // on a hit only the last n_local of the list are rewritten
  Out list;
  TopKParams p;
};
// What the entries that a KV head held before the step are worth to the marked rows: what retainers learn.
// For entry t, over the query heads h of its KV head and the marked rows p,
//   max_logit[t] = max(max_logit[t], least, cap(q_hp k_t * scale))
//   log_prob[t] = max(log_prob[t], least, cap(q_hp k_t * scale) - lse_hp + worth_ht),
// lse_hp being the log-sum-exp of the logits of the entries in range, and log |x_p| where there is x. In
// range are entries [0, sinks), [first, end), and those from `own` on up to the row's own; of these, only
// those of [first, end) are labelled.
struct Label {
  In q;                // [rows][row_stride], unrotated
  In marked;           // uint [rows]: whether the row counts
  KvArray k, chunk_k;  // [run][dh]; of the chunk: [Hkv][chunk_capacity][dh]
  In rope;
  In range;                 // uint [4]: sinks, first, end, own, ascending
  In x;                     // [rows][x_cols], or empty
  In worth;                 // [H][label_capacity], by entry; or empty: 0
  In sinks;                 // as attention's: logits that count in a row's sum
  Out lse;                  // [rows][H]; only those of marked rows are written
  Out max_logit, log_prob;  // [Hkv][label_capacity], by entry
  LabelParams p;
};
struct KeyDiff {  // scores of all entries, the step's rows among them: minus the cosine of an entry's key and
                  // the mean of all keys, each divided by its length. A key of length 0 does not count in the
                  // mean and scores -1, as the mean would, and so do all where the mean's length is 0; a key
                  // that holds NaN does not count either, and scores NaN
  KvArray k, chunk_k;  // [run][dh]; of the chunk: [Hkv][chunk_capacity][dh], empty where there is no chunk
  Out sums;            // [Hkv][blocks][dh]: scratch
  Out cis, chunk_cis;  // [run], [Hkv][chunk_capacity]
  KeyDiffParams p;
};
// Adds two scores of different scales: mixed = z(scores) + z(mixed), where z(x) = (x - mean) / sd.
// Mean and standard deviation are those of the entries of a head that an eviction chooses from
// (kept_regions). Values that are not finite count in neither. If the deviation is 0, z is 0 for finite
// values. The op changes no other entries, and none of a head that keeps everything.
struct ScoreMix {
  In scores, chunk_scores;  // [run]; of the chunk: [Hkv][chunk_capacity], empty where there is no chunk
  Out mixed, chunk_mixed;   // the same
  ScoreMixParams p;
};
// How much weight queries give to entries: softmax(cap(q k^T * scale)) over what a query sees, without the
// carried values. kQueryLast: the query of the last entry, which sees everything and scores everything by the
// mean of its weights in all query heads; heads hold equally many entries, and get the same scores. The last
// entry itself scores infinity. kQueryRows: the queries of the step's rows. A row sees the first `sinks`
// entries, the n_rows entries before the step's, and the step's rows up to itself; those n_rows entries get
// the largest logarithm of a weight that a row gives them in a query head of their KV head. kQueryHeads: the
// query of the last entry sees what it attended to as a row of attention does, the last of a window or of a
// list; of each KV head what it sees gets the sum of its weights in the query heads, at its index in the list
// where there is one. A weight whose logarithm is -inf or NaN counts for nothing, and the largest of none is
// -inf.
struct QueryScore {
  In q;                // [queries][row_stride], unrotated
  KvArray k, chunk_k;  // [run][dh]; of the chunk: [Hkv][chunk_capacity][dh], empty where there is no chunk
  In list, rope;       // list: kQueryHeads alone, of entries in the pool
  In sinks;            // as attention's: logits that count in a row's sum
  Out sums;            // [Hkv][rows * group][kQueryScoreSums]: scratch
  Out cis, chunk_cis;  // [run]; [Hkv][chunk_capacity], of kQueryLast with a chunk
  QueryScoreParams p;
};
// What heads give to positions of the text, of a slice of them: sums[i] = or += the weights of the entries at
// position StepParams::position + i, head by head in ascending order, which makes their bits. The n-th weight
// of a run belongs to its n-th entry, or where there is a list to the n-th entry of that, as query_score
// leaves them. No position occurs twice in a head.
struct ScatterAdd {
  In pos;      // int32 [run], ascending
  In weights;  // f32 [run], or empty: each is 1
  In list;     // of entries in the pool
  Out sums;    // f32 [slots]
  ScatterAddParams p;
};
struct ArgMax {  // ties go to the lower id
  In x;          // [n_logit_rows][cols]
  Out index;     // int32 [n_logit_rows]; -1 where any x of the row is NaN or infinite
  ArgMaxParams p;
};
struct LogProb {  // log softmax(x)[target]
  In x;           // [n_logit_rows][cols]
  In target;      // int32 [n_logit_rows]
  Out y;          // [n_logit_rows]
  LogProbParams p;
};
struct Copy {
  In src;
  Out dst;
  CopyParams p;
};

// Selecting ops work in units of `page` entries, of which a head has n = ceil((n_entries + n_rows) / page).
// They work only when n > n_init + select_k + n_local, on the middle [n_init, n - n_local); below that top_k
// lists everything and token_score, page_score and vote do nothing.

// The table of ops. A row holds an op's struct, its name in files, tests, messages and functions, and the
// backends that have it. Op, op_name(), and each backend's declarations and dispatch come from this table. A
// backend that a row does not name says that it does not support the op.
inline constexpr uint32_t kOnCpu = 1, kOnCuda = 2, kOnVulkan = 4, kOnAll = kOnCpu | kOnCuda | kOnVulkan;

#define THIMBLE_OPS(OP)                   \
  OP(Embed, embed, kOnAll)                \
  OP(RmsNorm, rms_norm, kOnAll)           \
  OP(Linear, linear, kOnAll)              \
  OP(Glu, glu, kOnAll)                    \
  OP(Scale, scale, kOnAll)                \
  OP(Route, route, kOnAll)                \
  OP(ExpertGlu, expert_glu, kOnAll)       \
  OP(ExpertLinear, expert_linear, kOnAll) \
  OP(Activation, activation, kOnAll)      \
  OP(KvAppend, kv_append, kOnAll)         \
  OP(SinkScore, sink_score, kOnAll)       \
  OP(CisStore, cis_store, kOnAll)         \
  OP(GivenScore, given_score, kOnAll)     \
  OP(KvView, kv_view, kOnAll)             \
  OP(Attention, attention, kOnAll)        \
  OP(KvCompact, kv_compact, kOnAll)       \
  OP(KvMerge, kv_merge, kOnAll)           \
  OP(QueryGate, query_gate, kOnAll)       \
  OP(TokenScore, token_score, kOnAll)     \
  OP(PageBounds, page_bounds, kOnAll)     \
  OP(PageScore, page_score, kOnAll)       \
  OP(Vote, vote, kOnAll)                  \
  OP(TopK, top_k, kOnAll)                 \
  OP(Label, label, kOnAll)                \
  OP(KeyDiff, key_diff, kOnAll)           \
  OP(ScoreMix, score_mix, kOnAll)         \
  OP(QueryScore, query_score, kOnAll)     \
  OP(ScatterAdd, scatter_add, kOnAll)     \
  OP(ArgMax, arg_max, kOnAll)             \
  OP(LogProb, log_prob, kOnAll)           \
  OP(Copy, copy, kOnAll)

// A row adds a comma and its type, so one type stands before the first comma.
template <typename, typename... Types>
using VariantOf = std::variant<Types...>;
#define THIMBLE_OP_TYPE(Type, name, backends) , Type
using Op = VariantOf<void THIMBLE_OPS(THIMBLE_OP_TYPE)>;
#undef THIMBLE_OP_TYPE

// "token_score": what an op is called in files, tests and messages.
inline const char* op_name(const Op& op) {
#define THIMBLE_OP_NAME(Type, name, backends) #name,
  static constexpr const char* kNames[] = {THIMBLE_OPS(THIMBLE_OP_NAME)};
#undef THIMBLE_OP_NAME
  return kNames[op.index()];
}

// Whether a backend, kOnCpu, kOnCuda or kOnVulkan, has this op at all.
inline bool has_op(const Op& op, uint32_t backend) {
#define THIMBLE_OP_BACKENDS(Type, name, backends) backends,
  static constexpr uint32_t kBackends[] = {THIMBLE_OPS(THIMBLE_OP_BACKENDS)};
#undef THIMBLE_OP_BACKENDS
  return (kBackends[op.index()] & backend) != 0;
}

struct Recorder {  // ops run in the order recorded; the first error sticks until finish()
  virtual ~Recorder() = default;
  virtual void segment() = 0;  // what follows belongs to the next segment
  virtual void record(const Op&) = 0;
};

struct Program {  // graph exec | command buffers | closures
  virtual ~Program() = default;
  uint32_t segments = 0;
  // In how many parts a segment is run, one submit_part() for each, where it takes long for an interrupt.
  virtual uint32_t parts(uint32_t /*segment*/) const { return 1; }
  // Of memory that recording it took: what it allocated, and what the driver then told to be in use more. A
  // driver that does not tell what a program takes (Vulkan's) is not counted here, but in Needs.
  uint64_t bytes = 0;
};

// ---- device and stream ----

// One session's queue on a device. One thread at a time.
struct Stream {
  virtual ~Stream() = default;
  uint64_t bytes = 0;  // of memory that opening it took, counted as a program's are
  // Starts recording a program for at most max_rows rows.
  virtual std::unique_ptr<Recorder> record(uint32_t max_rows) = 0;
  virtual Result<std::unique_ptr<Program>> finish(std::unique_ptr<Recorder>) = 0;
  // Runs segments [first, last) with these values: the whole hot path. May return before the work is done.
  // `heads`: as many as the stream was opened for.
  virtual Status submit(Program&, uint32_t first, uint32_t last, const StepParams&,
                        std::span<const HeadState> heads) = 0;
  // Runs one of Program::parts() of a segment; all of them, in their order, are the segment, with the same
  // bits.
  virtual Status submit_part(Program& program, uint32_t segment, uint32_t /*part*/, const StepParams& step,
                             std::span<const HeadState> heads) {
    return submit(program, segment, segment + 1, step, heads);
  }
  virtual Status wait() = 0;
};

// A device is shared by sessions on any threads; it locks its own queue.
struct Device {
  virtual ~Device() = default;
  virtual DeviceInfo info() const = 0;
  // What this device needs beside the runtime's arenas, or Unsupported, saying which shape and what would
  // fit.
  virtual Result<Needs> needs(const ModelShape&, const SessionShape&) const = 0;
  virtual Result<std::unique_ptr<Buffer>> alloc(MemKind,
                                                uint64_t bytes) = 0;  // zeroed; a handful of calls a session
  // Shows host memory (the mapped model) to the device without a copy; Unsupported where it cannot.
  virtual Result<std::unique_ptr<Buffer>> import_host(const void* data, uint64_t bytes) = 0;
  virtual Status write(View destination, const void* source) = 0;  // whole view; through bounded staging
  virtual Status read(void* destination, View source) = 0;
  virtual Status copy(View destination, View source) = 0;  // same bytes, not overlapping
  // Gives what it can of this view's memory back to the system, zeros being there afterwards; the bytes of
  // that. Unsupported where a buffer goes back whole or not at all.
  virtual Result<uint64_t> release(View) {
    return error(Code::kUnsupported,
                 "%s gives memory back only when a session is freed; make a smaller session instead",
                 info().name.c_str());
  }
  // `heads`: rows of the table of HeadState, of all layers.
  virtual Result<std::unique_ptr<Stream>> open_stream(View workspace, uint32_t heads) = 0;
  // Whether it has this op, with these types and parameters.
  virtual bool supports(const Op&) const = 0;
  // Takes about a second, and memory that it gives back.
  virtual Result<Rates> measure() = 0;
};

}  // namespace thimble
