// top_k: turns scores into ascending lists; one workgroup per head.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "top_k_find.glsl"

void main() {
  set_head(gl_WorkGroupID.y);
  const uint to_do = task();
  if (to_do == kListEverything) list_everything(thread_in_order(), kThreads);
  if (to_do == kRenewLocal) renew_local();
  if (to_do != kPick) return;
  write_part(middle, picks_all_or_none() ? lowest_of_all_or_none() : find_lowest(span_of_all()), 0, true);
}
