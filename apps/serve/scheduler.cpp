// Slots and their queue (see scheduler.h).
#include "apps/serve/scheduler.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "apps/serve/answer.h"
#include "apps/serve/filters.h"
#include "apps/serve/json.h"
#include "apps/sizes.h"
#include "apps/terminal.h"

namespace app::serve {

namespace {

// How long a server that stops waits for states that are being saved.
constexpr std::chrono::seconds kTimeToSave{3};

// The job whose text this thread reads. Clones share the progress function of their original, so the function
// cannot find the job in another way.
thread_local Job* reading_job = nullptr;

void show_progress(void*, const thimble_progress* progress) {
  if (!reading_job) return;
  reading_job->done = progress->done;
  reading_job->total = progress->total;
}

// The logarithm of the sum of the exponentials of all logits. The log-probability of a token is its logit
// minus this.
double log_sum(const std::vector<float>& logits) {
  const double most = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - most);
  return most + std::log(sum);
}

TokenLogprob logprob_of(const Model& model, const std::vector<float>& logits, int32_t token, uint32_t count) {
  const double all = log_sum(logits);
  const auto logprob = [&](int32_t id) { return static_cast<double>(logits[static_cast<size_t>(id)]) - all; };
  std::vector<int32_t> best(logits.size());
  std::iota(best.begin(), best.end(), 0);
  const auto n = static_cast<std::ptrdiff_t>(std::min<size_t>(count, best.size()));
  std::partial_sort(best.begin(), best.begin() + n, best.end(), [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  });
  TokenLogprob out{token_bytes(model, token), logprob(token), {}};
  for (auto id = best.begin(); id != best.begin() + n; ++id)
    out.top.emplace_back(token_bytes(model, *id), logprob(*id));
  return out;
}

// The answer as the conversation's next message, in the form that the readers of the wire formats give
// messages.
Json answer_message(const Task& task, const std::string& text) {
  Json message = {{"role", "assistant"},
                  {"content", task.begun.is_null() ? Json("") : task.begun["content"]}};
  AnswerFilter filter(task.opening, task.tools);
  std::vector<Part> parts = filter.push(text), rest = filter.finish();
  parts.insert(parts.end(), rest.begin(), rest.end());
  for (const Part& part : parts) {
    if (part.is_call())
      message["tool_calls"].push_back(
          {{"type", "function"},
           {"function", {{"name", part.name}, {"arguments", parse_bounded(part.arguments)}}}});
    else if (part.kind == Part::Kind::kText)
      message["content"].get_ref<std::string&>() += part.text;
  }
  return message;
}

const char* const kProbedTool = "a_tool_that_no_template_names";

// What the chat template makes of messages, with these tools.
std::string probe(const Model& model, const ChatStyle& style, const Json& messages, const Json& tools) {
  ChatStyle probe = style;
  Json variables = style.variables.empty() ? Json::object() : Json::parse(style.variables);
  if (!tools.is_null()) variables["tools"] = tools;
  probe.variables = variables.empty() ? "" : write_json(variables);
  return chat_text(model, probe, write_json(messages), 0);
}

// Whether the chat template tells the model of tools.
bool writes_tools(const Model& model, const ChatStyle& style) {
  const Json tool = {{"type", "function"},
                     {"function",
                      {{"name", kProbedTool},
                       {"description", kProbedTool},
                       {"parameters", {{"type", "object"}, {"properties", Json::object()}}}}}};
  try {
    const Json messages = Json::array({{{"role", "user"}, {"content", "a"}}});
    return probe(model, style, messages, Json::array({tool})).find(kProbedTool) != std::string::npos;
  } catch (const Failure&) {
    return true;  // the template will say the same of a request with tools
  }
}

// A conversation with a call of a tool as the chat template writes it; "" if it writes none, or refuses it.
std::string written_call(const Model& model, const ChatStyle& style) {
  const std::string id = "call00000";  // as long as every template accepts
  const Json made = {
      {"type", "function"}, {"function", {{"name", kProbedTool}, {"arguments", Json::object()}}}, {"id", id}};
  const Json messages =
      Json::array({{{"role", "user"}, {"content", "a"}},
                   {{"role", "assistant"}, {"content", ""}, {"tool_calls", Json::array({made})}},
                   {{"role", "tool"}, {"content", "b"}, {"tool_call_id", id}}});
  try {
    const std::string text = probe(model, style, messages, nullptr);
    return text.find(kProbedTool) != std::string::npos || text.find(id) != std::string::npos ? text : "";
  } catch (const Failure&) {
    return "";  // some templates refuse a role
  }
}

// The last paragraph of the user's last message, which follows the text that the question may be about; "" if
// there is none.
std::string question_of(const Prompt& prompt) {
  for (auto message = prompt.messages.rbegin(); message != prompt.messages.rend(); ++message) {
    if ((*message)["role"] != "user" || !(*message)["content"].is_string()) continue;
    const std::string_view text = strip((*message)["content"].get_ref<const std::string&>());
    const size_t blank = text.rfind("\n\n");
    return std::string(blank == text.npos ? text : strip(text.substr(blank)));
  }
  return "";
}

int32_t end_of_turn_or_text(const Model& model, const ChatStyle& style, std::string& problem) {
  try {
    return end_of_turn(model, style);
  } catch (const Failure& failure) {
    // A base model only completes texts. This keeps the start of the failure's sentence and replaces the
    // advice, because the server has other ways out.
    const std::string text = failure.what();
    if (failure.status == THIMBLE_UNSUPPORTED)
      problem = text.substr(0, text.find(';')) +
                "; use /v1/completions, or start the server with --chat-template NAME, chatml for example";
    return model_info(model).eos;
  }
}

// The mark of thoughts that the model's vocabulary has, or that of most models.
std::string own_thought_mark(const Model& model) {
  std::string mark;
  for (const std::string_view known : thought_marks()) {
    mark = known;
    const std::vector<int32_t> ids = token_ids(model, mark, THIMBLE_TOKENIZE_PARSE_SPECIAL);
    if (!ids.empty() && is_mark(token_bytes(model, ids[0]))) break;
  }
  return mark;
}

// The bytes of so many sessions of one kind. `first`: their weights are counted.
uint64_t bytes_of_slots(const thimble_memory& one, uint32_t slots, bool first) {
  return one.total - (first ? 0 : one.weights) + (slots - 1) * clone_bytes(one);
}

Failure too_small(uint64_t budget, uint64_t needed, uint32_t slots, bool sized) {
  return Failure(
      THIMBLE_BUDGET,
      "the budget of " + format_size(budget) + " lacks " + format_size(needed - budget) + ": " +
          std::to_string(slots) + " slots need " + format_size(needed) +
          (sized
               ? "; choose fewer or smaller --slots"
               : "; choose fewer --slots or a smaller --pool, or leave --pool out for the largest that fits"),
      needed - budget);
}

void log_cache(const std::string& sentence) {
  std::fprintf(stderr, "thimble: cache: %s\n", visible(sentence).c_str());
}

// A hash of everything that a state depends on besides the messages and their variables: the model's file,
// the version and device that compute, the settings that session files compare, and how the messages of a
// conversation become tokens. The settings of the session are those of an empty one that is saved for this in
// `folder`. That file has no name, so other servers neither delete nor count it.
uint64_t settings_hash(const Session& session, const Settings& settings, const std::string& folder) {
  std::string path = folder + "/probe-XXXXXX.part";
  const int file = ::mkstemps(path.data(), 5);
  if (file < 0) throw Failure(THIMBLE_IO, path + " cannot be written: " + std::strerror(errno));
  ::unlink(path.c_str());
  std::string all = thimble_version();
  try {
    call(thimble_session_save_fd, session.get(), file, nullptr, 0);
    const std::string info = session_info("/dev/fd/" + std::to_string(file));
    all += info.substr(info.find("\"settings\""));
  } catch (...) {
    ::close(file);
    throw;
  }
  ::close(file);
  const std::string device = decided_options(session).device;
  all += "\n" + device.substr(0, device.find(':'));
  std::error_code error;
  const auto model = native_path(settings.model);
  const auto changed = std::filesystem::last_write_time(model, error).time_since_epoch();
  all +=
      "\n" + std::to_string(std::filesystem::file_size(model, error)) + " " + std::to_string(changed.count());
  const ChatStyle& chat = settings.chat;
  all += "\n" + chat.format + "\n" + std::to_string(chat.parses_content) + chat.source;
  return add_hash(kFnv1aBasis, all.data(), all.size());
}

uint64_t microseconds_since(std::chrono::steady_clock::time_point start) {
  const auto passed = std::chrono::steady_clock::now() - start;
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(passed).count());
}

}  // namespace

