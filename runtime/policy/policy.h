// What a policy is: one object behind one of two interfaces, in one file of this folder. Everything is score,
// top-k, list: a retention scores the cached entries, and the pool is compacted to the best; a selection
// makes the list that a step attends to. Nobody else asks which policy it is.
//
// The verbs, in the order of a session's life: resolve (options), place (arrays), record (the ops of a step),
// upkeep (ops beside it), fill (its values of a step), cost, carry (what a saved session takes along).
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "runtime/memory/arena.h"
#include "runtime/memory/layout.h"
#include "runtime/model/cost.h"
#include "runtime/policy/session_options.h"

namespace thimble {

// A session as it is planned; `options` are resolved.
struct Setting {
  const Model& model;
  const SessionOptions& options;
  const Dimensions& dimensions;
};

// One layer of a step that is being recorded.
struct LayerStep {
  Recorder& recorder;
  const Setting& setting;
  const Weights& weights;
  const Layout& at;
  uint32_t layer;
  bool chunk;  // its rows lie in the chunk buffer; else it is a token, already appended to the pool

  const ModelShape& shape() const { return setting.model.shape; }
  const LayerPool& pool() const { return at.layers[layer]; }
  const LayerWeights& model_layer() const { return setting.model.layers[layer]; }
  uint32_t head_state() const { return layer * shape().kv_heads; }
  // What W_q reads.
  const View& input() const { return model_layer().attn_norm ? at.norm : at.x; }
  // How its ops rotate, and by which table.
  RopeParams rope() const {
    return {.mode = setting.options.positions == Positions::kOriginal ? kRopeOriginal : kRopeList,
            .pairing = setting.model.rope.pairing,
            .n_rot = model_layer().rotates ? setting.model.rope.n_rot : 0};
  }
  const View& rope_table() const { return model_layer().window && at.window_rope ? at.window_rope : at.rope; }
  // Whether all heads of the layer hold equally many entries, always.
  bool has_equal_heads() const {
    const HeadRun* run = &setting.dimensions.runs[head_state()];
    return (model_layer().window || !setting.dimensions.moves) &&
           std::all_of(run, run + shape().kv_heads,
                       [&](const HeadRun& r) { return r.capacity == run->capacity && r.keep == run->keep; });
  }
};

// What a session holds between two steps.
struct Held {
  const Setting& setting;
  std::span<const HeadRun> runs;
  std::span<const uint32_t> entries;  // of each head, [layer][kv head]
  uint64_t position = 0;              // tokens read
  uint32_t unscored = 0;              // last tokens whose retention scores are still to come
  uint32_t generation = 0;            // as fill() is told
};

// A step, to a retention whose scores are made on the host.
struct HostStep {
  std::span<const int32_t> held;  // positions of the entries, the same in all heads
  uint64_t position;              // of the first of the tokens that are read for the first time
  uint32_t tokens;                // so many
  bool generates;                 // one, behind the text
};

class RetentionPolicy {
 public:
  virtual ~RetentionPolicy() = default;
  // Fills in defaults and refuses what contradicts itself, in one sentence. Called again once the pool is
  // known.
  virtual Status resolve(const Model&, SessionOptions&) const = 0;
  // Whether anything is ever dropped; else there are no scores, and a full pool is an error.
  virtual bool evicts() const { return true; }
  virtual void place(const Setting&, Arena& /*pool*/, Arena& /*workspace*/) {}
  // Scores the step's rows into the chunk's or the pool's `cis`.
  virtual void record(const LayerStep&) const {}
  // Reads the step's queries as attention does: behind record() a model may make them larger by their
  // position.
  virtual void record_queries(const LayerStep&) const {}
  // Scores anew what the pool and a chunk hold, right before they are compacted.
  virtual void record_eviction(const LayerStep&) const {}
  // The scores by which an eviction orders the entries of the pool and of the chunk.
  struct Scores {
    View pool, chunk;  // as LayerPool::cis; as Layout::chunk_cis
  };
  virtual Scores ranked_by(const LayerStep& l) const {
    return {l.pool().cis, l.chunk ? l.at.chunk_cis : View{}};
  }
  // Tokens whose scores wait, at most, until upkeep makes them in one batch; 0: none wait. They are decoded
  // ones, or where the policy reads again all that were read.
  virtual uint32_t upkeep_rows(const SessionOptions&) const { return 0; }
  virtual void record_upkeep(const LayerStep&) const {}
  // Whether upkeep is a second reading: a step over the tokens that wait, behind all that was read, which
  // attends to everything and whose keys and values are dropped; record_upkeep finds its rows as record does
  // a chunk's.
  virtual bool reads_again() const { return false; }
  virtual void fill(const SessionOptions&, StepParams&) const {}
  // Whether scores are made on the host, from embeddings, and are the same for all layers and heads. Then
  // each generated token is compacted away or another one for it, and the last `stabilizers` entries are
  // always protected; and
  //  - note() is told of tokens as they are read, in order: [tokens][d_model]; what it was told of this
  //    position and later ones before is void;
  //  - prepare(), before the step's ops run, writes what they read. It returns the step's tokens where some
  //  of
  //    them, all but the last, were released and are read again, at most 1 + options.rebuild; else none;
  //  - record_rows() is recorded before the layers of a step with such rows, which `rebuilt` describes.
  virtual bool scores_on_host() const { return false; }
  virtual void place_on_host(const Setting&, Arena& /*io*/) {}
  virtual void note(uint64_t /*position*/, std::span<const int32_t> /*tokens*/,
                    std::span<const float> /*embeddings*/) {}
  virtual std::span<const int32_t> prepare(const HostStep&) { return {}; }
  virtual void record_rows(Recorder&) const {}
  struct Rebuilt {
    View positions;  // of the rows, int32
    View index;      // of the rows in the list, uint
    View list;       // of all entries and rows by position, [kv head][list_capacity]
    uint32_t list_capacity = 0;
  };
  virtual Rebuilt rebuilt() const { return {}; }
  // What scoring costs in all layers: bytes once a step, operations for one row.
  virtual Cost cost(const SessionOptions&) const { return {}; }
  // Lists what of its arrays the next steps read, beside the pool. What follows from `held` alone, so that a
  // saved session's bytes find their places again.
  virtual void carry(const Held& /*held*/, std::vector<View>&) const {}
  // Whether it may go on with these bytes of what it carries: that no index in them leads out of anything.
  using Bytes = std::span<const std::byte>;
  virtual bool can_carry(const Held& /*held*/, std::span<const Bytes>) const { return true; }
};

// What a selection knows of the tokens that were generated.
struct SelectionStats {
  uint64_t selected = 0;  // entries that the last token attended to, summed over lists
  uint64_t lists = 0;
  uint64_t hits = 0, misses = 0;  // of its cache, summed over layers
};

class SelectionPolicy {
 public:
  virtual ~SelectionPolicy() = default;
  // As for a retention, which has resolved its options before.
  virtual Status resolve(const Model&, bool evicts, SessionOptions&) const = 0;
  // The longest list that it makes; UINT32_MAX: it lists nothing, and everything is attended.
  virtual uint32_t most_attended(const SessionOptions&) const { return UINT32_MAX; }
  bool selects(const SessionOptions& o) const { return most_attended(o) != UINT32_MAX; }
  // Whether it lists for chunks, too, and not for generated tokens alone.
  virtual bool selects_chunks(const SessionOptions&) const { return false; }
  // Bound on positions that the backend must serve in a vote over positions; 0: there is none.
  virtual uint32_t vote_positions(const Setting&) const { return 0; }
  // Rotary positions that it asks for beyond those of attention.
  virtual uint32_t rope_positions(const SessionOptions&) const { return 0; }
  virtual void place(const Setting&, Arena& /*pool*/, Arena& /*workspace*/) {}
  // The list for one layer of a step, [kv head][list_capacity]; empty: everything is attended.
  struct List {
    View entries;
    uint32_t capacity = 0;
  };
  virtual List record(const LayerStep&) const { return {}; }
  // What record() listed for the layer last; kept from step to step where the session watches.
  virtual List last_list(uint32_t /*layer*/) const { return {}; }
  // After the step's rows are in the pool: appended, or moved there by a compaction.
  virtual void record_upkeep(const LayerStep&) const {}
  // `generation` changes whenever entries moved.
  virtual void fill(const SessionOptions&, uint32_t /*generation*/, StepParams&) const {}
  // What a choice costs in all layers among so many entries.
  virtual Cost cost(const Model&, const SessionOptions&, double /*entries*/) const { return {}; }
  // Forgets what it remembers of earlier tokens.
  virtual Status clear(Device&) const { return {}; }
  virtual Status read_stats(Device&, SelectionStats&) const { return {}; }
  // As a retention's.
  virtual void carry(const Held& /*held*/, std::vector<View>&) const {}
  // Whether it may go on with these bytes of what it carries: that no index in them leads out of what heads
  // hold.
  using Bytes = std::span<const std::byte>;
  virtual bool can_carry(const Held& /*held*/, std::span<const Bytes>) const { return true; }

