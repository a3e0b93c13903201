// A session reads one stream of tokens and continues it, inside a fixed memory plan.
//
// Fed tokens wait until their number exceeds chunk + local. Then one chunk is read, so the chunk borders
// depend only on the stream. flush() (or the first step()) ends the prompt. The last chunk is the rest of the
// prompt without the local tokens, and it is compacted without stabilizers. The local tokens are read after
// it and stay in the pool (Locret, methods 2.5).
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "runtime/draft/drafter.h"
#include "runtime/draft/pace.h"
#include "runtime/engine.h"
#include "runtime/plan/cost_model.h"
#include "runtime/session_file.h"

namespace thimble {

struct Progress {
  // Tokens of the stream: `done` were read, `total` were read or wait.
  uint64_t done = 0, total = 0;
  uint32_t entries = 0, capacity = 0;
  double tokens_per_second = 0;
};

struct SessionStats {
  uint32_t entries = 0;  // of the head that holds the most
  uint64_t position = 0, waiting = 0;
  // `evicted` counts entries, as a mean over layers and heads. `evictions` counts how often entries were
  // evicted.
  uint64_t evicted = 0, evictions = 0;
  uint64_t saturated = 0;  // keys and values outside f16's range
  uint64_t stored = 0;     // entries in the store, as a mean over layers and heads, recalled or not
  uint32_t recalled = 0;   // entries that came from the store, of the head that has the most
  uint64_t generated = 0;
  uint64_t selected = 0;
  uint64_t cache_hits = 0, cache_misses = 0;
  uint64_t prefill_tokens = 0;
  double prefill_seconds = 0, decode_seconds = 0;
  Cost prefill, decode;  // the least that those seconds must move and multiply
};

class Session {
 public:
  // Makes a session on a device. It allocates all memory that the session will ever need.
  static Result<std::unique_ptr<Session>> create(std::shared_ptr<const Model>, std::shared_ptr<Device>,
                                                 const SessionOptions&);
  ~Session();

  void set_progress(std::function<void(const Progress&)> progress) { progress_ = std::move(progress); }
  Status set_sampler(const SamplerOptions&, const AnswerPenalties& = {});
  Status set_bias(std::span<const int32_t> tokens, std::span<const float> biases);
  // The tokens that are generated from now on form a text of the grammar, and then end the generation. Null:
  // any token may be generated.
  void set_grammar(Constraint::Grammar grammar);

  Status feed(std::span<const int32_t> tokens);
  Status flush();
  Result<int32_t> step();
  Status accept(int32_t token);
  // Computes the natural-log probability of each token after all tokens before it, and appends the tokens to
  // the stream. After Interrupted, call it again with the same arguments.
  Status score(std::span<const int32_t> tokens, std::span<float> log_probs);
  // Finishes an interrupted chunk or token. Without it, logits() and kept() show that chunk or token half
  // done. The interrupted call may still be repeated.
  Status settle() { return go_on(); }
  // The logits of the next token. There is one for each token of the vocabulary, which may have fewer than
  // shape.vocab tokens.
  Result<std::span<const float>> logits() const;
  Status rewind(uint64_t position);
  Result<std::unique_ptr<Session>> clone();
  Status reset();
  // Writes all data that a session needs to continue on any device, and `note` and `held_text` next to it.
  // `held_text` is the end of the answer's text that does not complete a code point yet, at most 7 bytes.
  // Like any other call, it finishes interrupted work first.
  Status save(const WriteBytes&, std::span<const std::byte> note, std::string_view held_text = {});
  // The bytes that save() would write now, with a note of this size.
  Result<uint64_t> file_bytes(uint64_t note_bytes);
  // Continues where a session of the same settings was saved, and returns its held_text. Error messages call
  // the file `name`. Mismatch names the first setting that differs. Format says what is damaged. On failure
  // nothing changes, except if the device itself fails: then the session is empty.
  Result<std::string> restore(MappedFile file, std::string name);

  // Evicts entries down to a smaller pool, gives back the memory that is then after the runs, and returns its
  // size in bytes. Unsupported: the device cannot give memory back, or the policy may not evict. Then nothing
  // changes.
  Result<uint64_t> shrink(uint32_t pool);