Refusal refusal_of(const std::exception& error) {
  if (const auto* refusal = dynamic_cast<const Refusal*>(&error)) return *refusal;
  if (dynamic_cast<const std::bad_alloc*>(&error))
    return Refusal(503, thimble_status_text(THIMBLE_OUT_OF_MEMORY));
  const auto* failure = dynamic_cast<const Failure*>(&error);
  switch (failure ? failure->status : THIMBLE_INTERNAL) {
    case THIMBLE_CONTEXT_FULL:
      return Refusal(400, error.what(), "context_length_exceeded");
    case THIMBLE_INVALID_ARGUMENT:
    case THIMBLE_UNSUPPORTED:
      return Refusal(400, error.what());
    case THIMBLE_OUT_OF_MEMORY:
    case THIMBLE_BUDGET:
    case THIMBLE_DEVICE_LOST:
      return Refusal(503, error.what());
    default:
      return Refusal(500, error.what());
  }
}

// Releases reserved slots when it is destroyed.
struct Scheduler::Lent {
  Scheduler& scheduler;
  std::vector<Slot*> slots;
  ~Lent() {
    const std::lock_guard lock(scheduler.mutex_);
    for (Slot* slot : slots) slot->reserved = false;
    scheduler.assign();
  }
};

// Calls a function of the job's session, and calls it again after an interrupt that was meant for an earlier
// job.
template <typename Function, typename... Arguments>
void Scheduler::call_for(Job& job, Function function, Arguments... arguments) {
  do {
    if (job.cancelled) throw Cancelled();
  } while (!call_unless_interrupted(function, arguments...));
}

Session Scheduler::clone_for(Job& job, const Session& session) {
  thimble_session* copy = nullptr;
  call_for(job, thimble_session_clone, session.get(), &copy);
  return Session(copy);
}

Scheduler::Scheduler(const Settings& settings, const Model& model, const ServeFlags& flags, Room& room)
    : settings_(settings),
      model_(model),
      room_(room),
      end_of_turn_(end_of_turn_or_text(model, settings.chat, chat_problem_)),
      describes_tools_(!chat_problem_.empty() || writes_tools(model, settings.chat)),
      written_call_(chat_problem_.empty() ? written_call(model, settings.chat) : ""),
      call_style_(written_calls(written_call_)),
      thought_mark_(own_thought_mark(model)),
      policies_(std::make_unique<Policies>(settings, model, flags.slots)),
      kinds_(flags.slots) {
  try {
    if (!flags.cache_dir.empty()) {
      cache_ = std::make_unique<PrefixCache>(flags.cache_dir, flags.cache_bytes, session_note, log_cache);
      std::signal(SIGXFSZ, SIG_IGN);  // a limit on the size of files is an error, as a full disk is
    }
  } catch (const std::runtime_error& error) {
    throw Failure(THIMBLE_IO, error.what());
  }
  for (size_t kind = 0; kind < kinds_.size(); ++kind)
    for (uint32_t i = 0; i < kinds_[kind].count; ++i) slots_.push_back(std::make_unique<Slot>(kind, room));
  fill(*policies_);
  if (cache_) {
    const PrefixCache::Size size = cache_->size();
    uint64_t ours = 0;
    for (const uint64_t settings_hash : kinds_settings_) ours += cache_->count(settings_hash);
    log_cache(cache_->folder() + " holds " + std::to_string(size.states) + " states, " +
              format_size(size.bytes) + " of " + format_size(size.limit) + "; " + std::to_string(ours) +
              " are of this model with these options");
  }
  for (const auto& slot : slots_) slot->thread = std::thread([this, &slot = *slot] { work(slot); });
}

