// The engine: the memory that a plan describes, and the steps that run in it. Sessions and the training code
// use it.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "runtime/decoder.h"
#include "runtime/kv/recall_choice.h"
#include "runtime/plan/planner.h"
#include "runtime/sequence_state.h"

namespace thimble {

// The memory that a session and its clones took from their common budget. `reserved` is counted by plans
// before allocation, `allocated` is what allocators reported.
struct Ledger {
  uint64_t limit = 0;  // 0: none
  std::atomic<uint64_t> reserved = 0, allocated = 0;
  Status take(uint64_t bytes);
};

// A step to run: segments of a program, over rows of tokens.
struct Step {
  // kNew: the rows come after the entries of the pool. kStored: the rows are the last entries of the pool.
  // kDone: the previous step ran the rows, and the step does not read the pool. kAgain: the rows replace the
  // last entries of the pool, which are theirs.
  enum class Rows { kNew, kStored, kDone, kAgain };

  Program* program = nullptr;
  uint32_t first = 0, last = 0;  // segments
  uint32_t n_rows = 0;
  Rows rows = Rows::kNew;
  uint64_t position = 0;  // of the first row in the text
  uint32_t first_logit_row = 0, n_logit_rows = 1;
  // The pool is compacted after the rows. If the rows are read again, they stay in the pool until then, in
  // layers that attend to every entry.
  bool evicts = false;
  // The rows end the prompt. No last entries are protected: the stabilizers are scored like the other entries
  // (methods 2.5).
  bool ends_prompt = false;
  // If everything is recalled: the rows attend to the store, too.
  bool reads_store = false;
};

class Engine {
 public:
  // Allocates all memory that the engine will ever need. `first`: whether this is the first engine of the
  // ledger. The ledger of a session and its clones counts the weights and the device's fixed part once, until
  // the last engine is destroyed.
  static Result<std::unique_ptr<Engine>> create(std::shared_ptr<const Model>, std::shared_ptr<Device>,
                                                MemoryPlan, Policies, std::shared_ptr<Ledger>, bool first);
  ~Engine();
  // Makes an engine like this one, in the same budget, with a copy of the sequence's data in this engine's
  // memory.
  Result<std::unique_ptr<Engine>> clone(const SequenceState&) const;

  const Model& model() const { return *model_; }
  Device& device() const { return *device_; }
  const std::shared_ptr<Device>& shared_device() const { return device_; }
  const MemoryPlan& plan() const { return plan_; }
  const SessionOptions& options() const { return plan_.options; }
  const Dimensions& dimensions() const { return plan_.dimensions; }
  const Setting& setting() const { return setting_; }
  const Policies& policies() const { return policies_; }
  const Layout& layout() const { return layout_; }
  const Weights& weights() const { return weights_; }
  const Programs& programs() const { return programs_; }
  uint32_t tail() const { return tail_; }  // index of the tail segment
  Program& chunk_program(uint32_t rows) const;
  // The runs of the division by which the sequence keeps entries. Entries may be stored in the runs of
  // another division until move_runs() moves them.
  const std::vector<HeadRun>& runs(const SequenceFields& s) const {
    return plan_.dimensions.runs_in(s.division);
  }
  bool is_windowed(size_t head) const { return model_->owner_of_run(head).window; }

  // Counts the session's other host memory.
  void count_allocated(uint64_t bytes);
  // The bytes that all engines of the ledger hold, as reported by the allocators.
  uint64_t allocated() const { return reservation_.ledger->allocated; }

  // ---- steps ----

  // Whether the mapped files still have all bytes that were mapped.
  Status check_files() const;
  // Gives the next step its tokens.
  void set_tokens(std::span<const int32_t> tokens) const;
  // Passes these tokens to the retention policy if it scores on the host. They are the next tokens, and the
  // step already has them.
  Status note_tokens(std::span<const int32_t> tokens, const SequenceState&);
  // Makes a step the current command: fills its parameters and its table of heads from the state. A retention
  // policy that scores on the host does so here, and may turn the step into one that reads evicted tokens
  // again.
  Status start(Step, const SequenceState&);
  // Runs the rest of the command. After an interrupt, another call continues where this one stopped.
  // `meanwhile` is called once, while the device works.
  Status run(std::function<void()> meanwhile = {});
  // The step that runs, or that ran last.
  const Step& step() const { return command_.step; }
  // Runs a step in one piece, without start() and without interrupts. wait() waits for its end. Must not be
  // called while a command is interrupted.
  Status submit(const Step&, const SequenceState&);
  Status wait() { return stream_->wait(); }
  // Updates the state's counts of held and evicted entries after a step. The state already counts the rows.
  void count_entries(SequenceState&) const;
  // May be called from any thread. The call of run() that runs, or the next one, returns Interrupted.
  void interrupt() { interrupted_.store(true, std::memory_order_relaxed); }
  // Interrupted if interrupt() was called since it was last seen.
  Status check_interrupt();
  // Forgets an interrupt() that no run has seen.
  void forget_interrupt() { interrupted_.store(false, std::memory_order_relaxed); }

  // The most likely token after each of the step's first rows. -1: the row's logits are not finite.
  std::span<const int32_t> arg_max(uint32_t rows) const;
  // The logits of one of the step's rows.
  Result<std::span<const float>> logits(uint32_t row) const;
  // Makes the logits of a row those of the first one.
  Status move_logits(uint32_t row) const;
  // The slot in which the latest step left the states of recurrent layers.
  uint32_t written_slot() const { return command_.params.state_to; }