  // May be called from any thread. The call that runs, or the next one, returns Interrupted.
  void interrupt() {
    engine_->interrupt();
    if (drafter_) drafter_->interrupt();
  }
  void forget_interrupt() { engine_->forget_interrupt(); }

  // The number of entries that a KV head holds.
  Result<uint32_t> kept_count(uint32_t layer, uint32_t kv_head) const;
  // The positions of these entries, ascending: the first positions.size() of them.
  Status kept(uint32_t layer, uint32_t kv_head, std::span<int32_t> positions) const;
  // The number of positions that were read. It settles first, so call it before kept_by_position().
  Result<uint64_t> positions_read();
  // For each of these positions: the share of heads that hold it, in layers without a window, and the
  // attention that the last position paid to it, as a mean over layers and heads with sum 1. Either pointer
  // may be null.
  Status kept_by_position(float* kept, float* attended);
  // For each of these positions: the share of the same heads that have it in the store and not in the pool.
  void stored_by_position(std::span<float> stored) const;
  const MemoryPlan& plan() const { return engine_->plan(); }
  // The bytes that this session and its clones hold, as reported by the allocators.
  uint64_t allocated() const { return engine_->allocated(); }
  // The store of evicted entries, or null. Only tests change it.
  RecallStore* store() { return engine_->store(); }
  // What guesses the next tokens, or null. Only tests ask it.
  Drafter* drafter() { return drafter_.get(); }
  // The bytes of memory that the store takes.
  uint64_t store_bytes() const { return engine_->store() ? engine_->store()->bytes() : 0; }
  Result<SessionStats> stats() const;
  const Model& model() const { return engine_->model(); }
  // The number of rows for which every head has room.
  uint32_t room() const;
  // The state of the sequence, and the runs of its heads, [layer][kv head].
  const SequenceState& state() const { return state_; }
  const std::vector<HeadRun>& runs() const { return engine_->runs(state_); }

 private:
  // A step that was started and may not be finished, and the changes to make once it is finished. An
  // interrupt leaves a Run.
  enum class Work { kNone, kChunk, kAhead, kLogits, kDecode, kDraft, kCatchUp, kUpkeep, kEvict, kLogProb };
  struct Run {
    Work work = Work::kNone;
    Step step;
    bool waiting = false;           // kChunk: the rows are waiting tokens
    bool logits = false;            // kChunk: the tail gives the logits of the last row
    uint32_t saturated_before = 0;  // kAhead: the device's count of saturated numbers
    // kChunk, kUpkeep: the waiting scores are computed next, and then the pool is compacted.
    bool then_evicts = false;
    double seconds = 0;  // that it took so far
  };
  // The latest run with a draft: a token and a guess of the tokens after it. The state counts only the rows
  // of tokens that were generated since. So until another run overwrites them, the other rows are ready in
  // case that their tokens are generated next, and otherwise they are as if they had never been read.
  struct Ahead {
    std::array<int32_t, kLogitRowsAtOnce> tokens{};
    uint32_t rows = 0, counted = 0;  // rows: 0 if no draft is ready
    double seconds = 0;              // that the guess and the run took
    uint32_t saturated_before = 0;   // the device's count of saturated numbers
    bool leads_on(int32_t token) const { return counted && counted < rows && tokens[counted] == token; }
  };
  // A public call that was interrupted. Repeating the same call continues it.
  enum class Call { kNone, kFeed, kStep, kAccept, kScore };
  struct Unfinished {
    Call call = Call::kNone;
    uint64_t count = 0;          // tokens of the call
    uint64_t taken = 0;          // tokens that were already taken
    uint64_t hash = 0;           // of all tokens, to recognise the call
    int32_t token = 0;           // kStep: the token that was sampled
    bool sampled = false;        // kStep
    uint64_t random = 0;         // kStep: the sampler's random state before it sampled
    bool started = false;        // kStep, kAccept: the token's run was started
    uint32_t slice = 0;          // kScore: rows of the slice whose logits are being read
    uint32_t row = 0;            // kScore: rows of these that are done
    bool stepping = false;       // kScore: the step of the last taken token is not finished
    bool has_logits = false;     // kScore: the step with the next rows' logits was started
    bool has_log_probs = false;  // kScore: the step with their log-probabilities was started
  };

