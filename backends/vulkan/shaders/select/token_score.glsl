// The operands of the shaders of token_score and page_score. A workgroup has 128 threads.
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#include "../../pool_parts.h"
#define KV_FORMAT_ID 12
#include "../kv_format.glsl"
#include "../log_sum.glsl"
#include "../step.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const uint kHeadDim = 128;
layout(constant_id = 1) const uint kHeads = 4;         // query heads per pass, at most kMostHeads
layout(constant_id = 2) const bool kHasGate = false;
layout(constant_id = 3) const bool kSummed = false;    // sum_queries.comp has summed the rows
layout(constant_id = 4) const bool kAligned = false;   // rows of k consist of whole uvec4
layout(constant_id = 5) const uint kMode = kRopeList;  // RopeParams
layout(constant_id = 6) const uint kPairing = kRopeHalves;
layout(constant_id = 7) const uint kRotating = 128;
layout(constant_id = 8) const uint kLanes = 32;  // lanes per subgroup
layout(constant_id = 9) const bool kLeavesParts = false;  // parts of a group, for vote_count.comp
layout(constant_id = 10) const bool kEqualHeads = false;  // TokenScoreParams
layout(constant_id = 11) const uint kClears = 0;  // words to clear, in which vote_layer.comp counts

layout(set = 0, binding = 1, std430) readonly buffer Q { float q[]; };
layout(set = 0, binding = 2, std430) readonly buffer Sums { float sums[]; };  // [slices][query heads * head_dim]
// The runs of the window; or all bounds
layout(set = 0, binding = 3, std430) readonly buffer K { uint k[]; };
layout(set = 0, binding = 3, std430) readonly buffer K4 { uvec4 k4[]; };
layout(set = 0, binding = 4, std430) readonly buffer Rope { float rope_table[]; };
layout(set = 0, binding = 5, std430) readonly buffer Gate { uint gate[]; };
layout(set = 0, binding = 6, std430) writeonly buffer Scores { float all_scores[]; };
// [query heads][kMostScoreParts]{peak, sum}, and one counter per pass over a KV head's group.
layout(set = 0, binding = 7, std430) coherent buffer Parts { vec2 part_sums[]; };
layout(set = 0, binding = 8, std430) coherent buffer Counters { uint counters[]; };
layout(set = 0, binding = 9, std430) writeonly buffer Lse { uint lse[]; };
layout(set = 0, binding = 10, std430) writeonly buffer Cleared { uint cleared[]; };
layout(push_constant) uniform Push {
#ifdef PAGES
  PageScoreParams p;
#else
  TokenScoreParams p;
#endif
  RunWindow window;
  uint slices;
  uint base[10];
} push;

#define ROPE RopeParams(kMode, kPairing, kRotating, push.p.rope.query_weight)
#define ROPE_BASE push.base[3]
#include "../rope.glsl"
#include "../last_group.glsl"

#ifdef PAGES
const uint kRowsOfUnit = 2;  // the smallest and the largest value
#define KEY_WORDS (kHeadDim / 2)
#define read_unit unpack_halves
// Bounds are those of rotated keys, so the query is rotated to its own position.
bool rotates_query() { return kMode == kRopeOriginal; }
uint score_position() { return uint(step.position); }
uint first_row(HeadState own, uint head) { return own.first / push.p.page + head; }
uint units_of(HeadState own) { return units(step_entries(step, own), push.p.page); }
#else
#include "score_query.glsl"
const uint kRowsOfUnit = 1;
#define KEY_WORDS KV_ROW_WORDS(kHeadDim)
#ifdef BLOCKS
KV_READER(key, k, kKvFormat)
#else
#define read_unit kv_eight
#endif
bool rotates_query() { return true; }
uint first_row(HeadState own, uint head) { return run_start(own, push.window); }
uint units_of(HeadState own) { return step_entries(step, own); }
#endif

const uint kUnits = (kHeadDim + 7) / 8;  // of 8 channels, per row