// ---- policies ----

namespace {

// Slots that are given a pool keep the format that they are given, too.
Settings settings_for(Settings s, const std::vector<SlotKind>& slots) {
  for (const SlotKind& kind : slots) s.kv_given |= kind.pool != 0;
  return s;
}

}  // namespace

// Throws before anything is allocated if the slots exceed the budget. Only sessions of the same size
// can be clones of each other, so each kind of slot gets a part of the budget.
Scheduler::Policies::Policies(const Settings& s, const Model& model, const std::vector<SlotKind>& slots)
    : settings(settings_for(s, slots)), retention(choose_retention(settings, model, 0, slots[0].count - 1)) {
  const uint64_t budget = settings.session.budget_bytes;
  uint64_t needed = 0;
  uint32_t count = 0;
  std::vector<uint64_t> each;
  for (const SlotKind& kind : slots) {
    thimble_session_options options = session_options(settings, model, retention, 0);
    options.progress = show_progress;
    options.watch = options.draft == THIMBLE_DRAFT_NONE;  // no draft can be watched
    if (kind.pool) options.pool = kind.pool;
    if (slots.size() > 1) options.budget_bytes = 0;
    leave_room_for_clones(model, options, kind.count - 1);
    each.push_back(bytes_of_slots(plan(model, options), kind.count, kinds.empty()));
    needed += each.back();
    count += kind.count;
    kinds.push_back(options);
  }
  if (!budget) return;
  if (needed > budget) throw too_small(budget, needed, count, slots.front().pool > 0);
  if (slots.size() == 1) return;
  each.front() += budget - needed;
  for (size_t kind = 0; kind < kinds.size(); ++kind) kinds[kind].budget_bytes = each[kind];
}

// Gives every slot a new session. The caller ensures that no slot is in use, and does not hold the mutex.
void Scheduler::fill(const Policies& policies) {
  for (const auto& slot : slots_) {
    slot->session.reset();
    slot->history = History(0, 0);
    slot->remembered.force(0);
    slot->evictions = slot->position = slot->last_used = slot->saved = 0;
    slot->attended.clear();
    slot->question.clear();
  }
  std::vector<const Session*> firsts;  // of each kind
  for (const auto& slot : slots_) {
    const bool first = slot->kind == firsts.size();
    slot->session = first ? create_session(model_, policies.kinds[slot->kind]) : clone(*firsts.back());
    if (first) firsts.push_back(&slot->session);
    const thimble_session_options decided = decided_options(slot->session);
    slot->history = History(decided.chunk, decided.local);
  }
  std::vector<uint64_t> kinds_settings;
  if (cache_)
    for (const Session* first : firsts)
      kinds_settings.push_back(settings_hash(*first, settings_, cache_->folder()));
  const std::lock_guard lock(mutex_);
  kinds_settings_ = std::move(kinds_settings);
  evicts_ = thimble_retention_traits(policies.retention.policy) & THIMBLE_TRAIT_EVICTS;
  moves_on_ = evicts_ || memory(*firsts.front()).states || model_info(model_).window_layers;
  kinds_memory_.clear();
  for (const Session* first : firsts) kinds_memory_.push_back(memory(*first));
  memory_ = kinds_memory_.front();
  memory_.budget = policies.settings.session.budget_bytes;
  for (size_t kind = 1; kind < kinds_memory_.size(); ++kind)
    memory_.allocated += kinds_memory_[kind].allocated;
  last_ = nullptr;
  stranded_ = false;
}

// Called when no session is left: refuses waiting jobs. Later jobs are refused until settings come that fit.
void Scheduler::strand(const Refusal& why) {
  std::deque<std::shared_ptr<Job>> abandoned;
  {
    const std::lock_guard lock(mutex_);
    stranded_ = true;
    abandoned.swap(queue_);
  }
  for (const auto& job : abandoned) job->listener->failed(why);
}

void Scheduler::change(const Settings& settings) {
  Lent lent{*this, {}};
  {
    std::unique_lock lock(mutex_);
    const auto any = [&](auto of) {
      return std::any_of(slots_.begin(), slots_.end(), [&](const auto& slot) { return of(*slot); });
    };
    // Waits for callers that inspect a slot, which takes only a short time.
    changed_.wait(lock, [&] {
      return stopping_ || !any([](const Slot& slot) { return slot.reserved || slot.saving; });
    });
    if (any([](const Slot& slot) { return !slot.idle(); }))
      throw Refusal(409, "a slot is busy; change the settings when all slots are idle");
    for (const auto& slot : slots_) {
      slot->reserved = true;
      lent.slots.push_back(slot.get());
    }
  }
  auto next = std::make_unique<Policies>(settings, model_, kinds_);
  try {
    fill(*next);
  } catch (const std::exception&) {
    try {
      fill(*policies_);
    } catch (const std::exception& error) {
      if (!slots_.front()->session) strand(refusal_of(error));
    }
    throw;
  }
  const std::lock_guard lock(mutex_);
  policies_ = std::move(next);
}

Scheduler::InForce Scheduler::in_force() const {
  const std::lock_guard lock(mutex_);
  return {policies_->settings, policies_->retention.policy, memory_};
}

