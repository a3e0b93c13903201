// page_bounds: the smallest and the largest value of each channel of a page's keys, as f16.
#version 450
#extension GL_GOOGLE_include_directive : require
#define KV_FORMAT_ID 0
#include "../kv_format.glsl"
#include "../step.glsl"

layout(local_size_x = 128) in;

layout(set = 0, binding = 1, std430) readonly buffer K { uint k[]; };  // the runs of the window
layout(set = 0, binding = 2, std430) writeonly buffer Bounds { uint bounds[]; };  // [pages of all heads][2][words of a row]
layout(push_constant) uniform Push {
  PageBoundsParams p;
  RunWindow window;
  uint base[2];
} push;

#ifdef BLOCKS
#define kHeadDim push.p.head_dim
KV_READER(key, k, kKvFormat)
// Two channels of the key whose row begins at a word of the run; blocks may go a little beyond f16's range.
vec2 channels(uint row, uint word) { return clamp(key_two(row, 2 * word), -kLargestHalf, kLargestHalf); }
#else
vec2 channels(uint row, uint word) { return kv_two(k[row + word]); }
#endif

// One thread per word of a page, which is two channels. NaN is ignored.
void main() {
  const uint head = push.p.first_head + gl_WorkGroupID.y, words = push.p.head_dim / 2;
  const HeadState own = head_states[push.p.head_state + head];
  if (!is_in(own, push.window)) return;
  const uint n = push.p.all != 0 ? min(own.keep, step_entries(step, own)) : step_entries(step, own);
  const uint first_page = push.p.all != 0 ? 0 : own.n_entries / push.p.page, end_page = units(n, push.p.page);
  const uint pages = end_page - min(first_page, end_page), stride = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
  for (uint i = gl_GlobalInvocationID.x; i < pages * words; i += stride) {
    const uint page = first_page + i / words, word = i % words;
    const uint first = page * push.p.page, end = min(first + push.p.page, n);
    vec2 low = vec2(uintBitsToFloat(0x7f800000)), high = -low;
    for (uint entry = first; entry < end; ++entry) {
      const vec2 x = channels(push.base[0] + (run_start(own, push.window) + entry) * KV_ROW_WORDS(push.p.head_dim), word);
      for (uint c = 0; c < 2; ++c) {
        if (x[c] < low[c]) low[c] = x[c];
        if (x[c] > high[c]) high[c] = x[c];
      }
    }
    const uint to = push.base[1] + (own.first / push.p.page + head + page) * 2 * words + word;
    bounds[to] = pack_halves(low.x, low.y);
    bounds[to + words] = pack_halves(high.x, high.y);
  }
}
