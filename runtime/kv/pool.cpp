#include "runtime/kv/pool.h"

namespace thimble {

void Dimensions::use(uint32_t now) {
  if (divisions.empty()) return;
  division = now;
  text = divisions[now].text;
  runs = divisions[now].runs;
}

bool Dimensions::outgrown(uint64_t longer) {
  uint32_t next = division;
  while (next + 1 < divisions.size() && divisions[next].text < longer) ++next;
  if (next == division) return false;
  use(next);
  return true;
}

}  // namespace thimble
