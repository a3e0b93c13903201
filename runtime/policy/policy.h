// A policy is an object that implements one of two interfaces, in one file of this folder. A RetentionPolicy
// scores the cached entries, and the pool is compacted to the entries with the highest scores. A
// SelectionPolicy makes the list of entries that a step attends to. No other code asks which policy it is.
// When a retention evicts and scores is data, in its row in names.h. A retention that computes its scores on
// the host also implements HostControl.
//
// In the life of a session, the functions are called in this order: resolve (options), place (arrays), record
// (ops of a step), record_upkeep (ops outside a step), fill (its values of StepParams), cost, carry (arrays
// that a saved session stores).
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

// What the planner and the engine know of a session. `options` are resolved.
struct Setting {
  const Model& model;
  const SessionOptions& options;
  const Dimensions& dimensions;
};

// The rotation of a layer's queries and keys.
inline RopeParams rope_params(const Setting& s, const AttentionMixer& m, const Layout& at, uint32_t layer) {
  const RopeScheme& rope = s.model.rope_of(m);
  return {.mode = s.options.positions == Positions::kOriginal ? kRopeOriginal : kRopeList,
          .pairing = rope.pairing,
          .n_rot = m.rotates ? rope.n_rot : 0,
          .query_weight = m.norms_after_rotation ? at.query_weights + layer * m.head_dim : 0};
}

// One layer of a step that is being recorded.
struct LayerStep {
  Recorder& recorder;
  const Setting& setting;
  const Weights& weights;
  const Layout& at;
  uint32_t layer;
  // Whether the step's rows are in the chunk buffer. Otherwise they are generated tokens, one or a draft,
  // already appended to the pool.
  bool chunk;
  // Whether the rows attend to keys and values that are made of latent channels in every head.
  bool lifts = false;

  const LayerPool& pool() const { return at.layers[layer]; }
  // The layer's rows in the chunk buffer; empty arrays in a step without a chunk.
  const ChunkRows& chunk_rows() const {
    static const ChunkRows none;
    return chunk ? at.chunks[layer] : none;
  }
  const Layer& model_layer() const { return setting.model.layers[layer]; }
  // The layer's attention. Policies only get layers that have one; a retention, only those with own keys.
  const AttentionMixer& attention() const { return *model_layer().attention(); }
  // The row of its first head in the table of HeadState.
  uint32_t head_state() const { return attention().first_run; }
  // The input of the mixers.
  const View& input() const { return model_layer().norm ? at.norm : at.x; }
  // The rotation of the layer's queries and keys. rope_table() is the table that it reads.
  RopeParams rope() const { return rope_params(setting, attention(), at, layer); }
  const View& rope_table() const { return attention().window && at.window_rope ? at.window_rope : at.rope; }
  // Whether all heads of the layer hold equally many entries in every step.
  bool has_equal_heads() const {
    const HeadRun* run = &setting.dimensions.runs[head_state()];
    if (!attention().window && setting.options.recalls_per_head()) return false;
    return (attention().window || !setting.dimensions.moves) &&
           std::all_of(run, run + attention().kv_heads,
                       [&](const HeadRun& r) { return r.capacity == run->capacity && r.keep == run->keep; });
  }
};

// The state of a session between two steps.
struct Held {
  const Setting& setting;
  std::span<const HeadRun> runs;
  std::span<const uint32_t> entries;  // held by each head
  uint64_t position = 0;              // tokens that were read
  uint32_t unscored = 0;              // most recent tokens, whose retention scores are not computed yet
  uint32_t generation = 0;            // the value that fill() gets
};

// The description of a step for a retention policy that computes its scores on the host.
struct HostStep {
  std::span<const int32_t> held;  // positions of the entries, equal in all heads
  uint64_t position;              // of the first token that is read for the first time
  uint32_t tokens;                // number of tokens that are read for the first time
  bool generates;                 // whether the step reads one generated token
};