  // ---- a sequence's data in the pool ----

  // Forgets what policies store of earlier tokens besides the entries.
  Status forget();
  // The positions of the first entries of a head.
  Status positions(const SequenceFields&, size_t head, std::span<int32_t> positions) const;
  // Moves the entries into the runs of the state's division. Returns whether any entry moved.
  Result<bool> move_runs(SequenceState&);
  Result<uint32_t> saturated() const;
  Status set_saturated(uint32_t count) const { return device_->write(layout_.saturated, &count); }

  // An array of a sequence, which a session file stores.
  struct Array {
    View view;
    // kWithoutRoom: the states of a snapshot that has no slot. The view has a length only.
    enum Kind { kPlain, kPositions, kLogits, kOfRetention, kOfSelection, kWithoutRoom } kind;
  };
  Held held(const SequenceFields& s) const {
    return {setting_, runs(s), s.entries, s.read, s.unscored, s.generation};
  }
  // The arrays in the order of a session file's body.
  std::vector<Array> arrays(const SequenceFields&, bool logits) const;

  // ---- the store of evicted entries ----

  // Null without a store.
  const RecallStore* store() const { return store_ ? &*store_ : nullptr; }
  RecallStore* store() { return store_ ? &*store_ : nullptr; }
  bool holds_stored() const { return store_ && !store_->empty(); }
  // Brings the pages of the store back into the runs for which the queries of the latest tokens vote, or
  // those of the tokens read ahead, in place of those that came back before. After Interrupted, another call
  // continues.
  Status recall(SequenceState&);
  // Takes all entries that came from the store out of the runs. The store still has them.
  Status put_back(SequenceState&);
  // Returns `done`. If the store's file could not be read, the session first goes on without it.
  Status check_store(const Status& done, SequenceState&);

  // ---- a smaller pool ----

  // The plan of a session that asked for this pool. Except where its runs begin, this engine's plan becomes
  // this plan. Unsupported: the device cannot give memory back, or the policy may not evict.
  Result<MemoryPlan> smaller_plan(uint32_t pool, const SequenceState&) const;
  // Makes heads keep as many entries as in the smaller plan. Returns whether any head must evict entries
  // before its run can be made smaller.
  bool keep_less(const MemoryPlan& smaller, const SequenceState&);
  // Undoes keep_less().
  void keep_as_before(std::vector<HeadRun> runs, const SequenceState& s) { own_runs(s) = std::move(runs); }
  // Gives back the memory after the smaller runs, and returns its size in bytes.
  Result<uint64_t> release(const MemoryPlan& smaller, SequenceState&);

 private:
  // This engine's part of the ledger. The destructor gives it back.
  struct Reservation {
    std::shared_ptr<Ledger> ledger;
    uint64_t reserved = 0, allocated = 0;
    ~Reservation();
  };
  // A step as the stream gets it: with its parameters and its table of heads.
  struct Command {
    Step step;
    StepParams params{};
    std::vector<HeadState> heads;
    uint32_t next = 0, part = 0;    // next segment, and next part of it
    uint32_t saturated_before = 0;  // if it reads a store's file: the device's count of saturated numbers
  };

  Engine(std::shared_ptr<const Model>, std::shared_ptr<Device>, MemoryPlan, Policies);
  Status allocate(std::shared_ptr<Ledger>, bool first);
  Status place_weights(uint64_t& allocated);
  Status allocate_arenas(uint64_t& allocated);
  Status record_programs();
  View logits_of(uint32_t row) const;
  std::vector<HeadRun>& own_runs(const SequenceFields&);
  Status check_smaller(uint32_t pool, std::span<const HeadRun> then, const SequenceState&) const;
  void fill(const Step&, const SequenceState&);
  void fill_heads(const Step&, const SequenceState&);
  Status make_store();
  Status show_store();
  Status load_stored(size_t layer);
  Status store_spilled();
  Status without_store(const Status& why);
  Status list_own(const AttentionMixer&, const SequenceState&);
  Status choose(uint32_t layer, uint32_t retaining, uint32_t asking, const SequenceState&);
  Status fetch(uint32_t layer, uint32_t head);
  Status exchange(uint32_t layer, uint32_t retaining, SequenceState&);
  Status score_on_host(HostControl&, Step&, const SequenceState&);
  Status copy_to(Engine& twin, const SequenceState&) const;
  Status move_head(size_t head, uint64_t from, uint64_t to, uint64_t entries) const;
  Status move_entries(const View& array, uint64_t entry_bytes, uint64_t from, uint64_t to,
                      uint64_t entries) const;

  std::shared_ptr<const Model> model_;
  std::shared_ptr<Device> device_;
  MemoryPlan plan_;
  Policies policies_;
  Setting setting_;
  Reservation reservation_;
  Weights weights_;
  std::unique_ptr<Buffer> pool_, workspace_, io_;
  std::unique_ptr<Buffer> stored_;  // the store's memory, if ops read it
  Layout layout_;
  std::unique_ptr<Stream> stream_;
  Programs programs_;
  uint32_t tail_ = 0;
  Command command_;
  std::atomic<bool> interrupted_ = false;
  std::optional<RecallStore> store_;
  std::optional<RecallChoice> choice_;
  // Scratch memory of retention policies that score on the host: positions of entries, and embeddings
  // [kNotedAtOnce][d_model].
  std::vector<int32_t> held_;
  std::vector<float> embeddings_;
};

}  // namespace thimble
