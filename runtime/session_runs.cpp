// The runs of a session, the changes that they make to its state, and room in the pool for their rows.
#include <algorithm>
#include <utility>

#include "base/system.h"
#include "runtime/session.h"

namespace thimble {

// ---- runs ----

Status Session::set_run(const Run& run) {
  THIMBLE_TRY(engine_->start(run.step, state_));
  if (run.work != Work::kDraft) ahead_ = {};
  run_ = run;
  return {};
}

Status Session::start(const Run& run) {
  THIMBLE_TRY(set_run(run));
  return go_on();
}

// Finishes the current run, whether it was just started or interrupted, and the runs that must follow it.
Status Session::go_on() {
  while (run_.work != Work::kNone) {
    THIMBLE_TRY(finish_run());
    const Run done = std::exchange(run_, {});
    // The rows are counted when they are read again.
    if (done.work == Work::kAhead) THIMBLE_TRY(engine_->set_saturated(done.saturated_before));
    if (done.work == Work::kDraft) {
      THIMBLE_LET(alone, must_run_alone(done));
      if (alone) {
        engine_->set_tokens(std::span(ahead_.tokens).first(1));
        THIMBLE_TRY(set_run(alone_run()));
        continue;
      }
    }
    commit(done);
    if (done.waiting) report_progress();
    THIMBLE_TRY(follow(done));
  }
  return {};
}

Status Session::finish_run() {
  const bool generates =
      run_.work == Work::kDecode || run_.work == Work::kDraft || run_.work == Work::kCatchUp;
  const double start = steady_seconds();
  const Status status = engine_->run([this] {
    // The tokens that may follow the one that runs.
    if (state_.constraint.active() && state_.sampler.options().temperature > 0) state_.constraint.allowed();
  });
  const double seconds = steady_seconds() - start;
  run_.seconds += seconds;
  (generates ? state_.decode_seconds : state_.prefill_seconds) += seconds;
  return status;
}

// If another run must directly follow this one, makes it the current run.
Status Session::follow(const Run& done) {
  if (done.then_evicts) {
    const bool ends_prompt = done.step.ends_prompt;
    return set_run(state_.unscored ? upkeep_run(true, ends_prompt) : eviction_run(ends_prompt));
  }
  if (done.work != Work::kEvict) return {};
  THIMBLE_LET(moved, engine_->move_runs(state_));
  // The selection recomputes its data of the entries at their new places.
  return moved && selects() ? set_run(eviction_run(false)) : Status();
}

// Applies the changes of a finished run to the state.
void Session::commit(const Run& run) {
  switch (run.work) {
    case Work::kChunk:
      commit_chunk(run);
      break;
    case Work::kAhead:
      state_.prefill += cost_.run(run.step.n_rows, mean_entries(), true, false);
      state_.asking = 0;
      state_.ahead = run.step.n_rows;
      break;
    case Work::kDecode:
      commit_token();
      pace_.stepped(run.seconds);
      break;
    case Work::kDraft:
      state_.decode += cost_.run(run.step.n_rows, mean_entries(), false, true);
      ahead_.seconds += run.seconds;
      commit_row();
      break;
    case Work::kCatchUp:
      state_.state_slot = engine_->written_slot();
      pace_.caught_up(run.seconds);
      break;
    case Work::kEvict:
      engine_->count_entries(state_);
      ++state_.generation;
      break;
    case Work::kUpkeep:
      if (again_rows(options())) state_.prefill += cost_.run(run.step.n_rows, mean_entries(), true, false);
      state_.unscored = 0;
      state_.unscored_tokens.clear();
      break;
    case Work::kNone:
    case Work::kLogits:
    case Work::kLogProb:
      break;
  }
}

void Session::commit_chunk(const Run& run) {
  const uint32_t rows = run.step.n_rows;
  const double entries = mean_entries();
  const bool listed = selection().selects_chunks(options());
  state_.read += rows;
  state_.prefill_tokens += rows;
  state_.prefill += cost_.run(rows, entries, true, run.logits);
  if (listed) state_.prefill += selection().cost(model(), options(), entries + rows);
  if (run.waiting) state_.waiting.erase(state_.waiting.begin(), state_.waiting.begin() + rows);
  if (again_rows(options())) state_.unscored += rows;
  state_.attended = listed ? Attended::kList : Attended::kEverything;
  if (run.step.reads_store) state_.prefill += cost_of_store(rows);
  state_.forget_logits();
  show_rows(0, rows, state_.prefill_seconds);
  if (run.logits) note_logits();
  const bool finite = !run.logits || state_.arg_max >= 0;
  if (!finite) keep_states_before(rows);
  if (options().most_recalled()) state_.asking = std::min(kAskingTokens, state_.asking + rows);
  state_.ahead = 0;
  engine_->count_entries(state_);
  keep_states(run.logits && finite);
  ++state_.generation;
}

void Session::commit_token() {
  const double entries = mean_entries();
  const bool was_finite = state_.arg_max >= 0;
  ++state_.read;
  ++state_.generated;
  show_rows(0, 1, state_.decode_seconds);
  state_.decode += cost_.run(engine_->step().n_rows, entries, false, true);
  state_.selecting += selection().cost(model(), options(), entries + 1);
  if (unscored_rows(options())) ++state_.unscored;
  if (options().most_recalled()) state_.asking = std::min(kAskingTokens, state_.asking + 1);
  state_.attended = selects() ? Attended::kList : Attended::kEverything;
  if (engine_->step().reads_store) state_.decode += cost_of_store(1);
  note_logits();
  if (was_finite && state_.arg_max < 0) keep_states_before(1);
  engine_->count_entries(state_);
  keep_states(false);
}

// Shows the drafter rows of the latest step, whose tokens are the last that were counted.
void Session::show_rows(uint32_t first, uint32_t rows, double& seconds) {
  if (options().draft != Draft::kMtp) return;
  const double start = steady_seconds();
  const uint64_t row_bytes = model().shape.d_model * sizeof(float);
  drafter_->follow(state_.read - rows, engine_->layout().x.slice(first * row_bytes, rows * row_bytes));
  seconds += steady_seconds() - start;
}

// The cost of rows that attended to the store. How much attention they paid to each entry is not known then.
Cost Session::cost_of_store(uint32_t rows) {
  if (!engine_->holds_stored()) return {};
  state_.attended = Attended::kUnknown;
  return cost_.stored(rows, static_cast<double>(engine_->store()->entries()) / full_heads(model()));
}

// Keeps the states of recurrent layers for a rewind, if this is a place to return to.
void Session::keep_states(bool ends_prompt) {
  if (const uint32_t slots = engine_->dimensions().state_slots) state_.keep_states(ends_prompt, slots - 2);
}

// Keeps the states before a run whose logits are not finite.
void Session::keep_states_before(uint32_t rows) {
  if (const uint32_t slots = engine_->dimensions().state_slots) state_.keep_states_before(rows, slots - 2);
}

// Notes that this row of logits belongs to the next token.
void Session::note_logits(uint32_t row) {
  state_.has_logits = 1;
  state_.arg_max = engine_->arg_max(row + 1)[row];
}

// ---- steps ----

// A step whose rows come after all tokens that were read.
Step Session::new_rows(Program& program, uint32_t rows) const {
  return {.program = &program,
          .first = 0,
          .last = program.segments,
          .n_rows = rows,
          .position = state_.read,
          .first_logit_row = rows ? rows - 1 : 0};
}

// A run that scores the waiting tokens, whose entries are the last of the pool. If the tokens are read again,
// the rows of the second reading come after all tokens that were read.
Session::Run Session::upkeep_run(bool then_evicts, bool ends_prompt) {
  const uint32_t rows = state_.unscored;
  Step step = new_rows(*engine_->programs().upkeep, rows);
  step.ends_prompt = ends_prompt;
  if (again_rows(options())) {
    engine_->set_tokens(state_.unscored_tokens);
  } else {
    step.rows = Step::Rows::kStored;
    step.position -= rows;
  }
  return {.work = Work::kUpkeep, .step = step, .then_evicts = then_evicts};
}

Session::Run Session::eviction_run(bool ends_prompt) const {
  Step step = new_rows(*engine_->programs().evict, 0);
  step.evicts = true;
  step.ends_prompt = ends_prompt;
  return {.work = Work::kEvict, .step = step};
}

Status Session::upkeep() { return state_.unscored ? start(upkeep_run(false, false)) : Status(); }

// Entries that came from the store leave first, so that retentions see none of them.
Status Session::evict() {
  THIMBLE_TRY(engine_->put_back(state_));
  return start(state_.unscored ? upkeep_run(true, false) : eviction_run(false));
}

// The first waiting tokens call back evicted entries. They are read once to get their queries, and then again
// by read_waiting(), which overwrites their entries, so that all of them attend to what they called back.
Status Session::recall_ahead() {
  if (!options().most_recalled()) return {};
  if (!state_.ahead) {
    const auto rows = static_cast<uint32_t>(std::min<size_t>(options().chunk, state_.waiting.size()));
    THIMBLE_TRY(upkeep());
    THIMBLE_TRY(make_room(rows, false));
    if (!engine_->holds_stored()) return {};  // asked now, so that an interrupted eviction changes nothing
    engine_->set_tokens(std::span(state_.waiting).first(rows));
    Step step = new_rows(engine_->chunk_program(rows), rows);
    step.last = engine_->tail();
    THIMBLE_LET(saturated, engine_->saturated());
    THIMBLE_TRY(start({.work = Work::kAhead, .step = step, .saturated_before = saturated}));
  }
  return engine_->recall(state_);
}

// Whether the latest tokens call back evicted entries before the next one is read.
Status Session::recall_in_time() {
  const uint32_t every = options().recall_every;
  const bool due = every && (state_.read % every == 0 || state_.last_eviction == state_.read);
  return due ? engine_->recall(state_) : Status();
}

// ---- room ----

// Whether every head has room for `rows` more rows. `evicts`: the rows are a chunk that is compacted. A head
// with no more entries than an eviction leaves can take a chunk of any size, because the rows go through the
// chunk buffer. Any other head needs room for the chunk, or positions would exceed plan().largest_position.
bool Session::fits(uint32_t rows, bool evicts) const {
  for (size_t i = 0; i < state_.entries.size(); ++i) {
    const HeadRun& run = runs()[i];
    if (evicts && run.evicts && state_.own(i) <= run.keep) continue;
    if (state_.own(i) + rows > run.capacity - run.recall) return false;
  }
  return true;
}

// Evicts if `rows` more rows do not fit, or if the text becomes too long for the current division of the
// pool. In that case heads keep as many entries as in the next division, and the runs move to that division
// afterwards.
Status Session::make_room(uint32_t rows, bool evicts) {
  const bool fit = fits(rows, evicts);
  if (fit && !evicts) return {};
  const Dimensions& d = engine_->dimensions();
  const uint32_t division = d.division_for(state_.read + rows, state_.division);
  if (division == state_.division && fit) return {};
  state_.division = division;
  return d.evicts ? evict() : check_room(rows);
}

// The number of rows for which every head has room.
uint32_t Session::room() const {
  uint32_t room = UINT32_MAX;
  for (size_t i = 0; i < state_.entries.size(); ++i)
    room = std::min(room, runs()[i].capacity - runs()[i].recall - state_.own(i));
  return room;
}

// Checks that `tokens` more tokens fit, if heads may not evict or positions are bounded.
Status Session::check_room(uint64_t tokens) const {
  for (size_t i = 0; i < state_.entries.size(); ++i) {
    const HeadRun& run = runs()[i];
    const uint64_t entries = state_.entries[i] + state_.waiting.size();
    if (!run.evicts && entries + tokens > run.capacity)
      return error(Code::kContextFull,
                   "context_length_exceeded: %llu tokens are held and %llu more do not fit in a pool of %u, "
                   "which has room for %u with an answer; make the pool larger, or choose a retention policy "
                   "that evicts",
                   static_cast<unsigned long long>(entries), static_cast<unsigned long long>(tokens),
                   options().pool, run.capacity);
  }
  const uint64_t position = state_.position();
  const uint64_t bound = options().context ? options().context : INT32_MAX;
  if (position + tokens > bound)
    return error(
        Code::kContextFull,
        "context_length_exceeded: %llu tokens after position %llu exceed the limit of %llu positions; "
        "raise the "
        "context",
        static_cast<unsigned long long>(tokens), static_cast<unsigned long long>(position),
        static_cast<unsigned long long>(bound));
  return {};
}

// Evicts entries until heads hold what they keep in a smaller pool. If it fails or is interrupted, the size
// of the pool does not change.
Status Session::evict_to(const MemoryPlan& smaller) {
  std::vector<HeadRun> before = runs();
  if (!engine_->keep_less(smaller, state_)) return {};
  const Status evicted = evict();
  if (!evicted.ok()) engine_->keep_as_before(std::move(before), state_);
  return evicted;
}

Result<uint64_t> Session::shrink(uint32_t pool) {
  THIMBLE_TRY(begin(Call::kNone, {}));
  THIMBLE_LET(smaller, engine_->smaller_plan(pool, state_));
  THIMBLE_TRY(engine_->put_back(state_));
  THIMBLE_TRY(evict_to(smaller));
  return engine_->release(smaller, state_);
}

void Session::report_progress() {
  if (!progress_) return;
  const double seconds = steady_seconds() - call_start_;
  const uint64_t read = state_.read - call_start_read_;
  progress_({.done = state_.read,
             .total = state_.position() +
                      (unfinished_.call == Call::kFeed ? unfinished_.count - unfinished_.taken : 0),
             .entries = state_.most_entries(),
             .capacity = plan().capacity,
             .tokens_per_second = seconds > 0 ? static_cast<double>(read) / seconds : 0});
}

}  // namespace thimble
