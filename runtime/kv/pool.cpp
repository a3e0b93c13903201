#include "runtime/kv/pool.h"

namespace thimble {

uint32_t Dimensions::division_for(uint64_t tokens, uint32_t division) const {
  while (division + 1 < divisions.size() && divisions[division].text < tokens) ++division;
  return division;
}

}  // namespace thimble
