// The parameters of every op, and the per-step values. C++, CUDA and GLSL share this header. Each block
// consists of uint, int and float, and has at most 128 bytes, the smallest push constant range that Vulkan
// guarantees.
#ifndef THIMBLE_OP_PARAMS_H
#define THIMBLE_OP_PARAMS_H

#ifdef __cplusplus
#include <cstdint>
namespace thimble {
typedef uint32_t uint;
#define THIMBLE_INITIALLY(value) = value
#else
#define THIMBLE_INITIALLY(value)  // GLSL has no default values
#endif

// As StepParams::state_from: all zeros.
#define kNoState 0xffffffffu

// Values that change from submit to submit. They are in device memory, followed by the table of HeadState, so
// a recorded program can be replayed.
struct StepParams {
  uint n_rows;   // tokens of this step; programs are recorded for at least as many
  int position;  // original position of the first row
  // select: the number of first units that are always attended to (sinks). A unit is an entry or a page of
  // entries.
  uint n_init;
  uint n_local;     // select: number of last units that are always attended to, including the step's rows
  uint select_k;    // select: number of units picked from the middle
  float theta;      // select: cosine from which the cached selection is reused; >= 1: never
  uint generation;  // select: changes whenever pool entries moved and cached indices became invalid
  uint first_logit_row;  // tail: first row that gets logits
  uint n_logit_rows;     // tail: number of rows that get logits
  uint ring_row;         // decode: row of the ring that stores the retainer's inputs for this token
  uint seed;             // random retention
  // recurrent mixers: the slots of the states before and after this step's rows
  uint state_from THIMBLE_INITIALLY(kNoState);  // kNoState: zeros, before the text
  uint state_to
      THIMBLE_INITIALLY(kNoState);  // a slot, and another one than state_from unless there is only one
};

// The run of one KV head's entries in its layer's arrays. `head_state` in op parameters is the table row of
// KV head 0; the rows of the other heads follow.
struct HeadState {
  uint first;          // index in the layer's arrays of the run's first entry
  uint capacity;       // entries that fit into the run
  uint n_entries;      // entries in the run before this step
  uint keep;           // retain: number of entries that stay, of n_entries + n_rows
  uint protect_first;  // retain: number of first entries that stay whatever their score
  uint protect_last;   // retain: number of last entries that stay whatever their score
};

// The count in StepParams that is the number of an op's rows.
#define kStepRows 0u   // n_rows
#define kLogitRows 1u  // n_logit_rows

// Rotary position: the position of a key.
#define kRopeList 0u      // its index in the attended list; cached keys are unrotated
#define kRopeOriginal 1u  // its position in the text; cached keys are rotated

// Which channels rotate as a pair.
#define kRopeAdjacent 0u  // (2i, 2i + 1), as in llama files
#define kRopeHalves 1u    // (i, i + n_rot / 2), as in other files

#define kActSilu 0u
#define kActGelu 1u     // tanh form
#define kActGeluErf 2u  // erf form; not supported by glu
#define kActClamped \
  3u  // gpt-oss: a = min(g, 7), a sigmoid(1.702 a) (clamp(u, -7, 7) + 1); of expert_glu alone
#define kActSigmoid 4u  // of gated_norm alone
#define kActNone 5u     // act(x) = x; of short_conv alone
#define kActReluSqr 6u  // max(x, 0)^2; of activation, and of expert_glu without a gate

#define kVoteLayer 0u  // one set of positions for the layer (methods 6.1 b)
#define kVoteGroup 1u  // each KV head votes within its group (6.1 a)

// How a router turns logits into weights.
#define kRouteSoftmax 0u          // softmax over all experts; the best ones keep their weights
#define kRouteSoftmaxOfChosen 1u  // softmax over the best logits only
#define kRouteSigmoid 2u          // sigmoid of each logit; the best ones
#define kRouteSqrtSoftplus 3u     // sqrt(log(1 + exp(logit))); the best ones

// The largest number of groups of experts.
#define kMostGroups 32u

#define kCisHead 0u      // the output of the retainer
#define kCisPosition 1u  // the position of the token, which keeps the most recent ones
#define kCisHash 2u      // a hash of (seed, layer, head, position): random eviction

#define kIntoChunk 0u  // rows are written to the chunk buffer, from row 0
#define kIntoPool 1u   // rows are written to the pool, from entry n_entries
#define kIntoRing 2u   // scores are written for the last n_rows pool entries (cis_store)

// How many entries top_k lists.
#define kKeepOfHead 0u  // HeadState: `keep` of n_entries + n_rows, including protect_first and protect_last
#define kKeepOfStep \
  1u  // StepParams: n_init + select_k + n_local, the first n_init and the last n_local among them

#define kFromView 0u  // attention reads the view made by kv_view
#define kFromPool 1u  // attention gathers and rotates entries of the pool itself (DeviceInfo::pool_rows)

// How a model rotates. Every op that rotates has these parameters. The table is [64 + blocks][n_rot / 2]{cos,
// sin}, see backend.h.
struct RopeParams {
  uint mode;     // kRopeList, kRopeOriginal
  uint pairing;  // kRopeAdjacent, kRopeHalves
  uint n_rot;    // number of channels that rotate, even, <= head_dim; the others do not change
  // The word of the table's operand from which on it has weights of a head's channels, after the table. Ops
  // multiply queries by them once these are rotated. 0: there are none.
  uint query_weight THIMBLE_INITIALLY(0);
};

struct EmbedParams {
  uint cols;                         // elements that x gets of a row of the table
  uint column THIMBLE_INITIALLY(0);  // the first of them, a multiple of 8 and of the type's block
  float scale THIMBLE_INITIALLY(1.0f);
};

struct RmsNormParams {
  uint cols;
  // Vectors of `cols` in a row, one after the other: 1, or the number of heads for the per-head q and k norm.
  uint groups;
  uint row_stride;  // elements between rows, in x (see x_row_stride) and in y
  float eps;
  uint rows;  // kStepRows, kLogitRows
  uint add;   // 1: y += the normed x; 0: y = the normed x
  // Elements of x between rows and between vectors, if they are not those of y; or 0.
  uint x_row_stride, x_group_stride;
  uint center THIMBLE_INITIALLY(0);  // 1: the mean of a vector is first subtracted from it (LayerNorm)
};

struct ScaleParams {
  uint cols;
  uint row_stride;  // elements between rows, in x and in y
  float scale;
  float growth;  // how the scale grows with a row's position, kStepRows; 0: it does not
  uint period;   // number of positions with the same scale
  float cap;     // the scaled x becomes cap * tanh(x / cap); 0: no cap
  uint add;      // 1: y += the result; 0: y = the result
  uint rows;
};

struct LinearParams {
  uint in_cols;
  uint out_cols;
  uint x_stride;  // elements between rows of x
  uint y_stride;  // elements between rows of y
  uint add;       // 1: y += W x + bias; 0: y = W x + bias
  uint rows;
};

struct GluParams {
  uint in_cols;
  uint out_cols;
  uint act;
};

struct RouteParams {
  uint experts;
  uint chosen;  // number of experts per row
  uint kind;    // kRouteSoftmax, kRouteSoftmaxOfChosen, kRouteSigmoid, kRouteSqrtSoftplus
  uint share;   // 1: the weights of a row are divided by their sum, or by 2^-14 if that is larger
  float scale;  // factor of the weights, applied after that
  // The experts form this many groups of neighbours, of which a row uses the best groups_used ones. 0: it may
  // use all experts.
  uint groups THIMBLE_INITIALLY(0);
  uint groups_used THIMBLE_INITIALLY(0);
};

struct ExpertGluParams {
  uint in_cols;
  uint out_cols;
  uint act;
  uint experts;
  uint chosen;
  // Rows between the matrices of two experts: 0, or out_cols if gate and up are parts of one tensor.
  uint rows_between THIMBLE_INITIALLY(0);
};

struct ExpertLinearParams {
  uint in_cols;
  uint out_cols;
  uint experts;
  uint chosen;
};

struct ActivationParams {
  uint cols;
  uint act;
};

// The largest number of taps of short_conv.
#define kMostTaps 8u

// As a column: there is no such operand, so it is 1.
#define kNoColumn 0xffffffffu

struct ShortConvParams {
  uint channels;
  uint taps;  // rows that a row of the output depends on, including its own: 2 to kMostTaps
  // Columns of a row of x where each one's channels begin. `times` and `gate` may be kNoColumn.
  uint x_column, times_column, gate_column;
  uint x_stride;  // elements between rows of x
  uint y_stride;  // elements between rows of y
  uint act;       // kActNone, kActSilu
};

// The most channels of a key or value of delta_net.
#define kMostDeltaWidth 128u

struct DeltaNetParams {
  uint key_heads, value_heads;  // a multiple of key_heads
  uint width;                   // channels of a key and of a value: a multiple of 32, at most kMostDeltaWidth
  uint q_column, k_column, v_column;  // columns of a row of qkv where head 0's channels begin
  uint qkv_stride;                    // elements between rows of qkv
  uint alpha_column, beta_column;     // columns of a row of gates where value head 0's number is
  uint gates_stride;                  // elements between rows of gates
  uint y_stride;                      // elements between rows of y
  float eps;                          // of the norms of queries and keys
  // The key head of value head j. 1: j % key_heads (qwen35). 0: j / (value_heads / key_heads) (qwen3next).
  uint tiled;
};

// The most channels of a head of ssm, and the most numbers of its state for each channel.
#define kMostSsmWidth 256u
#define kMostSsmState 256u

struct SsmParams {
  uint heads, groups;  // groups divides heads
  uint width;          // channels of a head: a multiple of 16, at most kMostSsmWidth
  uint state;          // numbers of the state for each channel: likewise, at most kMostSsmState
  uint x_column, b_column, c_column;  // columns of a row of xbc where head 0 and group 0 begin
  uint xbc_stride;                    // elements between rows of xbc
  uint dt_column;                     // column of a row of dt where head 0's number is
  uint dt_stride;                     // elements between rows of dt
  uint y_stride;                      // elements between rows of y
};

// Which comes first in gated_norm.
#define kNormThenGate 0u  // norm(x) act(z)
#define kGateThenNorm 1u  // norm(x act(z))
#define kGateOnly 2u      // x act(z)

struct GatedNormParams {
  uint cols;
  uint groups;      // vectors of `cols` in a row, one after the other
  uint row_stride;  // elements between rows, in x and in y
  uint z_stride;    // elements between rows of z
  uint z_column;    // column of a row of z where group 0 begins
  float eps;
  uint order;             // kNormThenGate, kGateThenNorm, kGateOnly
  uint act;               // kActSilu, kActSigmoid
  uint weight_per_group;  // 1: weight is [groups][cols]; 0: [cols], the same in each group
};

struct GateParams {
  uint cols;
  uint groups;          // vectors of `cols` in a row of x, one after the other
  uint x_stride;        // elements between rows of x
  uint g_stride;        // elements between rows of g
  uint g_column;        // column of a row of g where group 0 begins
  uint g_group_stride;  // elements between groups in g
  uint g_cols;          // numbers of a group in g: cols, or 1 for all channels of a group
};

// The most outputs of a head of head_linear.
#define kMostHeadColumns 4096u

struct HeadLinearParams {
  uint heads;
  uint in_cols, out_cols;        // of a head's matrix
  uint copied;                   // channels of a head that are copied, see the op
  uint x_stride, x_head_stride;  // elements between rows and between heads of x
  uint y_stride, y_head_stride;  // likewise of y
  // The row of w where head 0's matrix begins, and the number of rows from one head's matrix to the next.
  uint w_first, w_head_rows;
  uint transposed;  // 1: the rows of a head's matrix are those of its inputs; 0: those of its outputs
};

struct LiftViewParams {
  uint heads;
  uint rotated, latent;                     // channels of a row of the view
  uint key_cols, value_cols;                // channels that a head's matrices return
  uint k_first, k_head_rows, k_transposed;  // as w_first, w_head_rows and transposed of HeadLinearParams
  uint v_first, v_head_rows;
  uint head_state;
  uint first_entry, view_capacity;  // as in KvViewParams
  uint list_capacity;
};

// The heads that an op works on. A backend with limited bindings calls the op for a few heads at a time.
struct KvAppendParams {
  uint first_head, heads;  // KV heads
  uint head_dim;
  uint row_stride;          // elements between rows of qkv
  uint k_column, v_column;  // columns of a row at which k and v of head 0 start
  uint chunk_capacity;      // kIntoChunk: rows between heads in k, v, pos
  uint head_state;
  uint into;        // kIntoChunk, kIntoPool
  RopeParams rope;  // rotates only under kRopeOriginal
};

struct SinkScoreParams {
  uint heads;   // KV heads
  uint group;   // queries per KV head
  uint width;   // channels of queries, keys and sinks
  uint sinks;   // sinks per KV head
  float eps;    // of the norms
  float scale;  // 1 / sqrt(width)
};

struct CisStoreParams {
  uint first_head, heads;
  uint kind;         // kCisHead, kCisPosition, kCisHash
  uint share_heads;  // 1: every head gets the largest score of all heads (retention scope layer)
  uint layer;
  uint chunk_capacity;  // kIntoChunk: scores between heads
  uint head_state;
  uint into;  // kIntoChunk, kIntoPool, kIntoRing
};

struct GivenScoreParams {
  uint first_head, heads;  // KV heads
  uint chunk_capacity;     // scores between heads in the chunk
  uint head_state;
};

struct KvViewParams {
  uint first_head, heads;
  uint head_dim;
  uint chunk_capacity;  // rows between heads in the chunk buffer
  uint head_state;
  uint first_entry, view_capacity;  // this pass shows list entries [first_entry, first_entry + view_capacity)
  uint list_capacity;
  RopeParams rope;
};

struct AttentionParams {
  uint first_head, heads;  // KV heads
  uint group;              // query heads per KV head
  uint head_dim;
  uint row_stride;   // elements between rows of q
  uint y_stride;     // elements between rows of y
  uint source;       // kFromView, kFromPool
  uint first_entry;  // kFromView: list index of the view's first entry; m, l, o continue from earlier passes
  uint view_capacity;  // kFromView: entries between heads in k and v
  uint head_state;
  uint list_capacity;
  uint window;  // a row sees its own list index and the window - 1 before it; 0: all before it
  // 1: all heads hold equally many entries in every step, so their work needs no balancing.
  uint equal_heads;
  float scale;  // usually 1 / sqrt(head_dim)
  float cap;    // scaled logits become cap * tanh(logit / cap); 0: no cap
  RopeParams rope;
};

// Positions of a page of the store of evicted entries.
#define kStoredPage 16u

struct AttendAllParams {
  uint first_head, heads;  // KV heads
  uint group;              // query heads per KV head
  uint head_dim;
  uint row_stride;      // elements between rows of q
  uint y_stride;        // elements between rows of y
  uint chunk_capacity;  // rows between heads in the chunk buffer
  uint head_state;
  uint page_capacity;  // pages of each head
  uint stored_stride;  // blocks of 64 bytes between heads in `pages` and `order`
  uint rows_stride;    // the same in the store's rows
  uint if_stored;      // 1: the op does nothing if no head has stored pages
  float scale, cap;    // as in AttentionParams
  RopeParams rope;
};

// The largest number of rows that kv_merge sorts into a run.
#define kMostMergedRows 64u

struct KvMergeParams {
  uint first_head, heads;  // KV heads
  uint head_dim;
  uint head_state;
};

struct KvCompactParams {
  uint first_head, heads;
  uint head_dim;
  uint chunk_capacity;  // rows between heads in the chunk buffer
  uint head_state;
  uint list_capacity;
};

struct KvSpillParams {
  uint first_head, heads;
  uint head_dim;
  uint chunk_capacity;  // rows between heads in the chunk buffer
  uint head_state;
  uint list_capacity;
  uint spill_capacity;  // rows between heads in the copies
};

struct KvRecallParams {
  uint first_head, heads;
  uint head_dim;
  uint head_state;
  uint list_capacity;
  uint row_capacity;  // rows between heads in the rows to put in
};

struct QueryKeepParams {
  uint cols;        // query heads * head_dim
  uint row_stride;  // elements between rows of q
  uint ring;        // rows that are kept
};

struct PageVoteParams {
  uint first_head, heads;  // KV heads
  uint group;              // query heads per KV head
  uint head_dim;
  uint cols;  // of all heads' queries
  uint ring;  // rows of queries
  uint head_state;
  uint list_capacity;
  uint page_capacity;  // pages of each head
  uint stored_stride;  // as in AttendAllParams
  uint rows_stride;
  uint page_bytes;  // of a page's keys and values
  float scale;      // of the products of queries and keys
  RopeParams rope;
};

struct QueryGateParams {
  uint cols;   // query heads * head_dim
  uint heads;  // KV heads
  uint head_state;
};

struct TokenScoreParams {
  uint first_head, heads;  // KV heads
  uint group;
  uint head_dim;
  uint row_stride;
  uint head_state;
  uint score_capacity;  // scores between query heads
  uint equal_heads;     // as in AttentionParams
  float scale;          // 1 as published, or 1 / sqrt(head_dim)
  RopeParams rope;
};

struct VoteParams {
  uint heads;  // KV heads
  uint group;
  uint head_state;
  uint scope;           // kVoteLayer (needs heads with equal runs), kVoteGroup
  uint page;            // entries per unit that is voted for: 1, or a page (kVoteGroup)
  uint score_capacity;  // scores between query heads
  uint vote_capacity;   // votes between KV heads (group), or number of positions (layer)
  uint window;          // width of the max-pool over votes; 0: none (methods 3.7)
};

struct TopKParams {
  uint heads;
  uint head_state;
  uint keep;  // what determines the number of listed entries: kKeepOfHead, kKeepOfStep
  uint page;  // entries per score: 1, or a page, whose entries are all listed (kKeepOfStep)
  // 1: one score per position, for all heads. 0: one score per entry or page of each head.
  uint by_position;
  // 1: a head's scores are in its run, like cis. 0: there are score_capacity scores between heads.
  uint in_runs;
  uint score_capacity;  // scores between heads, or number of positions
  uint chunk_capacity;  // chunk_scores: scores between heads
  uint list_capacity;   // uints between lists; a list is the count, then entries
};

// Pages of `page` entries, counted from a run's first entry. The last page may have fewer entries. The pages
// of head h begin at page first / page + h of the layer's bounds.
struct PageBoundsParams {
  uint first_head, heads;
  uint head_dim;
  uint head_state;
  uint page;
  // 1: updates the pages of the `keep` entries after an eviction. 0: updates the pages from entry n_entries
  // on, which the step appended.
  uint all;
};

struct PageScoreParams {
  uint first_head, heads;
  uint group;
  uint head_dim;
  uint row_stride;
  uint head_state;
  uint page;
  uint score_capacity;  // scores between query heads
  float scale;          // 1 / sqrt(head_dim)
  RopeParams rope;
};

struct LabelParams {
  uint heads;  // KV heads
  uint group;
  uint head_dim;
  uint row_stride;      // elements between rows of q
  uint chunk_capacity;  // rows between heads in the chunk's keys
  uint head_state;
  uint label_capacity;  // labels between KV heads
  uint x_cols;          // elements per row of x
  float cap;            // as in AttentionParams
  float scale;          // 1 / sqrt(head_dim)
  float least;          // lower bound of the labels
  RopeParams rope;      // kRopeOriginal: cached keys are rotated
};

// The number of entries whose keys one partial sum of key_diff adds.
#define kKeyDiffBlock 256u

struct KeyDiffParams {
  uint first_head, heads;  // KV heads
  uint head_dim;
  uint chunk_capacity;  // rows between heads in the chunk's keys and scores
  uint head_state;
  uint blocks;  // partial sums per head
};

struct ScoreMixParams {
  uint first_head, heads;  // KV heads
  uint chunk_capacity;     // rows between heads in the chunk's arrays
  uint head_state;
};

// The number of entries that query_score works on at a time (a tile), and the largest number of partial sums
// per query. Each partial sum covers equally many tiles.
#define kQueryScoreTile 64u
#define kQueryScoreSums 64u

// Which queries query_score uses, and what they score. kQueryLast: the last entry's query scores everything,
// by the mean weight over all heads. kQueryRows: the queries of the step's rows score equally many entries
// right before them, by the largest logarithm of a weight in each KV head. kQueryHeads: the last entry's
// query scores what it attended to, in each KV head separately.
#define kQueryLast 0u
#define kQueryRows 1u
#define kQueryHeads 2u

struct QueryScoreParams {
  uint first_head, heads;  // KV heads; all of the layer for kQueryLast
  uint group;
  uint head_dim;
  uint row_stride;      // elements between rows of q
  uint chunk_capacity;  // rows between heads in the chunk's keys and scores
  uint head_state;
  uint kind;           // kQueryLast, kQueryRows, kQueryHeads
  uint rows;           // the largest number of rows of q: 1, or the rows of a step
  uint sinks;          // kQueryRows: number of first entries that are also seen
  uint window;         // kQueryHeads: as in attention
  uint list_capacity;  // kQueryHeads: uints between lists; 0: there are no lists
  float scale;         // as in attention
  float cap;
  RopeParams rope;
};

struct ScatterAddParams {
  uint first_head, heads;  // KV heads
  uint head_state;
  uint slots;          // number of sums
  uint window;         // uses only the last so many entries that a head attends to; 0: all
  uint list_capacity;  // uints between lists
  uint add;            // 1: sums += the weights; 0: sums = the weights
};

struct ArgMaxParams {
  uint cols;
};

struct LogProbParams {
  uint cols;
};

struct CopyParams {
  uint cols;
  uint src_stride, dst_stride;
  uint from_logit_row;  // 1: source rows start at first_logit_row
  uint to_ring_row;     // 1: destination rows start at ring_row
  uint rows;
};

#ifdef __cplusplus
}  // namespace thimble
#endif

#endif
