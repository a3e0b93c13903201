// How workgroups share the entries that token_score reads: in parts of whole tiles, at most as many as were recorded, one after
// the other.
#include "../pool_parts.h"

// Entries that a part takes of n.
uint part_entries(uint n, uint parts) { return (n + parts * kLeastTile - 1) / (parts * kLeastTile) * kLeastTile; }
// Parts that have any.
uint busy_parts(uint n, uint parts) {
  const uint entries = part_entries(n, parts);
  return (n + entries - 1) / entries;
}
