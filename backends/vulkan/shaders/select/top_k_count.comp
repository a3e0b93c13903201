// top_k of many scores: counts one digit of the keys that share the previous digits; one workgroup per part
// of a head's candidates.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "top_k.glsl"
#include "top_k_parts.glsl"

void main() {
  const uint part = gl_WorkGroupID.x, head = gl_WorkGroupID.y;
  set_head(head);
  if (task() != kPick || (head > 0 && shares_threshold())) return;
  if (picks_all_or_none()) return;
  uint bits = 0;
  if (push.digit > 0) {
    const Found found = find_digits(head, push.digit - 1);
    bits = found.bits;
    if (part == 0 && thread_in_order() == 0) {
      scratch[found_at(push.digit - 1, head)] = bits;
      scratch[found_at(push.digit - 1, head) + 1] = found.last.wanted;
    }
  }
  count_keys(part_of(candidates, part, push.parts), bits, digit_width(push.digit));
  for (uint bin = thread_in_order(); bin < kBins; bin += kThreads)
    scratch[histogram_at(push.digit, head, part) + bin] = histogram[bin];
}