Prompt Scheduler::prepare(Task& task) const {
  Prompt prompt;
  if (!task.messages.is_array()) {
    const std::string text = std::move(task.prompt);
    prompt.ids = task.ids.empty() ? token_ids(model_, text, kPromptFlags) : std::move(task.ids);
  } else if (!chat_problem_.empty()) {
    throw Refusal(400, chat_problem_);
  } else {
    prompt.messages = std::move(task.messages);
    task.messages = nullptr;
    const Json system = {{"role", "system"}, {"content", settings_.system}};
    const bool adds_tools = !describes_tools_ && !task.tools.is_null();
    if ((!settings_.system.empty() || adds_tools) && prompt.messages.front()["role"] != "system") {
      prompt.messages.insert(prompt.messages.begin(), system);
      for (Mark& mark : task.marks) ++mark.messages;
    }
    Json variables =
        settings_.chat.variables.empty() ? Json::object() : Json::parse(settings_.chat.variables);
    if (!task.variables.is_null()) variables.update(task.variables);
    if (!task.tools.is_null()) variables["tools"] = task.tools;
    if (!variables.empty()) prompt.variables = write_json(variables);
    ChatStyle style = settings_.chat;
    style.variables = prompt.variables;
    std::string text = chat_text(model_, style, written(prompt, task), 0);
    task.opening = opening_of(text);
    task.is_chat = true;
    task.call_mark = call_mark(text);
    task.call_style = described_calls(text);
    if (!task.call_style.format) task.call_style = call_style_.format ? call_style_ : mentioned_calls(text);
    task.opening.goes_on = !task.begun.is_null();
    if (task.opening.goes_on) text += begun_answer(task.opening, task.begun, thought_mark_);
    prompt.ids = token_ids(model_, text, kPromptFlags);
  }
  if (prompt.ids.empty()) throw Refusal(400, "the prompt has no tokens");
  return prompt;
}

// The messages as the chat template gets them.
std::string Scheduler::written(const Prompt& prompt, const Task& task) const {
  const bool writes_calls = !chat_problem_.empty() || !written_call_.empty();
  if (describes_tools_ && writes_calls) return write_json(prompt.messages);
  Json messages = writes_calls ? prompt.messages : with_calls_as_text(prompt.messages);
  if (!describes_tools_ && !task.tools.is_null()) describe_tools(task.tools, messages);
  return write_json(messages);
}

// ---- who gets which slot ----

bool Scheduler::submit(const std::shared_ptr<Job>& job) {
  const std::lock_guard lock(mutex_);
  if (stopping_) throw Refusal(503, "the server is stopping");
  if (stranded_) throw Refusal(503, "the server has no memory for a session; change its settings");
  if (job->cancelled) return true;
  if (queue_.size() >= queue_limit()) return false;
  const int64_t answer = job->task.max_tokens.value_or(settings_.predict);
  job->entries = job->prompt.ids.size() + static_cast<uint64_t>(std::max<int64_t>(answer, 0));
  job->since = std::chrono::steady_clock::now();
  queue_.push_back(job);
  assign();
  return true;
}

void Scheduler::cancel(const std::shared_ptr<Job>& job) {
  const std::lock_guard lock(mutex_);
  if (job->cancelled.exchange(true)) return;
  const auto waiting = std::find(queue_.begin(), queue_.end(), job);
  if (waiting != queue_.end()) {
    queue_.erase(waiting);
    ++counts_.cancelled;
  }
  for (const auto& slot : slots_) {
    if (slot->job == job) interrupt(*slot);
  }
}

// Interrupts the session that the slot's job waits for: its own, or the one that is being cloned for it.
void Scheduler::interrupt(const Slot& slot) {
  const Slot& at_work = slot.source ? *slot.source : slot;
  thimble_session_interrupt(at_work.session.get());
}

void Scheduler::stop() {
  std::deque<std::shared_ptr<Job>> abandoned;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    abandoned.swap(queue_);
    for (const auto& slot : slots_) {
      if (!slot->job) continue;
      abandoned.push_back(slot->job);
      slot->job->cancelled = true;
      interrupt(*slot);
    }
  }
  changed_.notify_all();
  {
    std::unique_lock lock(mutex_);
    const auto saving = [](const auto& slot) { return slot->saving; };
    changed_.wait_for(lock, kTimeToSave, [&] { return std::none_of(slots_.begin(), slots_.end(), saving); });
    hurries_ = true;
    for (const auto& slot : slots_)
      if (slot->saving) interrupt(*slot);
  }
  for (const auto& slot : slots_) {
    if (slot->thread.joinable()) slot->thread.join();
  }
  for (const auto& job : abandoned) job->listener->failed(Refusal(503, "the server is stopping"));
}

Scheduler::Slot* Scheduler::empty_slot(size_t kind, const Slot* but) {
  for (const auto& slot : slots_) {
    if (slot->kind == kind && slot.get() != but && slot->idle() && slot->history.empty()) return slot.get();
  }
  return nullptr;
}

// The idle slot of a kind that a new text takes: an empty one, or the one that was not used for longest. A
// slot without a session needs a `source` to clone. nullptr: there is none.
Scheduler::Slot* Scheduler::free_slot(size_t kind, Slot*& source) {
  Slot* chosen = empty_slot(kind, nullptr);
  source = nullptr;
  for (const auto& slot : slots_) {
    if (slot->kind != kind || !slot->idle() || !slot->session) continue;
    source = slot.get();
    if (!chosen || (!chosen->history.empty() && slot->last_used < chosen->last_used)) chosen = slot.get();
  }
  const bool clones = chosen && !chosen->session;
  if (clones && !source) return nullptr;
  if (!clones) source = nullptr;
  return chosen;
}

// The smallest slots that hold so many entries, or else the largest slots.
size_t Scheduler::smallest_kind(uint64_t entries) const {
  size_t kind = 0;
  while (kind + 1 < kinds_memory_.size() && kinds_memory_[kind].capacity < entries) ++kind;
  return kind;
}

// Chooses the best idle slot for a job, and the place from which it continues. Returns false if there is
// none.
bool Scheduler::choose(const Job& job, Slot*& chosen, Slot*& source, Reuse& reuse) {
  const size_t least = smallest_kind(job.entries);
  chosen = source = nullptr;
  reuse = {};
  for (const auto& slot : slots_) {
    if (slot->kind < least || !(slot->idle() || slot->saving)) continue;
    const Reuse here = slot->history.find(job.prompt);
    if (here.position <= reuse.position) continue;
    chosen = slot.get();
    reuse = here;
  }
  if (chosen && chosen->saving) return false;  // this takes less time than to read again in another slot
  if (chosen) {
    Slot* empty = reuse.position < chosen->history.ids().size() ? empty_slot(chosen->kind, chosen) : nullptr;
    source = empty ? chosen : nullptr;
    if (empty) chosen = empty;
    return true;
  }
  for (size_t kind = least; !chosen && kind < kinds_.size(); ++kind) chosen = free_slot(kind, source);
  return chosen != nullptr;
}

