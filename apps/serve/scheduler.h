// Slots that share one budget, and who gets them: a bounded queue of jobs, and what earlier ones have read.
//
// A slot is a session and a thread. A job that goes on from what a slot holds gets that slot; where it goes
// on from the middle, and another slot is empty, it gets a clone, so that both conversations stay.
#pragma once

#include <atomic>
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
#include "apps/serve/history.h"
#include "apps/serve/room.h"
#include "apps/serve/task.h"

namespace app::serve {

// Gets what becomes of a job, on the slot's thread: begun, pieces, ended; or failed, at any time. After a
// cancelled job it gets nothing.
class Listener {
 public:
  virtual ~Listener() = default;
  virtual void begun(const Usage& usage) = 0;
  virtual void piece(const Piece& piece) = 0;
  virtual void ended(Ending ending, const std::string& stop, const Usage& usage) = 0;
  virtual void failed(const Refusal& refusal) = 0;
};

struct Job {
  explicit Job(Room& of) : room(of) {}
  Task task;
  Prompt prompt;
  Share room;  // its bytes
  std::shared_ptr<Listener> listener;
  std::atomic<bool> cancelled = false;
  std::atomic<bool> streams = false;  // it was accepted, and its client reads events
  std::atomic<bool> reading = false;
  std::atomic<uint64_t> done = 0, total = 0;  // tokens of the stream while it is read
};

// Sums since the start, for /metrics.
struct Counts {
  std::atomic<uint64_t> prompt_tokens = 0, cached_tokens = 0, generated_tokens = 0, cancelled = 0, failed = 0;
  std::atomic<uint64_t> prompt_microseconds = 0, generation_microseconds = 0;
};

// What a request is told of a failure.
Refusal refusal_of(const std::exception& error);

class Scheduler {
 public:
  // Makes the slots. What is lent outlives the scheduler; in `room` it counts what slots remember of texts.
  Scheduler(const Settings& settings, const Model& model, uint32_t slots, Room& room);
  ~Scheduler() { stop(); }
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // The prompt of a task, rendered and tokenised; its texts leave the task.
  Prompt prepare(Task& task) const;
  // Why there can be no conversations, in one sentence; empty: there can.
  const std::string& chat_problem() const { return chat_problem_; }
  // False where the queue is full.
  bool submit(const std::shared_ptr<Job>& job);
  // The job ends as soon as it can, unheard.
  void cancel(const std::shared_ptr<Job>& job);
  // Ends all jobs, and takes no more.
  void stop();

  struct SlotState {
    bool busy;
    uint64_t position;  // tokens of its stream
  };
  std::vector<SlotState> slots() const;
  // The slot whose job ended last; nothing before one did.
  std::optional<size_t> last() const;
  // What an idle slot lends to whoever looks at it.
  struct View {
    const Session& session;
    const History& history;
    const std::vector<float>& attended;  // by its last answer, by position; empty: it was not watched
    const std::string& question;         // that this answers; "": the prompt was no conversation
  };
  // Lends a slot to `look`, which is called again after an interrupt; meanwhile the slot gets no job. A slot
  // at work is a Refusal.
  using Look = std::function<void(const View& view)>;
  void look(uint64_t slot, const Look& look);
  // Makes all sessions anew with the policies of `settings`; what they have read is forgotten. The old ones
  // are freed first, since one budget does not hold both; where the new ones then cannot be made, the old
  // ones are made again, empty, and the Failure is thrown. Most of these come before anything is freed. While
  // a slot is at work, a Refusal; requests that come meanwhile wait.
  void change(const Settings& settings);
  // What all slots are made with now.
  struct InForce {
    Settings settings;
    int32_t retention;  // that these led to
    thimble_memory memory;
  };
  InForce in_force() const;
  size_t waiting() const;
  size_t queue_limit() const { return 4 * slots_.size(); }
  const Counts& counts() const { return counts_; }

 private:
  struct Slot {
    explicit Slot(Room& room) : remembered(room) {}
    Session session;  // none where a clone was not made: the slot waits for another chance
    History history{0, 0};
    Share remembered;  // the history's bytes, while no job's are counted
    uint64_t evictions = 0;
    std::vector<float> attended;  // mean over `watched` tokens of the last answer
    uint32_t watched = 0;
    std::string question;  // the last one
    std::atomic<uint64_t> position = 0;
    uint64_t last_used = 0;
    // What it is to do; guarded by the mutex.
    std::shared_ptr<Job> job;
    Reuse reuse;
    Slot* source = nullptr;  // to be cloned first; reserved until that is done
    bool reserved = false;
    std::thread thread;
    bool idle() const { return !job && !reserved; }
  };
  struct Cancelled {};
  struct Lent;
  // Settings, and the options that sessions are made with by them, which lend from both.
  struct Policies {
    Policies(const Settings& settings, const Model& model, uint32_t slots);
    const Settings settings;
    const Retention retention;
    thimble_session_options options;
  };

  void fill(const Policies& policies);
  void strand(const Refusal& why);
  void work(Slot& slot);
  void assign();
  bool choose(const Prompt& prompt, Slot*& chosen, Slot*& source, Reuse& reuse);
  Slot* empty_slot(const Slot* but);
  static void interrupt(const Slot& slot);
  void take_clone(Slot& slot, Job& job, std::unique_lock<std::mutex>& lock);
  static Session clone_for(Job& job, const Session& session);
  std::function<void()> run(Slot& slot, Job& job, const Reuse& reuse);
  std::vector<int32_t> rest_of(Slot& slot, Job& job, Reuse reuse, Usage& usage);
  bool rewind(Slot& slot, Job& job, uint64_t position);
  void read(Slot& slot, Job& job, const std::vector<int32_t>& ids);
  bool step(Slot& slot, Job& job, int32_t& token);
  std::function<void()> generate(Slot& slot, Job& job, Usage& usage);
  void note_evictions(Slot& slot);
  static void watch(Slot& slot);
  thimble_sampler_options sampler_options(const Task& task) const;
  template <typename Function, typename... Arguments>
  static void call_for(Job& job, Function function, Arguments... arguments);

  const Settings& settings_;
  const Model& model_;
  std::string chat_problem_;
  const int32_t end_of_turn_;
  Counts counts_;
  std::unique_ptr<const Policies> policies_;  // written while nobody has a slot
  bool evicts_ = false;                       // likewise
  thimble_memory memory_{};
  std::vector<std::unique_ptr<Slot>> slots_;
  std::atomic<const Slot*> last_ = nullptr;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> queue_;
  uint64_t clock_ = 0;
  bool stopping_ = false;
  bool stranded_ = false;  // there is no session, and no memory for one
};

}  // namespace app::serve