// The second interface of a retention policy that computes its scores on the host, from embeddings. The
// scores are the same in all layers and heads, and the last `stabilizers` entries are always protected.
class HostControl {
 public:
  virtual ~HostControl() = default;
  virtual void place_on_host(const Setting&, Arena& io) = 0;
  // Gets the tokens in the order in which they are read, with their embeddings [tokens][d_model]. A call
  // replaces the tokens that earlier calls gave for its first position and later ones.
  virtual void note(uint64_t position, std::span<const int32_t> tokens,
                    std::span<const float> embeddings) = 0;
  // Runs before the step's ops and writes their input. It returns tokens if the step reads evicted tokens
  // again: at most options.rebuild of these, and then the step's token. Otherwise it returns an empty span.
  virtual std::span<const int32_t> prepare(const HostStep&) = 0;
  // Records ops before the layers of a step that reads evicted tokens again.
  virtual void record_rows(Recorder&) const = 0;
  // The rows of such a step.
  struct Rebuilt {
    View positions;  // of the rows, int32
    View index;      // indices of the rows in the list, uint
    View list;       // all entries and rows, ordered by position, [kv head][list_capacity]
    uint32_t list_capacity = 0;
  };
  virtual Rebuilt rebuilt() const = 0;
};

class RetentionPolicy {
 public:
  virtual ~RetentionPolicy() = default;
  // Fills in defaults. Refuses contradictory options with one sentence. It is called again once the pool is
  // known.
  virtual Status resolve(const Model&, SessionOptions&) const = 0;
  virtual void place(const Setting&, Arena& /*pool*/, Arena& /*workspace*/) {}
  // Records the ops that score the step's rows. The scores go into the `cis` of the chunk or of the pool.
  virtual void record(const LayerStep&) const {}
  // Records ops that read the step's queries as attention does. They are separate from record() because a
  // model may scale queries by their position between the two calls.
  virtual void record_queries(const LayerStep&) const {}
  // Records the ops that score all entries of the pool and of the chunk again, right before a compaction.
  virtual void record_eviction(const LayerStep&) const {}
  // The scores by which an eviction ranks the entries of the pool and of the chunk.
  struct Scores {
    View pool, chunk;  // shaped like LayerPool::cis and ChunkRows::cis
  };
  virtual Scores ranked_by(const LayerStep& l) const { return {l.pool().cis, l.chunk_rows().cis}; }
  // Records the ops that score the waiting tokens, if the policy scores later than at once. In a second
  // reading it finds their rows where record() finds the rows of a chunk.
  virtual void record_upkeep(const LayerStep&) const {}
  virtual void fill(const SessionOptions&, StepParams&) const {}
  // Whether a step may read rows that are not counted afterwards. A policy that stores what belongs to the
  // last row may not.
  virtual bool takes_drafts() const { return true; }
  // The policy's second interface, if its scores are computed on the host.
  virtual HostControl* host() { return nullptr; }
  // The cost of scoring in all layers: bytes for a step, operations for one row.
  virtual Cost cost(const SessionOptions&) const { return {}; }
  // Lists the policy's arrays that later steps read, besides the pool. The list must depend on `held` alone,
  // so that restoring a session finds the same arrays.
  virtual void carry(const Held& /*held*/, std::vector<View>&) const {}
  // Whether the policy may continue with these bytes of its arrays: no index in them may be out of range.
  using Bytes = std::span<const std::byte>;
  virtual bool can_carry(const Held& /*held*/, std::span<const Bytes>) const { return true; }
};

// Statistics of a selection policy over generated tokens.
struct SelectionStats {
  uint64_t selected = 0;  // entries that the last token attended to, summed over lists
  uint64_t lists = 0;
  uint64_t hits = 0, misses = 0;  // of the selection cache, summed over layers
};

class SelectionPolicy {
 public:
  virtual ~SelectionPolicy() = default;
  // Like RetentionPolicy::resolve(). It is called after the retention policy has resolved its options.
  virtual Status resolve(const Model&, bool evicts, SessionOptions&) const = 0;
  // The length of the longest list. UINT32_MAX: the policy makes no lists, and every entry is attended to.
  virtual uint32_t most_attended(const SessionOptions&) const { return UINT32_MAX; }
  bool selects(const SessionOptions& o) const { return most_attended(o) != UINT32_MAX; }
  // Whether the policy also makes lists for chunks. Otherwise it makes them only for generated tokens.
  virtual bool selects_chunks(const SessionOptions&) const { return false; }
  // An upper bound on the positions in a vote, which the backend must support. 0: the policy has no vote over
  // positions.
  virtual uint32_t vote_positions(const Setting&) const { return 0; }
  // The number of rotary positions that the policy needs in addition to those of attention.
  virtual uint32_t rope_positions(const SessionOptions&) const { return 0; }
  virtual void place(const Setting&, Arena& /*pool*/, Arena& /*workspace*/) {}
  // The list for one layer of a step, [kv head][list_capacity]. Empty: every entry is attended to.
  struct List {
    View entries;
    uint32_t capacity = 0;
  };
  virtual List record(const LayerStep&) const { return {}; }
  // The latest list that record() made for the layer. If the session watches, the list is kept between steps.
  virtual List last_list(uint32_t /*layer*/) const { return {}; }
  // Records ops that run once the step's rows are in the pool, whether they were appended or compacted.
  virtual void record_upkeep(const LayerStep&) const {}
  // `generation` changes whenever entries move.
  virtual void fill(const SessionOptions&, uint32_t /*generation*/, StepParams&) const {}
  // The cost of one selection among `entries` entries, in all layers.
  virtual Cost cost(const Model&, const SessionOptions&, double /*entries*/) const { return {}; }
  // Forgets what the policy stores of earlier tokens.
  virtual Status clear(Device&) const { return {}; }
  virtual Status read_stats(Device&, SelectionStats&) const { return {}; }
  // Like RetentionPolicy::carry().
  virtual void carry(const Held& /*held*/, std::vector<View>&) const {}
  // Whether the policy may continue with these bytes of its arrays: no index in them may exceed the entries
  // that heads hold.
  using Bytes = std::span<const std::byte>;
  virtual bool can_carry(const Held& /*held*/, std::span<const Bytes>) const { return true; }