// Gives waiting jobs to idle slots, each slot to the first job that it suits. The caller holds the mutex.
void Scheduler::assign() {
  Slot *slot, *source;
  Reuse reuse;
  for (auto next = queue_.begin(); next != queue_.end() && !stopping_;) {
    if (!choose(**next, slot, source, reuse)) {
      ++next;
      continue;
    }
    slot->job = *next;
    slot->reuse = reuse;
    slot->source = source;
    slot->last_used = ++clock_;
    if (source) source->reserved = true;
    counts_.waiting_microseconds += microseconds_since(slot->job->since);
    next = queue_.erase(next);
  }
  changed_.notify_all();
}

// ---- a slot's thread ----

void Scheduler::work(Slot& slot) {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return slot.job || stopping_; });
    if (!slot.job) return;
    const std::shared_ptr<Job> job = slot.job;
    const Reuse reuse = slot.reuse;
    if (slot.source) {
      take_clone(slot, *job, lock);
      assign();
    }
    lock.unlock();
    const std::function<void()> tell = slot.session ? run(slot, *job, reuse) : [] {};
    lock.lock();
    slot.job = nullptr;
    slot.saving = slot.session && slot.ended && pays(slot, slot.history.reach());
    assign();
    lock.unlock();
    try {
      tell();                          // called after the slot became idle, so that the client finds it idle
    } catch (const std::exception&) {  // there is no memory to report it
    }
    try {
      if (slot.saving) save(slot, slot.history, nullptr);
    } catch (const Cancelled&) {
      log_cache("a state is not saved: the server is stopping");
    }
    lock.lock();
    if (!std::exchange(slot.saving, false)) continue;
    assign();
  }
}

// Replaces the slot's session, and its bytes in the budget, by a clone of its source. The source may first
// have to finish a chunk. If the job is cancelled meanwhile, the slot is left without a session.
void Scheduler::take_clone(Slot& slot, Job& job, std::unique_lock<std::mutex>& lock) {
  Slot& source = *slot.source;
  Session copy = std::move(slot.session);
  lock.unlock();
  copy.reset();
  bool cancelled = false;
  try {
    copy = clone_for(job, source.session);
  } catch (const Cancelled&) {
    cancelled = true;
  } catch (const Failure&) {  // the system has no memory: the job gets the session that was to be cloned
  }
  lock.lock();
  slot.source = nullptr;
  source.reserved = false;
  if (cancelled) {
    ++counts_.cancelled;
    return;
  }
  slot.history = source.history;
  slot.evictions = source.evictions;
  slot.saved = source.saved;
  if (copy) {
    slot.session = std::move(copy);
    return;
  }
  slot.session = std::move(source.session);
  source.history.rewind({});
  source.position = 0;
}

// Runs a job from beginning to end. The slot is usable afterwards, also after a failure. Returns a function
// that tells the listener how the job ended.
std::function<void()> Scheduler::run(Slot& slot, Job& job, const Reuse& reuse) {
  Usage usage;
  std::function<void()> tell = [] {};
  reading_job = &job;
  slot.remembered.force(0);  // the job's bytes already include the conversation
  slot.attended.clear();
  slot.watched = 0;
  slot.question = question_of(job.prompt);
  slot.ended = false;
  try {
    for (uint32_t answer = 0; answer < job.task.answers; ++answer) {
      const auto start = std::chrono::steady_clock::now();
      const Reuse from = answer ? slot.history.find(job.prompt) : reuse;
      read(slot, job, rest_of(slot, job, from, answer, usage));
      counts_.prompt_microseconds += microseconds_since(start);
      if (!answer) {
        counts_.prompt_tokens += usage.prompt;
        counts_.cached_tokens += usage.cached;
      }
      const auto generating = std::chrono::steady_clock::now();
      tell = generate(slot, job, answer, usage);
      counts_.generation_microseconds += microseconds_since(generating);
    }
    slot.ended = true;
  } catch (const Cancelled&) {
    // An interrupted call is finished or discarded when the slot is used again, because that could take
    // seconds now.
    ++counts_.cancelled;
  } catch (const std::exception& error) {
    ++counts_.failed;
    thimble_session_reset(slot.session.get(), nullptr);
    slot.history.rewind({});
    slot.evictions = slot.saved = 0;
    tell = [&listener = *job.listener, refusal = refusal_of(error)] { listener.failed(refusal); };
  }
  reading_job = nullptr;
  job.room.resize(std::min(job.room.bytes(), slot.history.bytes()));
  slot.remembered = std::move(job.room);
  counts_.generated_tokens += usage.generated;
  slot.position = slot.history.ids().size();
  last_ = &slot;
  return tell;
}