 protected:
  // Adds what these lists say now.
  static Status add_list_counts(Device&, const List&, SelectionStats&);
};

// The policies of one session.
struct Policies {
  std::unique_ptr<RetentionPolicy> retention;
  std::unique_ptr<RetentionPolicy>
      windowed;  // of layers that attend to their last tokens alone, whatever the user's is
  std::unique_ptr<SelectionPolicy> selection;

  explicit Policies(const SessionOptions&);
  RetentionPolicy& of(const LayerWeights& layer) const { return layer.window ? *windowed : *retention; }
  // Whether any layer drops entries.
  bool evict(const Model&) const;
};

// First entries that stay by default, whatever their score: models pay much attention to them (StreamingLLM),
// and fewer hurt.
inline constexpr uint32_t kSinks = 4;
// What retentions that evict share: defaults of local, protect_init and max_new; and, once the pool is known,
// whether the stabilizers leave anything to choose.
Status resolve_eviction(SessionOptions&);
// Divides the pool as the retainer's file says, if it does.
void take_shares(SessionOptions&);
// Entries of a head with which no step passes the positions that the model was trained for, where those count
// what is attended to: behind the entries stand a chunk, or a prompt's last tokens and the answer.
uint32_t trained_entries(const Model&, const SessionOptions&);
// Records the score of the step's rows that needs no trained head: kCisPosition, kCisHash.
void store_plain_score(const LayerStep&, uint32_t kind);
// Records how much weight the layer's attention gives to entries (query_score): by this query of the last
// entry; or where there is none by those of the step's rows, which read the entries before them again.
void record_query_score(const LayerStep&, const View& query, const View& sums);
// Scratch of record_key_diff(), which records KeyDiff's scores of all entries of the layer (key_diff).
struct KeySums {
  uint32_t blocks = 0;
  View sums;  // f32 [kv heads][blocks][head_dim]
};
KeySums place_key_sums(const Setting&, Arena& workspace);
void record_key_diff(const LayerStep&, const KeySums&, const RetentionPolicy::Scores& into);
// The retention by trained scores, for mix.
std::unique_ptr<RetentionPolicy> make_locret_retention();

}  // namespace thimble
