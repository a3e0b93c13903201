// top_k of many scores, last dispatch: writes the lists; one workgroup per part of a head's entries.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "top_k.glsl"
#include "top_k_parts.glsl"

// The smallest candidate that is picked, from the counts of all digits.
Lowest find_lowest(uint head) {
  const Found found = find_digits(head, kListDigits - 1);
  uint wanted = found.last.wanted;
  if (wanted == found.last.count) return Lowest(found.bits, 0);
  uint part = push.parts - 1;  // the part with the last tie that is picked
  for (;; --part) {
    const uint ties = scratch[histogram_at(kListDigits - 1, head, part) + found.last.bin];
    if (wanted <= ties) break;
    wanted -= ties;
  }
  return Lowest(found.bits, tie_from_end(found.bits, part_of(candidates, part, push.parts), wanted));
}

void main() {
  const uint part = gl_WorkGroupID.x, head = gl_WorkGroupID.y;
  set_head(head);
  const uint to_do = task();
  if (to_do == kListEverything) list_everything(part * kThreads + thread_in_order(), push.parts * kThreads);
  if (to_do == kRenewLocal && part == 0) renew_local();
  if (to_do != kPick) return;

  const Lowest lowest = picks_all_or_none() ? lowest_of_all_or_none() : find_lowest(shares_threshold() ? 0 : head);
  // Workgroups cannot wait for each other, so each counts itself how many units the parts before its own have
  // picked.
  const Range own = part_of(middle, part, push.parts);
  const uint before = count_picked(Range(middle.begin, own.begin), lowest).y;
  write_part(own, lowest, before, part == push.parts - 1);
}