// Takes the session back to the place from which the job continues, and returns the ids that are left to
// read.
std::vector<int32_t> Scheduler::rest_of(Slot& slot, Job& job, Reuse reuse, uint32_t answer, Usage& usage) {
  const Prompt& prompt = job.prompt;
  std::vector<int32_t> rest;
  if (reuse.position && !rewind(slot, job, reuse.position)) reuse = {};
  std::string where;
  if (cache_) reuse = restored(slot, job, reuse, where);
  if (reuse.messages) {
    try {
      ChatStyle style = settings_.chat;
      style.variables = prompt.variables;
      std::string text = chat_text(model_, style, written(prompt, job.task), reuse.messages);
      if (job.task.opening.goes_on) text += begun_answer(job.task.opening, job.task.begun, thought_mark_);
      rest = token_ids(model_, text, THIMBLE_TOKENIZE_PARSE_SPECIAL);
    } catch (const Failure&) {  // a template that renders earlier turns differently
      reuse = {};
    }
  }
  if (!reuse.position) {
    call(thimble_session_reset, slot.session.get());
    slot.evictions = 0;
  }
  slot.saved = std::min(slot.saved, reuse.position);
  slot.history.rewind(reuse);
  set_sampler(slot, job.task, answer);
  if (!reuse.messages) {
    if (answer + 1 == job.task.answers)
      rest = std::move(job.prompt.ids);
    else
      rest = job.prompt.ids;  // the next answer needs them again
    rest.erase(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(reuse.position));
  }
  const uint64_t cached = held(slot);
  if (!answer) usage.cached = cached;
  if (reuse.cut && end_of_turn_ >= 0) {
    call_for(job, thimble_session_accept, slot.session.get(), end_of_turn_);
    slot.history.add_generated(end_of_turn_);
  }
  usage.prompt = slot.history.ids().size() + rest.size();
  if (cache_)
    log_cache(std::to_string(cached) + " of " + std::to_string(usage.prompt) + " tokens were not read again" +
              where);
  return rest;
}

// Returns false if entries were evicted since that position.
bool Scheduler::rewind(Slot& slot, Job& job, uint64_t position) {
  for (;;) {
    const thimble_status status = thimble_session_rewind(slot.session.get(), position, nullptr);
    if (status != THIMBLE_INTERRUPTED) return status == THIMBLE_OK;
    if (job.cancelled) throw Cancelled();
  }
}

// Appends tokens to a prompt, and reads the chunks that are certain to be complete.
void Scheduler::feed(Slot& slot, Job& job, const int32_t* ids, uint64_t count) {
  const uint64_t before = slot.history.ids().size();
  try {
    call_for(job, thimble_session_feed, slot.session.get(), ids, count);
  } catch (const Cancelled&) {
    slot.history.add_prompt(ids, stats(slot.session).position - before);
    throw;
  }
  slot.history.add_prompt(ids, count);
}

void Scheduler::read(Slot& slot, Job& job, const std::vector<int32_t>& ids) {
  job.done = slot.history.ids().size();
  job.total = job.done + ids.size();
  job.reading = true;
  try {
    uint64_t at = 0;
    for (const uint64_t end : shared_parts(slot, job, ids)) {
      feed(slot, job, &ids[at], end - at);
      save_before_eviction(slot, job);
      at = end;
    }
    feed(slot, job, &ids[at], ids.size() - at);
    save_before_eviction(slot, job);
  } catch (const Cancelled&) {
    if (evicts_) slot.history.stopped_reading();
    throw;
  }
  try {
    call_for(job, thimble_session_flush, slot.session.get());
  } catch (const Cancelled&) {
    if (evicts_) slot.history.evicted_at(slot.history.ids().size());
    throw;
  }
  note_evictions(slot);
  job.reading = false;
}

// Generates one token, or takes the one that is `forced`. Returns false if the pool is full.
bool Scheduler::step(Slot& slot, Job& job, bool forced, int32_t& token) {
  for (;;) {
    if (job.cancelled) {
      if (evicts_) slot.history.evicted_at(slot.history.ids().size());
      throw Cancelled();
    }
    thimble_error error = {};
    error.struct_size = sizeof error;
    const thimble_status status = forced ? thimble_session_accept(slot.session.get(), token, &error)
                                         : thimble_session_step(slot.session.get(), &token, &error);
    if (status == THIMBLE_OK || status == THIMBLE_CONTEXT_FULL) return status == THIMBLE_OK;
    if (status != THIMBLE_INTERRUPTED) raise(error);
  }
}

std::vector<float> Scheduler::logits_for(Slot& slot, Job& job) {
  const float* values = nullptr;
  uint32_t count = 0;
  call_for(job, thimble_session_logits, slot.session.get(), &values, &count);
  return {values, values + count};
}

std::function<void()> Scheduler::generate(Slot& slot, Job& job, uint32_t answer, Usage& usage) {
  const Task& task = job.task;
  const int64_t limit = task.max_tokens.value_or(settings_.predict);
  Listener& listener = *job.listener;
  StopFilter filter(task.stops);
  std::string text;
  const auto show = [&](Piece piece) {
    text += piece.text;
    listener.piece(piece);
  };
  Ending ending = Ending::kLength;
  Gate gate(model_, task, job.grammars);
  slot.history.begin_answer();
  if (!answer) {
    count_saved(slot, usage);
    listener.begun(usage);
  }
  for (int64_t n = 0; (limit < 0 || n < limit) && !filter.met(); ++n) {
    std::vector<float> before;
    if (task.logprobs) before = logits(slot.session);
    if (task.watch) watch(slot);
    int32_t token = gate.before(slot.session, [&] { return logits_for(slot, job); });
    if (!step(slot, job, token >= 0, token)) break;
    ++usage.generated;
    slot.history.add_generated(token);
    slot.position = slot.history.ids().size();
    if (!task.ignores_end && thimble_token_ends(model_.get(), token)) {
      ending = Ending::kEnd;
      break;
    }
    if (std::find(task.stop_ids.begin(), task.stop_ids.end(), token) != task.stop_ids.end()) {
      ending = Ending::kStopText;
      break;
    }
    std::string said = token_text(slot.session, token);
    if (said.empty() && job.prompt.messages.is_array()) {
      if (std::string mark = token_bytes(model_, token); is_mark(mark)) said = std::move(mark);
    }
    gate.push(said);
    Piece piece{filter.push(said), {}};
    if (task.logprobs && !filter.met())
      piece.logprobs.push_back(logprob_of(model_, before, token, task.top_logprobs));
    show(piece);
  }
  if (const std::string held = filter.finish(); !held.empty()) show({held, {}});
  note_evictions(slot);
  const std::string stop = filter.met() ? *filter.met() : "";
  if (filter.met()) ending = Ending::kStopText;
  // The stream may contain what ended the answer, or ends that were ignored, which the next prompt will not.
  if (ending != Ending::kStopText && !task.ignores_end)
    slot.history.add_turn(job.prompt, answer_message(task, text), ending == Ending::kLength);
  count_saved(slot, usage);
  if (answer + 1 < task.answers) {
    listener.next(ending);
    return [] {};
  }
  return [&listener, ending, stop, usage] { listener.ended(ending, stop, usage); };
}

