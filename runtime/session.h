// A session: one stream of tokens read and continued inside a fixed memory plan.
//
// Tokens that are fed wait until more than chunk + local of them do; then a chunk is read, so chunk borders
// depend on the stream alone. flush (or the first step) ends the prompt: the rest but the local tokens is the
// last chunk, which is compacted without stabilizers, then the local tokens are read and stay (Locret,
// methods 2.5).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "runtime/engine.h"
#include "runtime/plan/cost_model.h"
#include "runtime/session_file.h"

namespace thimble {

struct Progress {
  uint64_t done = 0, total = 0;  // tokens of the stream: read, and read or waiting
  uint32_t entries = 0, capacity = 0;
  double tokens_per_second = 0;
};

struct SessionStats {
  uint32_t entries = 0;  // of the head that holds most
  uint64_t position = 0, waiting = 0;
  uint64_t evicted = 0, evictions = 0;  // entries, mean over layers and heads; times that any were
  uint64_t saturated = 0;               // numbers of keys and values beyond f16's range
  uint64_t generated = 0;
  uint64_t selected = 0;
  uint64_t cache_hits = 0, cache_misses = 0;
  uint64_t prefill_tokens = 0;
  double prefill_seconds = 0, decode_seconds = 0;
  Cost prefill, decode;  // what those seconds must move and multiply at least
};

class Session {
 public:
  // Makes a session on a device; allocates everything it will ever need.
  static Result<std::unique_ptr<Session>> create(std::shared_ptr<const Model>, std::shared_ptr<Device>,
                                                 const SessionOptions&);
  ~Session();

  void set_progress(std::function<void(const Progress&)> progress) { progress_ = std::move(progress); }
  Status set_sampler(const SamplerOptions&);

  Status feed(std::span<const int32_t> tokens);
  Status flush();
  Result<int32_t> step();
  Status accept(int32_t token);
  // Natural-log probabilities of `tokens` after all before, which are then part of the stream. Interrupted:
  // call again with the same arguments.
  Status score(std::span<const int32_t> tokens, std::span<float> log_probs);
  // Finishes what an interrupt left of a chunk or token, which logits and kept otherwise show half done. The
  // interrupted call may still be repeated.
  Status settle() { return go_on(); }
  // Logits of the next token: of those that the vocabulary has, which may be fewer than shape.vocab.
  Result<std::span<const float>> logits() const;
  Status rewind(uint64_t position);
  Result<std::unique_ptr<Session>> clone();
  Status reset();
  // Writes all that it takes to go on, on any device, and beside it `note` and `held_text`, of the answer's
  // text at most 7 bytes that no token completed yet; ends what was interrupted as any other call.
  Status save(const WriteBytes&, std::span<const std::byte> note, std::string_view held_text = {});
  // Goes on where a session of the same settings was saved, and gives its held_text; `name` is how errors
  // call the file. Mismatch names the first setting that differs, Format says what is damaged. On failure
  // nothing changes, unless the device itself fails: then nothing is held.
  Result<std::string> restore(MappedFile file, std::string name);

  // Evicts down to a smaller pool and gives back what memory is then behind the runs; the bytes of that.
  // Unsupported where the device cannot, or nothing may be evicted; then nothing changed.
  Result<uint64_t> shrink(uint32_t pool);

  // From any thread: the running or the next call that works returns Interrupted.
  void interrupt() { engine_->interrupt(); }

  // How many entries a KV head holds.
  Result<uint32_t> kept_count(uint32_t layer, uint32_t kv_head) const;
  // Their positions, ascending: the first positions.size() of them.
  Status kept(uint32_t layer, uint32_t kv_head, std::span<int32_t> positions) const;
  // Positions that were read. It settles first, so it must be asked before kept_by_position().
  Result<uint64_t> positions_read();
  // Of each of these, the share of heads that hold it, in layers without a window; and the attention that the
  // last one paid to it, mean over layers and heads, sum 1. Either may be null.
  Status kept_by_position(float* kept, float* attended);
  const MemoryPlan& plan() const { return engine_->plan(); }
  // Bytes that this session and its clones hold, added up from what allocators gave.
  uint64_t allocated() const { return engine_->allocated(); }
  Result<SessionStats> stats() const;
  const Model& model() const { return engine_->model(); }
  // Where the sequence stands; and the runs of its heads, [layer][kv head].
  const SequenceState& state() const { return state_; }
  const std::vector<HeadRun>& runs() const { return engine_->runs(state_); }

