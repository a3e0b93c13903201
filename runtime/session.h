// A session: one stream of tokens read and continued inside a fixed memory plan.
//
// Tokens that are fed wait until more than chunk + local of them do; then a chunk is read, so chunk borders
// depend on the stream alone. flush (or the first step) ends the prompt: the rest but the local tokens is the
// last chunk, which is compacted without stabilizers, then the local tokens are read and stay (Locret,
// methods 2.5).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "runtime/decoder.h"
#include "runtime/plan/cost_model.h"
#include "runtime/plan/planner.h"
#include "runtime/sampler/sampler.h"
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
  void interrupt() { interrupted_.store(true, std::memory_order_relaxed); }

  // How many entries a KV head holds.
  Result<uint32_t> kept_count(uint32_t layer, uint32_t kv_head) const;
  // Their positions, ascending: the first positions.size() of them.
  Status kept(uint32_t layer, uint32_t kv_head, std::span<int32_t> positions) const;
  // Positions that were read; settles first.
  Result<uint64_t> positions_read();
  // Of each of these, the share of heads that hold it, in layers without a window; and the attention that the
  // last one paid to it, mean over layers and heads, sum 1. Either may be null.
  Status kept_by_position(float* kept, float* attended);
  const MemoryPlan& plan() const { return plan_; }
  // Bytes that this session and its clones hold, added up from what allocators gave.
  uint64_t allocated() const { return ledger_->allocated; }
  Result<SessionStats> stats() const;
  const Model& model() const { return *model_; }

 private:
  // What a session and its clones have taken of their common budget: `reserved` by plan before anything is
  // allocated, `allocated` as it was given.
  struct Ledger {
    uint64_t limit = 0;  // 0: none
    std::atomic<uint64_t> reserved = 0, allocated = 0;
    Status take(uint64_t bytes);
  };
  // What one session alone takes of it; gives it back when the session goes.
  struct Reservation {
    std::shared_ptr<Ledger> ledger;
    uint64_t reserved = 0, allocated = 0;
    ~Reservation() {
      if (!ledger) return;
      ledger->reserved -= reserved;
      ledger->allocated -= allocated;
    }
  };

  // A run of a program's segments, started and maybe not finished: what an interrupt leaves behind.
  enum class Work { kNone, kChunk, kLogits, kDecode, kUpkeep, kEvict, kLogProb };
  struct Run {
    Work work = Work::kNone;
    Program* program = nullptr;
    uint32_t next = 0, last = 0;  // segments
    uint32_t part = 0;            // of the next one
    StepParams step{};
    bool waiting = false;  // kChunk: its rows come from the waiting tokens
    bool logits = false;   // kChunk: the tail gives the logits of the last row
    bool evicts =
        false;  // kChunk, kUpkeep: what waits for its scores gets them, and then the pool is compacted
    bool ends_prompt = false;  // with it: as fill_heads says of the last chunk
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

  // An array of a saved session.
  struct Piece {
    View view;
    enum Kind { kPlain, kPositions, kLogits, kOfRetention, kOfSelection } kind;
  };

  Session(std::shared_ptr<const Model>, std::shared_ptr<Device>, MemoryPlan, std::shared_ptr<Ledger>);
  static Result<std::unique_ptr<Session>> make(std::shared_ptr<const Model>, std::shared_ptr<Device>,
                                               MemoryPlan, std::shared_ptr<Ledger>, bool first);
  Status allocate(bool first);
  Status clear();

  Status begin(Call, std::span<const int32_t> tokens);
  Status set_tokens(std::span<const int32_t> tokens);
  Status note_tokens(std::span<const int32_t> tokens);
  Status go_on();
  Status finish_run();
  Status start(Run);
  Status score_on_host(Run&);
  Run upkeep_run(bool evicts, bool ends_prompt);
  Run eviction_run(bool ends_prompt);
  Run run_after(const Run&);
  void fill_heads(uint32_t rows, bool evicts, bool last);
  void commit(const Run&);
  void compacted(uint32_t rows);
  Status read_sums(Program&, uint32_t segment, float* sums);
  Status count_kept(float* kept);
  Status add_attention(float* attended);
  StepParams step_params(uint32_t rows) const;
  double mean_entries() const;
  uint32_t most_entries() const;
  Program& chunk_program(uint32_t rows) const;

  Status read_waiting(uint32_t rows, bool evicts, bool last);
  Status flush_waiting();
  Status make_room(uint32_t rows, bool evicts);
  void place_heads();
  Result<bool> move_runs();
  Status move_entries(const View& array, uint64_t entry_bytes, uint64_t from, uint64_t to,
                      uint64_t entries) const;
  bool fits(uint32_t rows, bool evicts) const;
  uint32_t room() const;
  Status upkeep();
  Status append_token(int32_t token, bool generated);
  Status score_by_steps(std::span<const int32_t> tokens, std::span<float> log_probs);
  Status append_slice(std::span<const int32_t> tokens);
  Status slice_logits(uint32_t first, uint32_t rows);
  Status target_log_probs(std::span<const int32_t> targets, float* log_probs);
  Status check_files() const;
  Status check_tokens(std::span<const int32_t> tokens) const;
  // Whether a token has a logit, or is only a row of the embedding.
  bool may_follow(int32_t token) const { return static_cast<uint32_t>(token) < model_->output.rows; }
  Status check_room(uint64_t tokens) const;
  Status check_logits() const;
  Status check_finite() const;
  std::vector<NamedSetting> saved_settings() const;
  SavedSession saved() const;
  std::vector<Piece> pieces(const Held&, bool logits) const;
  Status copy_pool(Session& twin) const;
  Result<MemoryPlan> smaller_plan(uint32_t pool) const;
  Status evict_to(const MemoryPlan& smaller);
  uint32_t saved_division(const SessionFile&) const;
  Status check_settings(const SessionFile&, std::span<const HeadRun> runs) const;
  Status check_stream(const SessionFile&, std::span<const HeadRun> runs) const;
  Status check_body(const SessionFile&, const Held&, std::span<const Piece>) const;
  void report_progress();

  std::shared_ptr<const Model> model_;
  std::shared_ptr<Device> device_;
  MemoryPlan plan_;
  std::shared_ptr<Ledger> ledger_;
  Reservation reservation_;
  Policies policies_;
  Weights weights_;
  std::unique_ptr<Buffer> pool_, workspace_, io_;
  Layout layout_;
  std::unique_ptr<Stream> stream_;
  Programs programs_;
  uint32_t tail_ = 0;  // index of the tail segment
  Sampler sampler_;
  std::function<void(const Progress&)> progress_;
  std::atomic<bool> interrupted_ = false;

  // The state of the stream.
  std::vector<int32_t> waiting_;          // fed and not read; reserved for chunk + local + 1
  uint64_t read_ = 0;                     // tokens that are in the pool or were
  std::vector<uint32_t> entries_;         // that each head holds, [layer][kv head]
  std::vector<HeadState> heads_;          // what the running program is told of them
  uint32_t unscored_ = 0;                 // last entries whose retention scores are still to come
  std::vector<int32_t> unscored_tokens_;  // of these, where they are read again; reserved for chunk
  std::vector<int32_t> held_;             // scratch where scores are made on the host: positions of entries,
  std::vector<float> embeddings_;         // and embeddings, [kNotedAtOnce][d_model]
  uint64_t evicted_ = 0;                  // entries, of all heads
  uint64_t last_eviction_ = 0;            // read_ when entries were last dropped
  uint32_t generation_ = 0;               // changes whenever pool entries move or a prompt is read
  // What the last token read attended to, while its queries and all of that are there.
  enum class Attended { kUnknown, kEverything, kList };
  Attended attended_ = Attended::kUnknown;
  bool has_logits_ = false;
  bool finite_logits_ = true;  // of those that it has
  Run run_;
  Unfinished unfinished_;
  SessionStats stats_;
  CostModel cost_;
  Cost selecting_;  // had every generated token made a selection of its own

  // When the public call that is running began, for its rate.
  uint64_t call_start_read_ = 0;
  double call_start_ = 0;
};

}  // namespace thimble