// Adds the attention of the token that the next one is sampled from. This takes up to one and a half times as
// long as a step, so only the first tokens of an answer are watched.
void Scheduler::watch(Slot& slot) {
  constexpr uint32_t kMostWatched = 32;
  if (slot.watched == kMostWatched) return;
  std::vector<float> one;
  try {
    one = attended(slot.session);
  } catch (const Failure&) {  // not known after an eviction; or interrupted, which the step will report
    return;
  }
  slot.attended.resize(one.size());
  const float before = static_cast<float>(slot.watched++), all = before + 1;
  for (size_t i = 0; i < one.size(); ++i) slot.attended[i] = (slot.attended[i] * before + one[i]) / all;
}

void Scheduler::note_evictions(Slot& slot) {
  const uint64_t evictions = stats(slot.session).evictions;
  if (evictions != std::exchange(slot.evictions, evictions))
    slot.history.evicted_at(slot.history.ids().size());
}

// ---- the cache ----

// Tokens of the stream that need not be read again. After a rewind, a model with recurrent layers reads the
// tokens since its last snapshot again.
uint64_t Scheduler::held(const Slot& slot) const {
  const thimble_stats now = stats(slot.session);
  return now.position - now.waiting;
}

// Looks for a file that holds more of the job's prompt than the session does, and continues from it. `where`
// says for the log what was reused, and why not more.
Reuse Scheduler::restored(Slot& slot, Job& job, Reuse reuse, std::string& where) {
  const auto start = std::chrono::steady_clock::now();
  uint64_t most = reuse.position ? held(slot) : 0;
  where = most ? ", from the slot" : "";
  Share notes(room_);  // for the note of a file, which has the texts that the job has
  if (!notes.resize(job.room.bytes())) return reuse;
  const auto found = cache_->find(slot.history.hashes(job.prompt, kinds_settings_[slot.kind]));
  for (const PrefixCache::Match& match : found.matches) {
    if (match.position <= most) break;
    try {
      StateNote note;
      History history = slot.history;
      if (!note.read(session_note(match.path)) || !history.read(note.rest))
        throw Failure(THIMBLE_FORMAT, match.path + " is not a state of this version");
      const Reuse there = history.find(job.prompt);
      if (there.position < match.position) continue;  // other texts with the same hash
      restore_session(slot.session, match.path);
      reuse = {};
      slot.history = std::move(history);
      slot.evictions = stats(slot.session).evictions;
      if (!rewind(slot, job, there.position))
        throw Failure(THIMBLE_FORMAT, match.path + " does not return to where its keys say");
      slot.saved = there.position;
      most = held(slot);
      reuse = there;
      cache_->note_use(match.path);
      char seconds[32];
      std::snprintf(seconds, sizeof seconds, "%.3f", static_cast<double>(microseconds_since(start)) / 1e6);
      where = ", from " + match.path + " in " + seconds + " s";
      break;
    } catch (const Failure& failure) {
      if (failure.status == THIMBLE_DEVICE_LOST) throw;
      // A session that could not take all of a state is empty.
      if (stats(slot.session).position != reuse.position) {
        reuse = {};
        where.clear();
      }
      most = reuse.position ? held(slot) : 0;
      if (failure.status == THIMBLE_IO) continue;  // another server deleted it
      if (failure.status != THIMBLE_FORMAT && failure.status != THIMBLE_MISMATCH) {
        log_cache(std::string("a saved state is not used now: ") + failure.what());
        break;  // another state would not fit into memory, either
      }
      cache_->drop(match.path, failure.what());
    }
  }
  const uint64_t border = slot.history.last_border(job.prompt.ids.size());
  if (reuse.messages)
    where += "; the rest is new";
  else if (border && most == border)
    where += "; the chunks after that depend on where the prompt ends";
  else if (found.evicted > most)
    where += "; states that share " + std::to_string(found.evicted) + " have evicted entries since";
  else
    where += "; no state that was saved shares more";
  return reuse;
}

// Where a prompt has to be cut so that states are saved which other prompts share: at the ends of its first
// message, and where the client marked it. The result counts ids that are left to read.
std::vector<uint64_t> Scheduler::shared_parts(const Slot& slot, const Job& job,
                                              const std::vector<int32_t>& ids) const {
  const Json& messages = job.prompt.messages;
  const std::vector<int32_t>& held = slot.history.ids();
  std::vector<uint64_t> parts;
  if (!cache_ || !moves_on_ || !slot.history.in_first_prompt() || !messages.is_array() ||
      !pays(slot, held.size() + ids.size()))
    return parts;
  std::vector<Mark> marks = job.task.marks;
  if (messages.size() > 1) marks.push_back({1, std::string::npos});
  Share texts(room_);  // tokenising takes four times the room of a job
  if (!texts.resize(4 * job.room.bytes())) return parts;
  for (const Mark& mark : marks) {
    if (mark.messages > messages.size()) continue;
    Prompt part;
    part.messages = Json(messages.begin(), messages.begin() + static_cast<std::ptrdiff_t>(mark.messages));
    Json& content = part.messages.back()["content"];
    if (!content.is_string()) continue;
    content = content.get_ref<const std::string&>().substr(0, mark.bytes);
    ChatStyle style = settings_.chat;
    style.variables = job.prompt.variables;
    try {
      const auto begun =
          token_ids(model_, chat_text(model_, style, written(part, job.task), 0), kPromptFlags);
      const auto apart = std::mismatch(held.begin(), held.end(), begun.begin(), begun.end()).second;
      if (apart != begun.begin() + static_cast<std::ptrdiff_t>(held.size())) continue;
      const auto shared = std::mismatch(ids.begin(), ids.end(), apart, begun.end()).first - ids.begin();
      const uint64_t enough = slot.history.enough_for(held.size() + static_cast<uint64_t>(shared));
      if (enough > held.size() && enough < held.size() + ids.size()) parts.push_back(enough - held.size());
    } catch (const Failure&) {  // a template that does not render a part of a conversation
    }
  }
  std::sort(parts.begin(), parts.end());
  return parts;
}