 protected:
  // Adds the counts of the current lists.
  static Status add_list_counts(Device&, const List&, SelectionStats&);
};

// The policies of one session.
struct Policies {
  std::unique_ptr<RetentionPolicy> retention;
  // The retention policy of windowed layers, whatever the user chose.
  std::unique_ptr<RetentionPolicy> windowed;
  std::unique_ptr<SelectionPolicy> selection;

  explicit Policies(const SessionOptions&);
  RetentionPolicy& of(const AttentionMixer& m) const { return m.window ? *windowed : *retention; }
  HostControl* host() const { return retention->host(); }
  // Refuses policies and options that do not fit each other. Both policies have resolved their options.
  Status check(const SessionOptions&) const;
};

// The traits of a layer's retention policy.
inline RetentionTraits traits_of(const AttentionMixer& m, const SessionOptions& o) {
  return traits(m.window ? Retention::kWindow : o.retention);
}
// The largest number of tokens that wait for their scores. 0: no token waits.
uint32_t unscored_rows(const SessionOptions&);
// The largest number of tokens that wait for a second reading. 0: the policy reads no token twice.
uint32_t again_rows(const SessionOptions&);
// The number of generated tokens that wait, if they are scored in batches. One batch reads a retainer's
// weights once for all of them (methods 2.7).
inline constexpr uint32_t kBatchRows = 64;

// The number of first entries that stay by default, whatever their scores. Models pay much attention to them
// (StreamingLLM), and quality drops with fewer.
inline constexpr uint32_t kSinks = 4;
// Refuses a retention without the trained heads that it needs (RetentionTraits::takes).
Status check_heads(const SessionOptions&);
// Sets what all evicting retention policies share: the defaults of local, protect_init and max_new. Once the
// pool is known, it also checks that the stabilizers leave entries to choose from.
Status resolve_eviction(SessionOptions&);
// Divides the pool by the shares in the retainer's file, if it has any.
void take_shares(SessionOptions&);
// The number of entries per head with which no step exceeds the model's trained positions, if positions
// number the attended entries. The entries are followed by a chunk, or by the last tokens of the prompt and
// the answer.
uint32_t trained_entries(const Model&, const SessionOptions&);
// Records a score of the step's rows that needs no trained head: kCisPosition or kCisHash.
void store_plain_score(const LayerStep&, uint32_t kind);
// Records the attention weight of each entry of the layer (query_score). The weights are those of `query`,
// which belongs to the last entry. If `query` is empty, they are those of the step's rows, which read the
// entries before them again.
void record_query_score(const LayerStep&, const View& query, const View& sums);
// Refuses that all heads of a layer keep the same entries, since keys are compared within one head.
Status check_scope_of_keys(const SessionOptions&);
// The scratch memory of record_key_diff(), which records KeyDiff's scores of all entries of the layer
// (key_diff).
struct KeySums {
  uint32_t blocks = 0;
  View sums;  // f32 [kv heads][blocks][head_dim]
};
KeySums place_key_sums(const Setting&, Arena& workspace);
void record_key_diff(const LayerStep&, const KeySums&, const RetentionPolicy::Scores& into);
// The retention policy by trained scores, for mix.
std::unique_ptr<RetentionPolicy> make_locret_retention();

}  // namespace thimble
