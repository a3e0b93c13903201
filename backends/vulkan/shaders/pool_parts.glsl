// How workgroups share the entries that decode attention and token_score read: in parts of whole tiles, at most as many as
// were recorded, one after the other. pool_parts.h says the same to the host.
#include "../pool_parts.h"

// Entries that a part takes of n.
uint part_entries(uint n, uint parts) {
  const uint tiles = (n + parts * kTileKeys - 1) / (parts * kTileKeys);
  return max(tiles * kTileKeys, kLeastPart);
}
// Parts that have any.
uint busy_parts(uint n, uint parts) {
  const uint entries = part_entries(n, parts);
  return (n + entries - 1) / entries;
}
