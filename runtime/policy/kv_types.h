// The formats of a session's keys and values, layer by layer.
#pragma once

#include "runtime/model/cost.h"
#include "runtime/policy/session_options.h"

namespace thimble {

DType dtype_of(KvFormat);

// The formats in which a layer stores keys and values.
struct KvTypes {
  DType k = DType::kF16, v = DType::kF16;
  bool operator==(const KvTypes&) const = default;
};

// The formats of a layer with own keys. They are those that the options ask for, except that
// - rows that do not consist of whole blocks keep f16,
// - keys with a bias keep q8_0 instead of q4_0, and f16 if a channel of the bias is larger than 10: it takes
//   codes from the others of its block, although it is the same in all keys (Qwen2.5 has biases up to 354 in
//   a quarter of its layers), and
// - if at most half of the model's layers see the whole text, keys in all layers, and values in these layers,
//   keep q8_0 instead of q4_0. All that the model knows of earlier text goes through few layers, and those
//   with a window hold few entries.
// docs/evaluation.md has what this is worth.
KvTypes kv_types(const Model&, const AttentionMixer&, const SessionOptions&);
// The number of layers for which these are not what the options ask for.
uint32_t finer_layers(const Model&, const SessionOptions&);

// The formats in which a store of evicted entries has them: `recall_format` where the pool has f16, and
// otherwise the pool's, because an entry is encoded once.
KvTypes recall_types(const Model&, const AttentionMixer&, const SessionOptions&);

// The cost of one entry in one layer: its bytes, and the operations for one row of queries.
struct EntryCost {
  Cost keys, both;  // both: keys and values
};
EntryCost entry_cost(const Model&, const AttentionMixer&, const SessionOptions&);
// The same in all layers that attend to every entry.
EntryCost full_entry_cost(const Model&, const SessionOptions&);
// The cost of attending to one entry of each head's store.
Cost stored_entry_cost(const Model&, const SessionOptions&);

}  // namespace thimble
