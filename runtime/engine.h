// The engine: what a plan allocated, and the steps that run in it. Sessions use it, and so does training.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "runtime/decoder.h"
#include "runtime/plan/planner.h"
#include "runtime/sequence_state.h"

namespace thimble {

// What a session and its clones took of their common budget: `reserved` by plan before anything is allocated,
// `allocated` as it was given.
struct Ledger {
  uint64_t limit = 0;  // 0: none
  std::atomic<uint64_t> reserved = 0, allocated = 0;
  Status take(uint64_t bytes);
};

// What is to be run: segments of a program over rows of tokens.
struct Step {
  // kNew: the rows come after the entries of the pool. kStored: they are the last of these entries. kDone:
  // the step before ran them, and nothing reads the pool.
  enum class Rows { kNew, kStored, kDone };

  Program* program = nullptr;
  uint32_t first = 0, last = 0;  // segments
  uint32_t n_rows = 0;
  Rows rows = Rows::kNew;
  uint64_t position = 0;  // of the first row in the text
  uint32_t first_logit_row = 0, n_logit_rows = 1;
  // The pool is compacted after the rows. Where rows are read again they stay until then, in layers that
  // attend to everything.
  bool evicts = false;
  // The rows end the prompt: nothing stands in for the tokens to come, and the stabilizers are scored like
  // the others (methods 2.5).
  bool ends_prompt = false;
};

class Engine {
 public:
  // Allocates everything that it will ever need. `first`: the weights and the device's fixed part are counted
  // once, in the ledger that a session and its clones have in common, until the last of them goes.
  static Result<std::unique_ptr<Engine>> create(std::shared_ptr<const Model>, std::shared_ptr<Device>,
                                                MemoryPlan, Policies, std::shared_ptr<Ledger>, bool first);
  ~Engine();
  // One like this, in the same budget, with a copy of what a sequence has in this one's memory.
  Result<std::unique_ptr<Engine>> clone(const SequenceState&) const;

  const Model& model() const { return *model_; }
  Device& device() const { return *device_; }
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
  // By which division a sequence keeps entries, and where these are stored until they have moved.
  const std::vector<HeadRun>& runs(const SequenceFields& s) const {
    return plan_.dimensions.runs_in(s.division);
  }
  bool is_windowed(size_t head) const { return model_->layers[head / model_->shape.kv_heads].window; }

  // Host memory that belongs to the session beside this.
  void count_allocated(uint64_t bytes);
  // Bytes that all engines of the ledger hold, added up from what allocators gave.
  uint64_t allocated() const { return reservation_.ledger->allocated; }

  // ---- steps ----

  // Whether what is read from mapped files is still there.
  Status check_files() const;
  // Gives the next step its tokens.
  void set_tokens(std::span<const int32_t> tokens) const;
  // Tells a retention that scores on the host of these tokens, which come next and were given to the step.
  Status note_tokens(std::span<const int32_t> tokens, const SequenceState&);
  // Makes a step the command to run: fills in its parameters and its table of heads from the state. A
  // retention that scores on the host does so here, and may turn the step into one that reads tokens again.
  Status start(Step, const SequenceState&);
  // Runs what is left of the command. After an interrupt a second call goes on where the first one stopped.
  Status run();
  // The step as it runs, or ran last.
  const Step& step() const { return command_.step; }
  // Runs a step in one piece, without a start and without interrupts; wait() waits for it. Not while a
  // command is interrupted.
  Status submit(const Step&, const SequenceState&);
  Status wait() { return stream_->wait(); }
  // Notes what heads hold after the step that ran, and what they dropped. The state has counted the rows.
  void count_entries(SequenceState&) const;
  // From any thread: the running or the next call of run() returns Interrupted.
  void interrupt() { interrupted_.store(true, std::memory_order_relaxed); }

  // The most likely tokens by the logits of the step's first rows; -1 where the logits are not finite.
  std::span<const int32_t> arg_max(uint32_t rows) const;
  // Logits of the first row.
  Result<std::span<const float>> logits() const;

  // ---- what a sequence has in the pool ----

  Status forget() const;  // what is remembered beside the entries
  // Positions of the first entries of a head.
  Status positions(const SequenceFields&, size_t head, std::span<int32_t> positions) const;
  // Moves the entries to where the state's division has them. Whether any moved.
  Result<bool> move_runs(SequenceState&);
  Result<uint32_t> saturated() const;
  Status set_saturated(uint32_t count) const { return device_->write(layout_.saturated, &count); }

  // An array of a sequence: what a session file stores of it.
  struct Array {
    View view;
    enum Kind { kPlain, kPositions, kLogits, kOfRetention, kOfSelection } kind;
  };
  Held held(const SequenceFields& s) const {
    return {setting_, runs(s), s.entries, s.read, s.unscored, s.generation};
  }
  // In the order of a file's body.
  std::vector<Array> arrays(const SequenceFields&, bool logits) const;

  // ---- a smaller pool ----

  // The plan of a session that was asked for this pool: what this one is to be, but for where its runs begin.
  // Unsupported where the device cannot give memory back, or nothing may be evicted.
  Result<MemoryPlan> smaller_plan(uint32_t pool, const SequenceState&) const;
  // From here on heads keep what they keep in the smaller plan. Whether any must evict before its run can be
  // made smaller.
  bool keep_less(const MemoryPlan& smaller, const SequenceState&);
  // Undoes that.
  void keep_as_before(std::vector<HeadRun> runs, const SequenceState& s) { own_runs(s) = std::move(runs); }
  // Gives back the memory after the smaller runs; the bytes of that.
  Result<uint64_t> release(const MemoryPlan& smaller, SequenceState&);

 private:
  // What this engine alone takes of the ledger; gives it back when it goes.
  struct Reservation {
    std::shared_ptr<Ledger> ledger;
    uint64_t reserved = 0, allocated = 0;
    ~Reservation();
  };
  // A step as it is handed to the stream: with its parameters and its table of heads.
  struct Command {
    Step step;
    StepParams params{};
    std::vector<HeadState> heads;
    uint32_t next = 0, part = 0;  // segment, and part of it
  };

  Engine(std::shared_ptr<const Model>, std::shared_ptr<Device>, MemoryPlan, Policies);
  Status allocate(std::shared_ptr<Ledger>, bool first);
  Status place_weights(uint64_t& allocated);
  Status allocate_arenas(uint64_t& allocated);
  Status record_programs();
  std::vector<HeadRun>& own_runs(const SequenceFields&);
  Status check_smaller(uint32_t pool, std::span<const HeadRun> then, const SequenceState&) const;
  void fill(const Step&, const SequenceState&);
  void fill_heads(const Step&, const SequenceState&);
  Status score_on_host(Step&, const SequenceState&);
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
  Layout layout_;
  std::unique_ptr<Stream> stream_;
  Programs programs_;
  uint32_t tail_ = 0;
  Command command_;
  std::atomic<bool> interrupted_ = false;
  // Scratch where scores are made on the host: positions of entries, and embeddings,
  // [kNotedAtOnce][d_model].
  std::vector<int32_t> held_;
  std::vector<float> embeddings_;
};

}  // namespace thimble