  explicit Session(std::unique_ptr<Engine>, std::unique_ptr<Drafter>);
  Session(std::unique_ptr<Engine>, std::unique_ptr<Drafter>, const SequenceState&);

  // Public calls, and the runs that make them up.
  Status begin(Call, std::span<const int32_t> tokens);
  Status set_run(const Run&);
  Status start(const Run&);
  Status go_on();
  Status finish_run();
  Status follow(const Run& done);
  void commit(const Run&);
  void commit_chunk(const Run&);
  void commit_token();
  void commit_row();
  void note_logits(uint32_t row = 0);
  void show_rows(uint32_t first, uint32_t rows, double& seconds);
  void keep_states(bool ends_prompt);
  void keep_states_before(uint32_t rows);
  Run upkeep_run(bool then_evicts, bool ends_prompt);
  Run eviction_run(bool ends_prompt) const;
  Status upkeep();
  Status evict();
  Status recall_ahead();
  Status recall_in_time();
  Step new_rows(Program&, uint32_t rows) const;

  // The stream.
  Status set_tokens(std::span<const int32_t> tokens);
  Status note_tokens(std::span<const int32_t> tokens);
  Status read_waiting(uint32_t rows, bool evicts, bool last);
  Status flush_waiting();
  Status append_token(int32_t token, bool generated);
  void note_generated(int32_t token);
  Run alone_run() const;

  // Drafts.
  Result<uint32_t> guess(std::span<int32_t> draft);
  uint32_t most_drafted() const;
  Status append_draft(std::span<const int32_t> tokens);
  Program& draft_program(uint32_t rows) const;
  Result<bool> must_run_alone(const Run& draft);
  Status leave_draft(bool wrong);
  Status score_by_steps(std::span<const int32_t> tokens, std::span<float> log_probs);
  Status score_by_slices(std::span<const int32_t> tokens, std::span<float> log_probs);
  Status append_slice(std::span<const int32_t> tokens);
  Status slice_logits(uint32_t first, uint32_t rows);
  Status target_log_probs(std::span<const int32_t> targets, float* log_probs);
  // Whether the token has a logit. Other tokens only have a row in the embedding.
  bool may_follow(int32_t token) const { return static_cast<uint32_t>(token) < model().output.rows; }
  Status check_tokens(std::span<const int32_t> tokens) const;
  Result<int32_t> sample();
  Status check_logits() const;
  Status check_finite(bool finite) const;

  // Room in the pool.
  Status make_room(uint32_t rows, bool evicts);
  bool fits(uint32_t rows, bool evicts) const;
  Status check_room(uint64_t tokens) const;
  Status evict_to(const MemoryPlan& smaller);

  // Reports on entries and attention.
  Result<size_t> run_of(uint32_t layer, uint32_t kv_head) const;
  Status read_sums(Program&, uint32_t segment, float* sums);
  Status count_kept(float* kept);
  Status add_attention(float* attended);
  double mean_entries() const;
  Cost cost_of_store(uint32_t rows);
  void report_progress();

  // Files.
  SavedSession saved() const;
  uint64_t body_bytes(std::span<const Engine::Array>) const;
  uint32_t saved_division(const SessionFile&) const;
  Status check_settings(const SessionFile&, std::span<const HeadRun> runs) const;
  Status check_body(const SessionFile&, std::span<const Engine::Array>) const;
  Status take(SessionFile&, std::span<const Engine::Array>);

  const SessionOptions& options() const { return engine_->options(); }
  const RetentionPolicy& retention() const { return *engine_->policies().retention; }
  const SelectionPolicy& selection() const { return *engine_->policies().selection; }
  bool selects() const { return selection().selects(options()); }

  std::unique_ptr<Engine> engine_;
  SequenceState state_;
  Run run_;
  Unfinished unfinished_;
  std::unique_ptr<Drafter> drafter_;  // null: nothing is drafted
  Pace pace_;
  Ahead ahead_;
  double guess_seconds_ = 0;  // that the latest guess took
  CostModel cost_;
  std::function<void(const Progress&)> progress_;
  // Tokens read and time when the running public call began, for its rate.
  uint64_t call_start_read_ = 0;
  double call_start_ = 0;
};

}  // namespace thimble