// Whether a state that reaches so far is worth a file: it saves reading two chunks, and a thirty-second of
// the text, that no file holds. Questions about a text, which end within a chunk or two after it, do not get
// files of their own.
bool Scheduler::pays(const Slot& slot, uint64_t reach) const {
  const uint64_t chunk = kinds_memory_[slot.kind].chunk;
  return cache_ && reach >= slot.saved + std::max(2 * chunk, reach / 32);
}

// Counts the tokens of the prompt that were read now and that files hold, or will after the answer. A disk
// that refused the last state is not expected to take the next one.
void Scheduler::count_saved(const Slot& slot, Usage& usage) const {
  if (cache_ && cache_->fails()) {
    usage.saved = 0;
    return;
  }
  const uint64_t reach = slot.history.reach(), held = pays(slot, reach) ? reach : slot.saved;
  usage.saved = std::max(std::min(held, usage.prompt), usage.cached) - usage.cached;
}

// Saves the session's state, with this history. `job` is the job that waits meanwhile, or null.
void Scheduler::save(Slot& slot, const History& history, Job* job) {
  const auto repeat = [&](const auto& try_once) {
    do {
      if (job ? job->cancelled.load() : hurries_.load()) throw Cancelled();
    } while (!try_once());
  };
  const uint64_t reach = history.reach();
  slot.saved = reach;
  try {
    StateNote note;
    note.settings = kinds_settings_[slot.kind];
    note.keys = history.keys(note.settings);
    // The states of recurrent layers return only to where they are now, without reading again.
    if (kinds_memory_[slot.kind].states)
      for (StateKey& key : note.keys) key.usable &= key.position == reach;
    Share notes(room_);  // for the note and its copy in the head of the file
    if (cache_->holds(note.keys) || !notes.resize(4 * history.bytes())) return;
    const auto start = std::chrono::steady_clock::now();
    note.rest = history.write();
    const std::string bytes = note.write();
    uint64_t size = 0;
    thimble_session* session = slot.session.get();
    repeat([&] { return call_unless_interrupted(thimble_session_file_bytes, session, bytes.size(), &size); });
    const bool saved = cache_->save(note, size, [&](int file) {
      repeat([&] {
        return ::lseek(file, 0, SEEK_SET) == 0 &&  // an interrupted call may have written a part
               call_unless_interrupted(thimble_session_save_fd, session, file, bytes.data(), bytes.size());
      });
    });
    if (!saved) return;
    log_cache("saved " + std::to_string(reach) + " tokens, " + format_size(size) + " in " +
              std::to_string(microseconds_since(start) / 1000) + " ms" + (job ? "" : ", after the answer"));
  } catch (const std::exception& error) {
    log_cache(std::string("a state is not saved: ") + error.what());
  }
}

// The end of a prompt is read in a way that depends on where it ends. If entries are evicted then, or states
// move on, the session cannot return to the last chunk before it, so the state there is saved now.
void Scheduler::save_before_eviction(Slot& slot, Job& job) {
  if (!cache_ || !moves_on_ || !slot.history.in_first_prompt()) return;
  History before = slot.history;
  before.stopped_reading();
  if (pays(slot, before.reach())) save(slot, before, &job);
}

// Sets how the i-th answer of a task is sampled.
void Scheduler::set_sampler(Slot& slot, const Task& task, uint32_t answer) const {
  thimble_sampler_options options = settings_.sampler;
  if (task.temperature) options.temperature = static_cast<float>(*task.temperature);
  if (task.top_p) options.top_p = static_cast<float>(*task.top_p);
  if (task.min_p) options.min_p = static_cast<float>(*task.min_p);
  if (task.repeat_penalty) options.repeat_penalty = static_cast<float>(*task.repeat_penalty);
  if (task.presence_penalty) options.presence_penalty = static_cast<float>(*task.presence_penalty);
  if (task.frequency_penalty) options.frequency_penalty = static_cast<float>(*task.frequency_penalty);
  if (task.repeat_last) options.repeat_last = *task.repeat_last;
  if (task.top_k) options.top_k = *task.top_k;
  options.seed = task.seed.value_or(options.seed) + answer;
  call(thimble_session_set_sampler, slot.session.get(), &options);
  call(thimble_session_set_grammar, slot.session.get(), nullptr);
  call(thimble_session_set_bias, slot.session.get(), task.biased.data(), task.biases.data(),
       task.biased.size());
}

// ---- looking ----

std::vector<Scheduler::SlotState> Scheduler::slots() const {
  const std::lock_guard lock(mutex_);
  std::vector<SlotState> states;
  for (const auto& slot : slots_)
    states.push_back({slot->job || slot->reserved, slot->position, kinds_memory_[slot->kind].pool});
  return states;
}

std::optional<size_t> Scheduler::last() const {
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].get() == last_) return i;
  }
  return std::nullopt;
}

void Scheduler::look(uint64_t index, const Look& look) {
  if (index >= slots_.size())
    throw Refusal(400, "there is no slot " + std::to_string(index) + "; the first is 0, the last " +
                           std::to_string(slots_.size() - 1));
  Slot& slot = *slots_[index];
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stopping_ || !slot.saving; });
    if (!slot.idle() || !slot.session)
      throw Refusal(409, "slot " + std::to_string(index) + " is busy; ask again when it is idle");
    slot.reserved = true;
  }
  const Lent lent{*this, {&slot}};
  for (;;) {
    try {
      return look({slot.session, slot.history, slot.attended, slot.question});
    } catch (const Failure& failure) {  // an interrupt that was meant for the previous job
      if (failure.status != THIMBLE_INTERRUPTED) throw;
    }
  }
}

size_t Scheduler::waiting() const {
  const std::lock_guard lock(mutex_);
  return queue_.size();
}

}  // namespace app::serve
