// The place of every array of a session: the pool and the buffers that a step works on.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "runtime/kv/pool.h"
#include "runtime/memory/layer_pager.h"
#include "runtime/memory/weight_window.h"
#include "runtime/model/model.h"

namespace thimble {

// The weights that a session's steps multiply by.
struct Weights {
  std::vector<std::shared_ptr<const PlacedTensors>> placed;
  WeightWindow window;
  // Where a step reads a tensor: in the window, if it passes through there.
  Weight of(const Tensor& t) const {
    Weight w = stored(t);
    if (const View staged = window.of(t)) static_cast<View&>(w) = staged;
    return w;
  }
  Weight stored(const Tensor& t) const {
    for (const auto& some : placed)
      if (const Weight w = some->weight(t)) return w;
    return {};
  }
  LayerPager pager;
};

// The number of rows that get logits in one pass of the tail. Scoring a text needs all logits. With 16 rows
// at a time, a 128K vocabulary takes 8 MiB, and the output matrix is read once for 16 tokens.
inline constexpr uint32_t kLogitRowsAtOnce = kMostLogitRows;
// The number of embeddings that the host reads at once, for policies that score on the host.
inline constexpr uint32_t kNotedAtOnce = 32;
// The number of entries that attention reads at once. Longer pools are read in several passes. The view of
// one layer of an 8B model, with 32768 entries, is 128 MiB in f16.
inline constexpr uint32_t kMaxViewEntries = 32768;

// The number of positions for which the host reads sums over heads at once.
inline constexpr uint32_t kPositionsAtOnce = 32768;

// The host address of a view in the io arena.
template <typename T>
T* on_host(const View& view) {
  return reinterpret_cast<T*>(static_cast<std::byte*>(view.buffer->mapped) + view.offset);
}

// The rows of a chunk in one layer, before a compaction moves them to the pool.
struct ChunkRows {
  KvArray k, v;  // [kv head][chunk][dh]
  View pos;      // int32 [kv head][chunk]
  View cis;      // f32 [kv head][chunk] retention scores; empty if nothing is evicted
};

// The buffers through which entries go to the store and come back, for one layer at a time, and the queries
// that call them back. Except for the queries and the store itself, all are in io. Empty without a store.
struct RecallViews {
  std::vector<KvArray> k, v;  // [kv head][reach][dh] of each layer, in the store's format, in one place
  View keys;                  // f32 [kv head][reach][dh]
  View pos, cis;              // [kv head][reach]
  View spilled, rows;         // uint [1 + kv head]: see kv_spill; uint [kv head]: see kv_recall
  View list;                  // [kv head][1 + reach]
  std::vector<View> queries;  // f32 [kAskingTokens][H dh] of each layer
  // If the device reads the store: the pages of each run that the step reads, uint [run], and where the store
  // has those of each layer (see attend_all). `stored` is set once there is a store.
  View pages;
  struct Stored {
    View pages, order;
    KvArray k, v;
    uint32_t page_capacity = 0, stride = 0, rows_stride = 0;
  };
  std::vector<Stored> stored;
  View window;        // in io, if the store has a file: its rows of one layer, [kv head][page]
  View asked, votes;  // if the device votes (see page_vote): uint [3], and f32 [kv head][page] of one layer
};

struct Layout {
  std::vector<LayerPool> layers;  // a layer that reads the keys of an earlier one has the arrays of that one
  // The states of each layer's recurrent mixer, in slots. Empty: it has none.
  std::vector<StateArray> states;
  // The buffers of a step's rows; f32 [chunk][...] unless noted. `qkv` holds what a mixer computes first,
  // `middle` what some mixers need in between, and `attention` what it returns.
  View x, norm, qkv, middle, attention;
  // [chunk][d_ff]; with experts: [chunk][chosen][d_ff], followed by [chunk][d_ff_shared].
  View ffn;
  // [chunk][d_model], if experts have norms of their own: the sum of their output, and of all outputs.
  View expert_sum, branch_sum;
  // With token branches: the stream before the first layer, [chunk][d_model], and the token's part and the
  // gate of one layer, [chunk][width].
  View first_x, token_part, token_gate;
  // Of a draft block: the model's last rows, [chunk + 1][d_model], in the pool because they outlast a step;
  // and the two normed halves that it joins, [chunk][2 d_model].
  View model_rows, halves;
  // With latent experts, [chunk][latent]: their input, and the sum of their output.
  View latent_x, latent_sum;
  // With experts: logits [chunk][experts], uint [experts + 1], uint and f32 [chunk][chosen]; see the op
  // `route`.
  View router_logits, shared_gate, expert_first, expert_row, expert_weight;
  View ml;                     // [chunk][H][2]
  KvArray view_k, view_v;      // [kv head][view_capacity][dh]
  KvArray lifted_k, lifted_v;  // [head][lifted_capacity][query_dim] of latent attention, or empty
  // The chunk's rows in each layer. Most layers share the same arrays. A layer whose keys are read by later
  // ones has its own, which these use too.
  std::vector<ChunkRows> chunks;
  View retain_list;                         // [kv head][1 + reach]
  View saturated;                           // one uint: the count of keys and values outside f16's range
  View logit_x;                             // [kLogitRowsAtOnce][d_model]
  View rope;                                // the RoPE table of backends/backend.h
  uint32_t query_weights = 0;               // the word of `rope` where those of layer 0 begin; 0: none
  View window_rope;                         // the table of windowed layers, if they have another one
  View scratch;                             // the backend's own scratch memory
  View logits;                              // f32 [kLogitRowsAtOnce][vocab]; in io if the host reads it there
  View tokens, targets, arg_max, log_prob;  // io: int32 [chunk], [rows]; int32, f32 [rows]
  // In io, if host and device share no memory: the first row of logits, and the embedding's rows of the
  // step's tokens, unless the device has the embedding. The same rows of the layers' embedding.
  View host_logits, embedding_rows, layer_embedding_rows;
  // Sums over heads for the positions of a slice of the text, f32 [kPositionsAtOnce].
  View position_sums;
  RecallViews recall;
  // With options.watch: the last token's queries in each layer, f32 [H dh]. Between steps, query_score
  // computes from them the sums of one layer, [H][kQueryScoreSums], and the weights of each layer, [entries
  // of the layer].
  std::vector<View> last_queries;
  View watch_sums;
  std::vector<View> watch_weights;
};

}  // namespace thimble
