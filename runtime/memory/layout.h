// Where everything of a session lies: the pool and the buffers that a step works on.
#pragma once

#include <span>

#include "runtime/kv/pool.h"
#include "runtime/model/model.h"

namespace thimble {

// What a session's steps multiply by.
struct Weights {
  std::shared_ptr<const PlacedTensors> model, retainer;  // retainer: null without
  Weight of(const Tensor& t) const {
    const Weight w = model->weight(t);
    return w || !retainer ? w : retainer->weight(t);
  }
};

// Rows that get logits in one pass of the tail. Scoring a text needs them all, 16 at a time: a 128K
// vocabulary then takes 8 MiB, and the output matrix is read once for 16 tokens.
inline constexpr uint32_t kLogitRowsAtOnce = kMostLogitRows;
// Tokens whose embeddings the host reads at a time, where it scores them.
inline constexpr uint32_t kNotedAtOnce = 32;
// Entries that attention reads at a time; longer pools are read in passes. One layer's view of 32768 entries
// of an 8B model is 128 MiB in f16.
inline constexpr uint32_t kMaxViewEntries = 32768;

// Positions for which the host asks at a time what heads give to them.
inline constexpr uint32_t kPositionsAtOnce = 32768;

// The host address of a view in the io arena.
template <typename T>
T* on_host(const View& view) {
  return reinterpret_cast<T*>(static_cast<std::byte*>(view.buffer->mapped) + view.offset);
}

struct Layout {
  std::vector<LayerPool> layers;
  // What a step's rows pass through; f32 [chunk][...] unless said otherwise.
  View x, norm, qkv, attention;
  // [chunk][d_ff], or where there are experts [chunk][chosen][d_ff] and then [chunk][d_ff_shared].
  View ffn;
  // Experts: logits [chunk][experts], uint [experts + 1], uint and f32 [chunk][chosen]; see route.
  View router_logits, expert_first, expert_row, expert_weight;
  View ml;                   // [chunk][H][2]
  KvArray view_k, view_v;    // [kv head][view_capacity][dh]
  KvArray chunk_k, chunk_v;  // [kv head][chunk]...: the chunk's rows, shared by all layers
  View chunk_pos, chunk_cis;
  View retain_list;  // [kv head][1 + reach]
  View saturated;    // one uint: numbers of keys and values beyond f16's range
  View logit_x;      // [kLogitRowsAtOnce][d_model]
  View rope;         // the table of backends/backend.h
  View window_rope;  // that of layers with a window, where it is another
  View scratch;      // the backend's own
  View logits;       // f32 [kLogitRowsAtOnce][vocab]; in io where the host reads it there
  View tokens, targets, arg_max, log_prob;  // io: int32 [chunk], [rows]; int32, f32 [rows]
  // io, where host and device share no memory: the first row of logits, and the embedding's rows of the
  // step's tokens, unless the device has the embedding.
  View host_logits, embedding_rows;
  // What heads give to the positions of a slice of the text, f32 [kPositionsAtOnce].
  View position_sums;
  // options.watch: the last token's queries in each layer, f32 [H dh]; and between steps what query_score
  // makes of them: [H][kQueryScoreSums] of one layer, and each layer's weights in [run].
  std::vector<View> last_queries;
  View watch_sums;
  std::vector<View> watch_weights;
};

}  // namespace thimble