 private:
  // A step that was started and maybe not finished, and what it changes once it is: what an interrupt leaves.
  enum class Work { kNone, kChunk, kLogits, kDecode, kUpkeep, kEvict, kLogProb };
  struct Run {
    Work work = Work::kNone;
    Step step;
    bool waiting = false;  // kChunk: its rows come from the waiting tokens
    bool logits = false;   // kChunk: the tail gives the logits of the last row
    // kChunk, kUpkeep: what waits for its scores gets them, and then the pool is compacted.
    bool then_evicts = false;
  };
  // A public call that was interrupted: the same call, repeated, goes on.
  enum class Call { kNone, kFeed, kStep, kAccept, kScore };
  struct Unfinished {
    Call call = Call::kNone;
    uint64_t count = 0;          // tokens of the call
    uint64_t taken = 0;          // of which already taken
    uint64_t hash = 0;           // of all of them, to recognise the call
    int32_t token = 0;           // kStep: the token that was sampled
    bool sampled = false;        // kStep
    uint64_t random = 0;         // kStep: the sampler's, before it was
    bool started = false;        // kStep, kAccept: the token's run was started
    uint32_t slice = 0;          // kScore: rows of the slice whose logits are being read
    uint32_t row = 0;            // kScore: of which done
    bool stepping = false;       // kScore: the last token taken is on its way through the model
    bool has_logits = false;     // kScore: the next rows' logits were started
    bool has_log_probs = false;  // kScore: and their log-probabilities
  };

  explicit Session(std::unique_ptr<Engine>);
  Session(std::unique_ptr<Engine>, const SequenceState&);

  // Calls, and the runs that they are made of.
  Status begin(Call, std::span<const int32_t> tokens);
  Status set_run(const Run&);
  Status start(const Run&);
  Status go_on();
  Status finish_run();
  Status follow(const Run& done);
  void commit(const Run&);
  void commit_chunk(const Run&);
  void commit_token();
  void note_logits();
  Run upkeep_run(bool then_evicts, bool ends_prompt);
  Run eviction_run(bool ends_prompt) const;
  Status upkeep();
  Status evict();
  Step new_rows(Program&, uint32_t rows) const;

  // The stream.
  Status set_tokens(std::span<const int32_t> tokens);
  Status read_waiting(uint32_t rows, bool evicts, bool last);
  Status flush_waiting();
  Status append_token(int32_t token, bool generated);
  Status score_by_steps(std::span<const int32_t> tokens, std::span<float> log_probs);
  Status score_by_slices(std::span<const int32_t> tokens, std::span<float> log_probs);
  Status append_slice(std::span<const int32_t> tokens);
  Status slice_logits(uint32_t first, uint32_t rows);
  Status target_log_probs(std::span<const int32_t> targets, float* log_probs);
  // Whether a token has a logit, or is only a row of the embedding.
  bool may_follow(int32_t token) const { return static_cast<uint32_t>(token) < model().output.rows; }
  Status check_tokens(std::span<const int32_t> tokens) const;
  Status check_logits() const;
  Status check_finite(bool finite) const;

  // Room.
  Status make_room(uint32_t rows, bool evicts);
  bool fits(uint32_t rows, bool evicts) const;
  uint32_t room() const;
  Status check_room(uint64_t tokens) const;
  Status evict_to(const MemoryPlan& smaller);

  // Looking.
  Status read_sums(Program&, uint32_t segment, float* sums);
  Status count_kept(float* kept);
  Status add_attention(float* attended);
  double mean_entries() const;
  void report_progress();

  // Files.
  SavedSession saved() const;
  uint32_t saved_division(const SessionFile&) const;
  Status check_settings(const SessionFile&, std::span<const HeadRun> runs) const;
  Status check_body(const SessionFile&, std::span<const Engine::Array>) const;
  Status take(const SessionFile&, std::span<const Engine::Array>);

  const SessionOptions& options() const { return engine_->options(); }
  const RetentionPolicy& retention() const { return *engine_->policies().retention; }
  const SelectionPolicy& selection() const { return *engine_->policies().selection; }
  bool selects() const { return selection().selects(options()); }

  std::unique_ptr<Engine> engine_;
  SequenceState state_;
  Run run_;
  Unfinished unfinished_;
  CostModel cost_;
  std::function<void(const Progress&)> progress_;
  // When the public call that is running began, for its rate.
  uint64_t call_start_read_ = 0;
  double call_start_ = 0;
};

}  // namespace thimble
