// The parameter block of every op and the per-step values: one header for C++, CUDA and GLSL.
// Each block is at most 128 bytes (the smallest push constant range that Vulkan promises) of uint, int and float.
#ifndef THIMBLE_OP_PARAMS_H
#define THIMBLE_OP_PARAMS_H

#ifdef __cplusplus
#include <cstdint>
namespace thimble {
typedef uint32_t uint;
#endif

// Values that change from submit to submit; they lie in device memory, so a recorded program can be replayed.
struct StepParams {
  uint n_rows;           // tokens of this step; programs are recorded for at least as many
  uint n_entries;        // entries in every head's pool before this step
  int position;          // original position of the first row
  uint keep;             // retain: entries that every head keeps, of n_entries + n_rows
  uint protect_first;    // retain: first entries that stay whatever their score
  uint protect_last;     // retain: last entries that stay whatever their score
  uint n_init;           // select: first entries always attended (sinks)
  uint n_local;          // select: last entries always attended, the step's rows among them
  uint select_k;         // select: entries picked from the middle
  uint vote_scope;       // select: kVoteLayer or kVoteGroup
  float theta;           // select: cosine at which the cached selection is used again; >= 1 never
  uint generation;       // select: changes whenever pool entries moved, so cached indices are stale
  uint first_logit_row;  // tail: first row that gets logits
  uint n_logit_rows;     // tail: rows that get logits
  uint ring_row;         // decode: row of the ring that keeps this token's q, k, v
  uint seed;             // random retention
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
#define kActGelu 1u  // tanh form

#define kVoteLayer 0u  // one set of positions for the layer (methods 6.1 b)
#define kVoteGroup 1u  // each KV head votes within its group (6.1 a)

#define kCisHead 0u      // output of the retaining head
#define kCisPosition 1u  // the token's position: keeps the most recent
#define kCisHash 2u      // a hash of (seed, layer, head, position): random eviction

#define kIntoChunk 0u  // rows go to the chunk buffer, from row 0
#define kIntoPool 1u   // rows go to the pool, from entry n_entries
#define kIntoRing 2u   // scores of the last n_rows pool entries (cis_store)

#define kTopKRetain 0u  // keeps `keep` of pool and chunk, protect_first and protect_last among them
#define kTopKSelect 1u  // picks select_k from the middle, between n_init and n_local

#define kFromView 0u  // attention reads the view that kv_view made
#define kFromPool 1u  // attention gathers and rotates from the pool itself (one row)

// How a model rotates; part of every op that does. The table is [64 + blocks][n_rot / 2]{cos, sin}, see backend.h.
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
  uint groups;      // vectors of `cols` in a row, one after the other: 1, or heads for the per-head q and k norm
  uint row_stride;  // elements from row to row, in x and in y
  float eps;
  uint rows;  // kStepRows, kLogitRows
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
  uint capacity;            // entries from head to head in k, v, pos
  uint into;                // kIntoChunk, kIntoPool
  RopeParams rope;          // rotates only under kRopeOriginal
};

struct CisStoreParams {
  uint first_head, heads;
  uint kind;         // kCisHead, kCisPosition, kCisHash
  uint share_heads;  // 1: every head gets the largest score of all heads (retention scope layer)
  uint layer;
  uint capacity;  // entries from head to head in cis
  uint into;      // kIntoChunk, kIntoPool, kIntoRing
};

struct KvViewParams {
  uint first_head, heads;
  uint head_dim;
  uint pool_capacity, chunk_capacity;
  uint first_entry, view_capacity;  // this pass shows list entries [first_entry, first_entry + view_capacity)
  uint list_capacity;
  RopeParams rope;
};

struct AttentionParams {
  uint first_head, heads;  // KV heads
  uint group;              // query heads to a KV head
  uint head_dim;
  uint row_stride;                  // elements from row to row of q
  uint y_stride;                    // elements from row to row of y
  uint source;                      // kFromView, kFromPool
  uint first_entry;                 // kFromView: list index of the view's first entry; m, l, o carry on from earlier passes
  uint capacity;                    // entries from head to head in k and v
  uint list_capacity;
  float scale;                      // 1 / sqrt(head_dim)
  RopeParams rope;
};

struct KvCompactParams {
  uint first_head, heads;
  uint head_dim;
  uint pool_capacity, chunk_capacity;
  uint list_capacity;
};

struct QueryGateParams {
  uint cols;  // query heads * head_dim
};

struct TokenScoreParams {
  uint first_head, heads;  // KV heads
  uint group;
  uint head_dim;
  uint row_stride;
  uint capacity;        // entries from head to head in k
  uint score_capacity;  // scores from query head to query head
  float scale;          // 1 as published, or 1 / sqrt(head_dim)
  RopeParams rope;
};

struct VoteParams {
  uint heads;  // KV heads
  uint group;
  uint capacity;        // entries from head to head in pos
  uint score_capacity;  // scores from query head to query head
  uint vote_capacity;   // votes from KV head to KV head (group), or positions (layer)
  uint window;          // max-pool over votes; 0: none (methods 3.7)
};

struct TopKParams {
  uint heads;
  uint purpose;  // kTopKRetain, kTopKSelect
  uint score_capacity;   // scores from head to head
  uint chunk_capacity;   // retain: scores of the chunk from head to head
  uint pos_capacity;     // positions from head to head
  uint list_capacity;    // uints from list to list: count, then entries
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
