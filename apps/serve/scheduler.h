// Slots that share one budget, a bounded queue of jobs, and the choice of a slot for each job.
//
// A slot is a session and a thread. Slots may differ in size. A job gets the smallest slot that holds it and
// is idle, so a long job may wait while shorter jobs after it begin; but the first job that waits for a slot
// gets it.
//
// A job that can continue from the tokens that a slot holds gets that slot.
// If it continues from the middle of these tokens, and another slot is empty, it gets a clone, so that both
// conversations are kept.
//
// With a cache, states are also saved to files, and a job continues from a file if that holds more of its
// prompt than its slot does.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "apps/library.h"
#include "apps/options.h"
#include "apps/serve/flags.h"
#include "apps/serve/gate.h"
#include "apps/serve/history.h"
#include "apps/serve/prefix_cache.h"
#include "apps/serve/room.h"
#include "apps/serve/task.h"

namespace app::serve {

// Receives the progress of a job on the slot's thread: begun, pieces, ended; or failed, at any time. Between
// the pieces of two answers, next. It receives nothing after the job was cancelled.
class Listener {
 public:
  virtual ~Listener() = default;
  virtual void begun(const Usage& usage) = 0;
  virtual void piece(const Piece& piece) = 0;
  virtual void next(Ending ending) = 0;
  virtual void ended(Ending ending, const std::string& stop, const Usage& usage) = 0;
  virtual void failed(const Refusal& refusal) = 0;
};

struct Job {
  explicit Job(Room& of) : room(of) {}
  Task task;
  Prompt prompt;
  Grammars grammars;
  Share room;            // the bytes of the job
  uint64_t entries = 0;  // that the job needs: its prompt, and the answer as far as it is known
  std::chrono::steady_clock::time_point since;  // when it began to wait
  std::shared_ptr<Listener> listener;
  std::atomic<bool> cancelled = false;
  std::atomic<bool> streams = false;  // the job was accepted, and its client reads events
  std::atomic<bool> reading = false;
  std::atomic<uint64_t> done = 0, total = 0;  // tokens of the stream while the prompt is read
};

// Sums since the start, for /metrics.
struct Counts {
  std::atomic<uint64_t> prompt_tokens = 0, cached_tokens = 0, generated_tokens = 0, cancelled = 0, failed = 0;
  std::atomic<uint64_t> prompt_microseconds = 0, generation_microseconds = 0, waiting_microseconds = 0;
};

// The error that a client receives for a failure.
Refusal refusal_of(const std::exception& error);

class Scheduler {
 public:
  // Makes the slots. The referenced objects must outlive the scheduler. `room` counts the bytes of the texts
  // that slots remember.
  Scheduler(const Settings& settings, const Model& model, const ServeFlags& flags, Room& room);
  ~Scheduler() { stop(); }
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Renders and tokenises the prompt of a task, and moves the texts out of the task.
  Prompt prepare(Task& task) const;
  // Says in one sentence why the model cannot have conversations; empty: it can.
  const std::string& chat_problem() const { return chat_problem_; }
  // Returns false if the queue is full.
  bool submit(const std::shared_ptr<Job>& job);
  // Ends the job as soon as possible. Its listener is not called any more.
  void cancel(const std::shared_ptr<Job>& job);
  // Ends all jobs, and accepts no more.
  void stop();

  struct SlotState {
    bool busy;
    uint64_t position;  // number of tokens in its stream
    uint32_t pool;
  };
  std::vector<SlotState> slots() const;
  // The slot whose job ended last; nothing if none has ended.
  std::optional<size_t> last() const;
  // The state of an idle slot, for a caller that inspects it.
  struct View {
    const Session& session;
    const History& history;
    // Attention of its last answer to each position; empty: it was not measured.
    const std::vector<float>& attended;
    const std::string& question;  // the question of that answer; "": the prompt was not a conversation
  };
  // Calls `look` with a slot, and calls it again after an interrupt. Meanwhile the slot gets no job. Throws a
  // Refusal if the slot is at work.
  using Look = std::function<void(const View& view)>;
  void look(uint64_t slot, const Look& look);
  // Makes all sessions again with the policies of `settings`, and forgets what they have read. The old
  // sessions are freed first, because one budget does not hold both. If the new sessions cannot be made,
  // makes the old ones again, empty, and throws the Failure. Most failures come before anything is freed. If
  // a slot is at work, throws a Refusal. Requests that come meanwhile wait.
  void change(const Settings& settings);
  // The settings of the current sessions of all slots.
  struct InForce {
    Settings settings;
    int32_t retention;  // the retention that follows from `settings`
    thimble_memory memory;
  };
  InForce in_force() const;
  size_t waiting() const;
  size_t queue_limit() const { return 4 * slots_.size(); }
  const Counts& counts() const { return counts_; }
  PrefixCache* cache() const { return cache_.get(); }  // null: states are not saved

