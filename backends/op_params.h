// The parameter block of every op and the per-step values: one header for C++, CUDA and GLSL.
// Each block is at most 128 bytes (the smallest push constant range that Vulkan promises) of uint, int and
// float.
#ifndef THIMBLE_OP_PARAMS_H
#define THIMBLE_OP_PARAMS_H

#ifdef __cplusplus
#include <cstdint>
namespace thimble {
typedef uint32_t uint;
#endif

// Values that change from submit to submit. They lie in device memory with the table of HeadState behind
// them, so a recorded program can be replayed.
struct StepParams {
  uint n_rows;           // tokens of this step; programs are recorded for at least as many
  int position;          // original position of the first row
  uint n_init;           // select: first units always attended (sinks); a unit is an entry, or a page of them
  uint n_local;          // select: last units always attended, the step's rows among them
  uint select_k;         // select: units picked from the middle
  float theta;           // select: cosine at which the cached selection is used again; >= 1 never
  uint generation;       // select: changes whenever pool entries moved, so cached indices are stale
  uint first_logit_row;  // tail: first row that gets logits
  uint n_logit_rows;     // tail: rows that get logits
  uint ring_row;         // decode: row of the ring that keeps what the retainer reads of this token
  uint seed;             // random retention
};

// One KV head's run of entries in its layer's arrays. Op parameters name the row of their KV head 0 in the
// table as `head_state`; the rows of the other heads follow.
struct HeadState {
  uint first;          // entry of the layer's arrays where the run begins
  uint capacity;       // entries that it has room for
  uint n_entries;      // entries that it holds before this step
  uint keep;           // retain: entries that stay, of n_entries + n_rows
  uint protect_first;  // retain: first entries that stay whatever their score
  uint protect_last;   // retain: last entries that stay whatever their score
};

// Which count of StepParams bounds an op's rows.
#define kStepRows 0u   // n_rows
#define kLogitRows 1u  // n_logit_rows

// Rotary position: which position a key has.
#define kRopeList 0u      // its index in the attended list; keys are cached unrotated
#define kRopeOriginal 1u  // its position in the text; keys are cached rotated

// Pairs of channels that rotate together.
#define kRopeAdjacent 0u  // (2i, 2i + 1), llama files
#define kRopeHalves 1u    // (i, i + n_rot / 2), the others

#define kActSilu 0u
#define kActGelu 1u     // tanh form
#define kActGeluErf 2u  // erf form; not of glu
#define kActClamped \
  3u  // gpt-oss: a = min(g, 7), a sigmoid(1.702 a) (clamp(u, -7, 7) + 1); of expert_glu alone

#define kVoteLayer 0u  // one set of positions for the layer (methods 6.1 b)
#define kVoteGroup 1u  // each KV head votes within its group (6.1 a)

// What a router makes of its logits.
#define kRouteSoftmax 0u          // the best of a softmax over all experts, with its shares
#define kRouteSoftmaxOfChosen 1u  // the best logits, with the softmax over them alone
#define kRouteSigmoid 2u          // the best of sigmoids

#define kCisHead 0u      // output of the retainer
#define kCisPosition 1u  // the token's position: keeps the most recent
#define kCisHash 2u      // a hash of (seed, layer, head, position): random eviction

#define kIntoChunk 0u  // rows go to the chunk buffer, from row 0
#define kIntoPool 1u   // rows go to the pool, from entry n_entries
#define kIntoRing 2u   // scores of the last n_rows pool entries (cis_store)

// How many top_k lists.
#define kKeepOfHead 0u  // HeadState: `keep` of n_entries + n_rows, protect_first and protect_last among them
#define kKeepOfStep \
  1u  // StepParams: n_init + select_k + n_local, the first n_init and the last n_local among them

#define kFromView 0u  // attention reads the view that kv_view made
#define kFromPool 1u  // attention gathers and rotates from the pool itself (one row)

// How a model rotates; part of every op that does. The table is [64 + blocks][n_rot / 2]{cos, sin}, see
// backend.h.
struct RopeParams {
  uint mode;     // kRopeList, kRopeOriginal
  uint pairing;  // kRopeAdjacent, kRopeHalves
  uint n_rot;    // channels that rotate, even, <= head_dim; the others pass
};

struct EmbedParams {
  uint cols;
};

struct RmsNormParams {
  uint cols;
  uint groups;  // vectors of `cols` in a row, one after the other: 1, or heads for the per-head q and k norm
  uint row_stride;  // elements from row to row, in x and in y
  float eps;
  uint rows;  // kStepRows, kLogitRows
  uint add;   // 1: y += the normed x; 0: y = it
};

struct ScaleParams {
  uint cols;
  uint row_stride;  // elements from row to row, in x and in y
  float scale;
  float growth;  // of the scale with a row's position, kStepRows; 0: none
  uint period;   // positions with the same scale
  float cap;     // the scaled x becomes cap * tanh(x / cap); 0: it stays
  uint add;      // 1: y += that; 0: y = that
  uint rows;
};

struct LinearParams {
  uint in_cols;
  uint out_cols;
  uint x_stride;  // elements from row to row of x
  uint y_stride;  // elements from row to row of y
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
  uint chosen;  // of them, for a row
  uint kind;    // kRouteSoftmax, kRouteSoftmaxOfChosen, kRouteSigmoid
  uint share;   // 1: the weights of a row are divided by their sum
  float scale;  // of the weights, after that
};

struct ExpertGluParams {
  uint in_cols;
  uint out_cols;
  uint act;
  uint experts;
  uint chosen;
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

// The heads an op works on: a backend whose bindings are limited calls it for a few heads at a time.
struct KvAppendParams {
  uint first_head, heads;  // KV heads
  uint head_dim;
  uint row_stride;          // elements from row to row of qkv
  uint k_column, v_column;  // where k and v of head 0 start in a row
  uint chunk_capacity;      // kIntoChunk: rows from head to head in k, v, pos
  uint head_state;
  uint into;        // kIntoChunk, kIntoPool
  RopeParams rope;  // rotates only under kRopeOriginal
};

struct SinkScoreParams {
  uint heads;   // KV heads
  uint group;   // queries to a KV head
  uint width;   // channels of queries, keys and sinks
  uint sinks;   // to a KV head
  float eps;    // of the norms
  float scale;  // 1 / sqrt(width)
};

struct CisStoreParams {
  uint first_head, heads;
  uint kind;         // kCisHead, kCisPosition, kCisHash
  uint share_heads;  // 1: every head gets the largest score of all heads (retention scope layer)
  uint layer;
  uint chunk_capacity;  // kIntoChunk: scores from head to head
  uint head_state;
  uint into;  // kIntoChunk, kIntoPool, kIntoRing
};

struct GivenScoreParams {
  uint first_head, heads;  // KV heads
  uint chunk_capacity;     // scores from head to head in the chunk
  uint head_state;
};

struct KvViewParams {
  uint first_head, heads;
  uint head_dim;
  uint chunk_capacity;  // rows from head to head in the chunk buffer
  uint head_state;
  uint first_entry, view_capacity;  // this pass shows list entries [first_entry, first_entry + view_capacity)
  uint list_capacity;
  RopeParams rope;
};

struct AttentionParams {
  uint first_head, heads;  // KV heads
  uint group;              // query heads to a KV head
  uint head_dim;
  uint row_stride;   // elements from row to row of q
  uint y_stride;     // elements from row to row of y
  uint source;       // kFromView, kFromPool
  uint first_entry;  // kFromView: list index of the view's first entry; m, l, o carry on from earlier passes
  uint view_capacity;  // kFromView: entries from head to head in k and v
  uint head_state;
  uint list_capacity;
  uint window;       // a row sees its own list index and the window - 1 before it; 0: all before it
  uint equal_heads;  // 1: all heads hold equally many entries in every step, so their work need not be shared
  float scale;       // usually 1 / sqrt(head_dim)
  float cap;         // scaled logits become cap * tanh(logit / cap); 0: they stay
  RopeParams rope;
};

// Rows that kv_merge puts into their places at most.
#define kMostMergedRows 64u

struct KvMergeParams {
  uint first_head, heads;  // KV heads
  uint head_dim;
  uint head_state;
};

struct KvCompactParams {
  uint first_head, heads;
  uint head_dim;
  uint chunk_capacity;  // rows from head to head in the chunk buffer
  uint head_state;
  uint list_capacity;
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
  uint score_capacity;  // scores from query head to query head
  uint equal_heads;     // as in AttentionParams
  float scale;          // 1 as published, or 1 / sqrt(head_dim)
  RopeParams rope;
};

struct VoteParams {
  uint heads;  // KV heads
  uint group;
  uint head_state;
  uint scope;           // kVoteLayer (asks for heads with equal runs), kVoteGroup
  uint page;            // entries to a unit that is voted for: 1, or a page (kVoteGroup)
  uint score_capacity;  // scores from query head to query head
  uint vote_capacity;   // votes from KV head to KV head (group), or positions (layer)
  uint window;          // max-pool over votes; 0: none (methods 3.7)
};

struct TopKParams {
  uint heads;
  uint head_state;
  uint keep;            // where it says how many are listed: kKeepOfHead, kKeepOfStep
  uint page;            // entries to a score: 1, or a page, whose entries are all listed (kKeepOfStep)
  uint by_position;     // 1: one score for a position, of all heads; 0: one for an entry or page of each head
  uint in_runs;         // 1: a head's scores lie in its run, as cis does; 0: score_capacity from head to head
  uint score_capacity;  // scores from head to head, or positions
  uint chunk_capacity;  // chunk_scores: from head to head
  uint list_capacity;   // uints from list to list: count, then entries
};

// Pages of `page` entries from a run's first entry on; the last one may hold fewer. Head h's begin at page
// first / page + h of the layer's bounds.
struct PageBoundsParams {
  uint first_head, heads;
  uint head_dim;
  uint head_state;
  uint page;
  uint all;  // 1: of the `keep` entries that an eviction left; 0: from the page of entry n_entries on, which
             // the step appended
};

struct PageScoreParams {
  uint first_head, heads;
  uint group;
  uint head_dim;
  uint row_stride;
  uint head_state;
  uint page;
  uint score_capacity;  // scores from query head to query head
  float scale;          // 1 / sqrt(head_dim)
  RopeParams rope;
};

struct LabelParams {
  uint heads;  // KV heads
  uint group;
  uint head_dim;
  uint row_stride;      // elements from row to row of q
  uint chunk_capacity;  // rows from head to head in the chunk's keys
  uint head_state;
  uint label_capacity;  // labels from KV head to KV head
  uint x_cols;          // elements of a row of x
  float cap;            // as in AttentionParams
  float scale;          // 1 / sqrt(head_dim)
  float least;          // no label is smaller
  RopeParams rope;      // kRopeOriginal: keys are cached rotated
};

// Entries whose keys one sum of key_diff adds.
#define kKeyDiffBlock 256u

struct KeyDiffParams {
  uint first_head, heads;  // KV heads
  uint head_dim;
  uint chunk_capacity;  // rows from head to head in the chunk's keys and scores
  uint head_state;
  uint blocks;  // sums from head to head
};

struct ScoreMixParams {
  uint first_head, heads;  // KV heads
  uint chunk_capacity;     // rows from head to head in the chunk's arrays
  uint head_state;
};

// Entries that query_score works on at a time, and sums that it makes of a query's weights at most: each of
// so many tiles.
#define kQueryScoreTile 64u
#define kQueryScoreSums 64u

// Whose queries query_score takes, and what they score: the last entry's score everything, by the mean weight
// in all heads; those of the step's rows the entries right before them, as many, by the largest logarithm of
// a weight in each KV head. kQueryHeads: the last entry's, too, but each KV head scores by itself what it
// attended to.
#define kQueryLast 0u
#define kQueryRows 1u
#define kQueryHeads 2u

struct QueryScoreParams {
  uint first_head, heads;  // KV heads; all of the layer for kQueryLast
  uint group;
  uint head_dim;
  uint row_stride;      // elements from row to row of q
  uint chunk_capacity;  // rows from head to head in the chunk's keys and scores
  uint head_state;
  uint kind;           // kQueryLast, kQueryRows, kQueryHeads
  uint rows;           // of q at most: 1, or of a step
  uint sinks;          // kQueryRows: first entries that are seen, too
  uint window;         // kQueryHeads: as attention's
  uint list_capacity;  // kQueryHeads: uints from list to list; 0: there are no lists
  float scale;         // as attention's
  float cap;
  RopeParams rope;
};

struct ScatterAddParams {
  uint first_head, heads;  // KV heads
  uint head_state;
  uint slots;          // of sums
  uint window;         // only the last so many of what a head attends to; 0: all
  uint list_capacity;  // uints from list to list
  uint add;            // 1: sums += what heads give; 0: = that
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
