// Which entries a KV head attends to. The includer has declared `uint list[]` and defines kHasList, LIST_BASE
// (the first list's first element) and LIST_CAPACITY.

// Without a list, all of `entries`.
uint list_count(uint head, uint entries) { return kHasList ? list[LIST_BASE + head * LIST_CAPACITY] : entries; }
uint list_entry(uint head, uint i) {
  return kHasList ? list[LIST_BASE + head * LIST_CAPACITY + 1 + i] : i;
}