 private:
  struct Slot {
    Slot(size_t kind_, Room& room) : kind(kind_), remembered(room) {}
    const size_t kind;  // in Policies::kinds
    Session session;    // null if a clone could not be made: the slot waits for another chance
    History history{0, 0};
    Share remembered;  // the bytes of the history, counted while no job's bytes are
    uint64_t evictions = 0;
    std::vector<float> attended;  // mean over `watched` tokens of the last answer
    uint32_t watched = 0;
    std::string question;  // the last question
    std::atomic<uint64_t> position = 0;
    uint64_t last_used = 0;
    uint64_t saved = 0;  // tokens of the stream that a file of the cache holds
    bool ended = false;  // the last job ended without a failure
    // The job of the slot; guarded by the mutex.
    std::shared_ptr<Job> job;
    Reuse reuse;
    Slot* source = nullptr;  // the slot to clone first; it stays reserved until then
    bool reserved = false;
    bool saving = false;  // its state is being saved, after the answer was sent
    std::thread thread;
    bool idle() const { return !job && !reserved && !saving; }
  };
  struct Cancelled {};
  struct Lent;
  // Settings, and the session options made from them. The options point into both other members.
  struct Policies {
    Policies(const Settings& settings, const Model& model, const std::vector<SlotKind>& kinds);
    const Settings settings;
    const Retention retention;
    std::vector<thimble_session_options> kinds;  // of each kind of slot
  };

  void fill(const Policies& policies);
  void strand(const Refusal& why);
  void work(Slot& slot);
  void assign();
  bool choose(const Job& job, Slot*& chosen, Slot*& source, Reuse& reuse);
  size_t smallest_kind(uint64_t entries) const;
  Slot* empty_slot(size_t kind, const Slot* but);
  Slot* free_slot(size_t kind, Slot*& source);
  static void interrupt(const Slot& slot);
  void take_clone(Slot& slot, Job& job, std::unique_lock<std::mutex>& lock);
  static Session clone_for(Job& job, const Session& session);
  std::function<void()> run(Slot& slot, Job& job, const Reuse& reuse);
  std::vector<int32_t> rest_of(Slot& slot, Job& job, Reuse reuse, uint32_t answer, Usage& usage);
  bool rewind(Slot& slot, Job& job, uint64_t position);
  void read(Slot& slot, Job& job, const std::vector<int32_t>& ids);
  void feed(Slot& slot, Job& job, const int32_t* ids, uint64_t count);
  bool step(Slot& slot, Job& job, bool forced, int32_t& token);
  std::vector<float> logits_for(Slot& slot, Job& job);
  std::function<void()> generate(Slot& slot, Job& job, uint32_t answer, Usage& usage);
  void note_evictions(Slot& slot);
  // The cache.
  Reuse restored(Slot& slot, Job& job, Reuse reuse, std::string& where);
  uint64_t held(const Slot& slot) const;
  std::vector<uint64_t> shared_parts(const Slot& slot, const Job& job, const std::vector<int32_t>& ids) const;
  bool pays(const Slot& slot, uint64_t reach) const;
  void count_saved(const Slot& slot, Usage& usage) const;
  void save(Slot& slot, const History& history, Job* job);
  void save_before_eviction(Slot& slot, Job& job);
  static void watch(Slot& slot);
  std::string written(const Prompt& prompt, const Task& task) const;
  void set_sampler(Slot& slot, const Task& task, uint32_t answer) const;
  template <typename Function, typename... Arguments>
  static void call_for(Job& job, Function function, Arguments... arguments);

  const Settings& settings_;
  const Model& model_;
  Room& room_;
  std::string chat_problem_;
  const int32_t end_of_turn_;
  const bool describes_tools_;      // the chat template tells the model of tools
  const std::string written_call_;  // a call as the template writes it; "": it writes none
  const CallStyle call_style_;      // of that call
  const std::string thought_mark_;  // the mark with which the model opens a thought
  Counts counts_;
  std::unique_ptr<const Policies> policies_;  // written only while no slot is in use
  bool evicts_ = false;                       // likewise
  bool moves_on_ = false;  // likewise: after a prompt, a session may not return to the chunks before its end
  thimble_memory memory_{};  // of the smallest slot; `allocated` is of all
  std::vector<thimble_memory> kinds_memory_;
  std::vector<uint64_t> kinds_settings_;  // hashes of all that decides whether a state can be continued
  std::unique_ptr<PrefixCache> cache_;
  const std::vector<SlotKind> kinds_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::atomic<const Slot*> last_ = nullptr;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> queue_;
  uint64_t clock_ = 0;
  bool stopping_ = false;
  std::atomic<bool> hurries_ = false;  // stopping, and states are no longer saved
  bool stranded_ = false;              // no slot has a session, and there is no memory for one
};

}  // namespace app::serve
