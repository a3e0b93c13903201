// key_diff: how unlike the mean of all keys each key is. A workgroup takes a block of entries, in two dispatches: the first
// adds their unit keys, the second adds those sums in order and scores. A subgroup reads a key.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_basic : require
#include "../step.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint kThreads = 128;  // a multiple of kLanes
layout(constant_id = 1) const uint kLanes = 32;     // of a subgroup
layout(constant_id = 2) const uint kHeadDim = 128;
layout(constant_id = 3) const bool kScores = false;  // the second dispatch
#define KV_FORMAT_ID 4
#include "../kv_format.glsl"
#include "../lanes.glsl"

layout(set = 0, binding = 1, std430) readonly buffer K { uint k[]; };             // the window's runs
layout(set = 0, binding = 2, std430) readonly buffer ChunkK { uint chunk_k[]; };  // from first_head on
layout(set = 0, binding = 3, std430) buffer Sums { float sums[]; };               // [heads][blocks][head_dim]
layout(set = 0, binding = 4, std430) writeonly buffer Cis { float cis[]; };
layout(set = 0, binding = 5, std430) writeonly buffer ChunkCis { float chunk_cis[]; };
layout(push_constant) uniform Push {
  KeyDiffParams p;
  RunWindow window;
  uint base[5];
} push;

const uint kWords = kHeadDim / 2;  // pairs of channels
shared float inverse[kKeyDiffBlock];
shared vec2 total[kWords];

// Two channels of an entry's key.
#ifdef BLOCKS
KV_READER(pool, k, kKvFormat)
KV_READER(chunk, chunk_k, kKvFormat)
vec2 channels(HeadState own, uint entry, uint word) {
  if (entry < own.n_entries)
    return pool_two(push.base[0] + (run_start(own, push.window) + entry) * KV_ROW_WORDS(kHeadDim), 2 * word);
  const uint row = gl_WorkGroupID.y * push.p.chunk_capacity + entry - own.n_entries;
  return chunk_two(push.base[1] + row * KV_ROW_WORDS(kHeadDim), 2 * word);
}
#else
vec2 channels(HeadState own, uint entry, uint word) {
  if (entry < own.n_entries) return kv_two(k[push.base[0] + (run_start(own, push.window) + entry) * kWords + word]);
  const uint row = gl_WorkGroupID.y * push.p.chunk_capacity + entry - own.n_entries;
  return kv_two(chunk_k[push.base[1] + row * kWords + word]);
}
#endif

// Where the sum of a block of the head begins.
uint sum_of(uint head, uint block) { return push.base[2] + (head * push.p.blocks + block) * kHeadDim; }

void add_unit_keys(HeadState own, uint head, uint block, uint begin, uint count) {
  const uint lane = gl_SubgroupInvocationID;
  for (uint i = gl_SubgroupID; i < count; i += kThreads / kLanes) {
    float squares = 0;
    for (uint word = lane; word < kWords; word += kLanes) {
      const vec2 x = channels(own, begin + i, word);
      squares += dot(x, x);
    }
    squares = sum_of_lanes(squares);
    if (lane == 0) inverse[i] = squares > 0 ? 1 / sqrt(squares) : 0;  // 0: it does not count
  }
  barrier();
  for (uint word = gl_LocalInvocationIndex; word < kWords; word += kThreads) {
    vec2 sum = vec2(0);
    for (uint i = 0; i < count; ++i)
      if (inverse[i] != 0) sum += inverse[i] * channels(own, begin + i, word);
    sums[sum_of(head, block) + 2 * word] = sum.x;
    sums[sum_of(head, block) + 2 * word + 1] = sum.y;
  }
  barrier();
}

void score_keys(HeadState own, uint head, uint blocks, uint begin, uint count) {
  const uint lane = gl_SubgroupInvocationID;
  for (uint word = gl_LocalInvocationIndex; word < kWords; word += kThreads) {
    vec2 sum = vec2(0);
    for (uint block = 0; block < blocks; ++block)
      sum += vec2(sums[sum_of(head, block) + 2 * word], sums[sum_of(head, block) + 2 * word + 1]);
    total[word] = sum;
  }
  barrier();
  for (uint i = gl_SubgroupID; i < count; i += kThreads / kLanes) {
    float products = 0, squares = 0, of_total = 0;
    for (uint word = lane; word < kWords; word += kLanes) {
      const vec2 x = channels(own, begin + i, word);
      products += dot(x, total[word]);
      squares += dot(x, x);
      of_total += dot(total[word], total[word]);
    }
    products = sum_of_lanes(products);
    const float lengths = sum_of_lanes(squares) * sum_of_lanes(of_total);
    const float score = lengths == 0 ? -1 : -products / sqrt(lengths);
    const uint entry = begin + i;
    if (lane != 0) continue;
    if (entry < own.n_entries)
      cis[push.base[3] + own.first + entry] = score;
    else
      chunk_cis[push.base[4] + head * push.p.chunk_capacity + entry - own.n_entries] = score;
  }
  barrier();
}

void main() {
  const uint head = push.p.first_head + gl_WorkGroupID.y;
  const HeadState own = head_states[push.p.head_state + head];
  if (!is_in(own, push.window)) return;
  const uint n = step_entries(step, own), blocks = units(n, kKeyDiffBlock);
  for (uint block = gl_WorkGroupID.x; block < blocks; block += gl_NumWorkGroups.x) {
    const uint begin = block * kKeyDiffBlock, count = min(n - begin, kKeyDiffBlock);
    if (kScores)
      score_keys(own, head, blocks, begin, count);
    else
      add_unit_keys(own, head, block, begin, count);
  }
}
