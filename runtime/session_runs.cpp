// A session: runs of programs, what they change, and room for what they append.
#include <algorithm>

#include "base/system.h"
#include "runtime/plan/lay_out.h"
#include "runtime/session.h"

namespace thimble {

// Runs what is left of the current run, the one just started or one that an interrupt left, and those that
// must follow it.
Status Session::go_on() {
  while (run_.work != Work::kNone) {
    THIMBLE_TRY(finish_run());
    const Run done = run_;
    commit(done);
    run_ = run_after(done);
    if (done.waiting) report_progress();
    if (done.work != Work::kEvict) continue;
    THIMBLE_LET(moved, move_runs());
    // What a selection makes of entries is made anew where they are now.
    if (moved && policies_.selection->selects(plan_.options)) run_ = eviction_run(false);
  }
  return {};
}

Status Session::finish_run() {
  const double start = steady_seconds();
  double& seconds = run_.work == Work::kDecode ? stats_.decode_seconds : stats_.prefill_seconds;
  while (run_.next < run_.last) {
    if (interrupted_.exchange(false, std::memory_order_relaxed)) {
      seconds += steady_seconds() - start;
      return error(Code::kInterrupted, "interrupted; repeat the call to go on");
    }
    THIMBLE_TRY(check_files());
    THIMBLE_TRY(stream_->submit_part(*run_.program, run_.next, run_.part, run_.step, heads_));
    THIMBLE_TRY(stream_->wait());
    if (++run_.part < run_.program->parts(run_.next)) continue;
    run_.part = 0;
    ++run_.next;
  }
  seconds += steady_seconds() - start;
  return {};
}

Status Session::start(Run run) {
  if (policies_.retention->scores_on_host()) THIMBLE_TRY(score_on_host(run));
  run_ = run;
  return go_on();
}

// Where scores are made on the host, those that this run compacts by; and the rows that it reads again.
Status Session::score_on_host(Run& run) {
  if (run.work != Work::kChunk && run.work != Work::kDecode && run.work != Work::kEvict) return {};
  held_.resize(entries_[0]);
  THIMBLE_TRY(kept(0, 0, held_));
  const bool generates = run.work == Work::kDecode;
  const std::span<const int32_t> again =
      policies_.retention->prepare({held_, read_, run.step.n_rows, generates});
  if (again.empty()) return {};
  const auto rows = static_cast<uint32_t>(again.size());
  thimble::set_tokens(*model_, layout_, again);
  fill_heads(rows, true, true);  // the last entries are not the latest tokens: their scores protect those
  run.program = programs_.rebuild.get();
  run.step.n_rows = rows;
  run.step.first_logit_row = rows - 1;
  return {};
}

// What a finished run changed.
void Session::commit(const Run& run) {
  const StepParams& step = run.step;
  const auto logits_are_finite = [&](uint32_t rows) {  // arg_max says so
    const int32_t* best = on_host<int32_t>(layout_.arg_max);
    return std::all_of(best, best + rows, [](int32_t index) { return index >= 0; });
  };
  const auto attended = [&](bool listed) { return listed ? Attended::kList : Attended::kEverything; };
  const double behind = mean_entries();
  switch (run.work) {
    case Work::kChunk:
      read_ += step.n_rows;
      stats_.prefill_tokens += step.n_rows;
      stats_.prefill += cost_.run(step.n_rows, behind, true, run.last > tail_);
      if (policies_.selection->selects_chunks(plan_.options))
        stats_.prefill += policies_.selection->cost(*model_, plan_.options, behind + step.n_rows);
      if (run.waiting) waiting_.erase(waiting_.begin(), waiting_.begin() + step.n_rows);
      if (policies_.retention->reads_again()) unscored_ += step.n_rows;
      attended_ = attended(policies_.selection->selects_chunks(plan_.options));
      has_logits_ = run.logits;
      if (run.logits) finite_logits_ = logits_are_finite(1);
      [[fallthrough]];
    case Work::kEvict:
      compacted(step.n_rows);
      ++generation_;
      break;
    case Work::kDecode:
      ++read_;
      ++stats_.generated;
      stats_.decode += cost_.run(step.n_rows, behind, false, true);
      selecting_ += policies_.selection->cost(*model_, plan_.options, behind + 1);
      if (policies_.retention->upkeep_rows(plan_.options)) ++unscored_;
      attended_ = attended(policies_.selection->selects(plan_.options));
      has_logits_ = true;
      finite_logits_ = logits_are_finite(1);
      compacted(step.n_rows);
      break;
    case Work::kUpkeep:
      if (policies_.retention->reads_again()) stats_.prefill += cost_.run(step.n_rows, behind, true, false);
      unscored_ = 0;
      unscored_tokens_.clear();
      break;
    case Work::kLogits:
      finite_logits_ = logits_are_finite(step.n_logit_rows);
      break;
    case Work::kNone:
    case Work::kLogProb:
      break;
  }
}

// What heads hold behind a step of so many rows, and what they dropped.
void Session::compacted(uint32_t rows) {
  uint64_t dropped = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const uint32_t entries = heads_[i].n_entries + rows;
    entries_[i] = std::min(heads_[i].keep, entries);
    dropped += entries - entries_[i];
    // A head with a window keeps what that shows.
    if (entries_[i] < entries && !model_->layers[i / model_->shape.kv_heads].window)
      attended_ = Attended::kUnknown;
  }
  if (!dropped) return;
  evicted_ += dropped;
  ++stats_.evictions;
  last_eviction_ = read_;
}

// Entries that a head holds which attends to everything, on average.
double Session::mean_entries() const {
  uint64_t sum = 0, heads = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (model_->layers[i / model_->shape.kv_heads].window) continue;
    sum += entries_[i];
    ++heads;
  }
  return heads ? static_cast<double>(sum) / static_cast<double>(heads) : 0;
}

StepParams Session::step_params(uint32_t rows) const {
  StepParams step{};
  step.n_rows = rows;
  step.position = static_cast<int>(read_);
  step.ring_row = unscored_;
  step.n_logit_rows = 1;
  step.first_logit_row = rows ? rows - 1 : 0;
  policies_.retention->fill(plan_.options, step);
  policies_.selection->fill(plan_.options, generation_, step);
  return step;
}

// What a step of so many rows is told of the heads. `evicts`: the pool is compacted afterwards; only where
// rows are read again do they stay until then, in layers that attend to everything. `last`: the chunk ends
// the prompt, so nothing stands in for the tokens to come and the stabilizers are scored like the others
// (methods 2.5).
void Session::fill_heads(uint32_t rows, bool evicts, bool last) {
  const bool rows_stay = rows && policies_.retention->reads_again();
  for (size_t i = 0; i < heads_.size(); ++i) {
    const HeadRun& run = plan_.dimensions.runs[i];
    const bool windowed = model_->layers[i / model_->shape.kv_heads].window;
    const bool drops = evicts && run.evicts && (windowed || !rows_stay);
    HeadState& head = heads_[i];
    head.n_entries = entries_[i];
    head.keep = entries_[i] + rows;
    if (drops) head.keep = std::min(run.keep, head.keep);
    head.protect_first = drops ? run.protect_first : 0;
    head.protect_last = drops && !last ? run.protect_last : 0;
  }
}

Program& Session::chunk_program(uint32_t rows) const {
  for (const ChunkProgram& chunk : programs_.chunks)
    if (rows <= chunk.max_rows) return *chunk.program;
  return *programs_.chunks.back().program;
}

// Scores the tokens that wait for it; their entries are the pool's last. What is read again stands behind all
// that was read.
Session::Run Session::upkeep_run(bool evicts, bool ends_prompt) {
  const bool again = policies_.retention->reads_again();
  StepParams step = step_params(unscored_);
  if (again)
    thimble::set_tokens(*model_, layout_, unscored_tokens_);
  else
    step.position = static_cast<int>(read_ - unscored_);
  fill_heads(again ? unscored_ : 0, false, false);
  return {.work = Work::kUpkeep,
          .program = programs_.upkeep.get(),
          .next = 0,
          .last = programs_.upkeep->segments,
          .step = step,
          .evicts = evicts,
          .ends_prompt = ends_prompt};
}

Session::Run Session::eviction_run(bool ends_prompt) {
  fill_heads(0, true, ends_prompt);
  return {.work = Work::kEvict,
          .program = programs_.evict.get(),
          .next = 0,
          .last = programs_.evict->segments,
          .step = step_params(0)};
}

// What must follow a run before anything else.
Session::Run Session::run_after(const Run& done) {
  if (!done.evicts) return {};
  return unscored_ ? upkeep_run(true, done.ends_prompt) : eviction_run(done.ends_prompt);
}

Status Session::upkeep() { return unscored_ ? start(upkeep_run(false, false)) : Status(); }

// Whether every head has room for that many more rows. `evicts`: behind as many entries as an eviction
// leaves, a chunk has the chunk buffer; behind more of them it must fit, or positions would pass
// plan().largest_position.
bool Session::fits(uint32_t rows, bool evicts) const {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const HeadRun& run = plan_.dimensions.runs[i];
    if (evicts && run.evicts && entries_[i] <= run.keep) continue;
    if (entries_[i] + rows > run.capacity) return false;
  }
  return true;
}

// Evicts where that many more rows would not fit, or where they outgrow how the pool is divided: then down to
// what the heads keep in the next division, which their runs move to afterwards.
Status Session::make_room(uint32_t rows, bool evicts) {
  const bool fit = fits(rows, evicts);
  if (fit && !evicts) return {};
  if (!plan_.dimensions.outgrown(read_ + rows) && fit) return {};
  if (!plan_.dimensions.evicts) return check_room(rows);
  return start(unscored_ ? upkeep_run(true, false) : eviction_run(false));
}

void Session::place_heads() {
  for (size_t i = 0; i < heads_.size(); ++i) {
    heads_[i].first = plan_.dimensions.runs[i].first;
    heads_[i].capacity = plan_.dimensions.runs[i].capacity;
  }
}

// Moves what heads hold to where their runs are in the division that is in use; whether any moved. Runs are
// in the same order in every division, so none is written over before it has moved: those that move down go
// first, from the first one on, then those that move up, from the last one on.
Result<bool> Session::move_runs() {
  const uint32_t kv_heads = model_->shape.kv_heads, count = static_cast<uint32_t>(heads_.size());
  const auto move_head = [&](uint32_t i) -> Status {
    const LayerPool& pool = layout_.layers[i / kv_heads];
    const uint32_t layer_entries = plan_.dimensions.layer_entries[i / kv_heads];
    for (const View& array : {pool.k.values, pool.v.values, pool.pos, pool.cis})
      THIMBLE_TRY(move_entries(array, array.bytes / layer_entries, heads_[i].first,
                               plan_.dimensions.runs[i].first, entries_[i]));
    return {};
  };
  bool moved = false;
  for (uint32_t i = 0; i < count; ++i)
    if (plan_.dimensions.runs[i].first < heads_[i].first) {
      THIMBLE_TRY(move_head(i));
      moved = true;
    }
  for (uint32_t i = count; i-- > 0;)
    if (plan_.dimensions.runs[i].first > heads_[i].first) {
      THIMBLE_TRY(move_head(i));
      moved = true;
    }
  place_heads();
  return moved;
}

// Moves entries of one array of a layer, by the view that chunks attend to, which is free between two steps.
Status Session::move_entries(const View& array, uint64_t entry_bytes, uint64_t from, uint64_t to,
                             uint64_t entries) const {
  const View& scratch = layout_.view_k.values;
  const uint64_t at_once = std::max<uint64_t>(scratch.bytes / entry_bytes, 1);
  for (uint64_t done = 0; done < entries;) {
    const uint64_t now = std::min(at_once, entries - done),
                   at = to < from ? done : entries - done - now;  // the end that is not written over first
    const View piece = scratch.slice(0, now * entry_bytes);
    THIMBLE_TRY(device_->copy(piece, array.slice((from + at) * entry_bytes, piece.bytes)));
    THIMBLE_TRY(device_->copy(array.slice((to + at) * entry_bytes, piece.bytes), piece));
    done += now;
  }
  return {};
}

// Reads the first rows of the waiting tokens. `evicts`: the pool is compacted to its size afterwards, `last`
// without stabilizers; else the rows stay, whatever they are worth.
Status Session::read_waiting(uint32_t rows, bool evicts, bool last) {
  THIMBLE_TRY(upkeep());
  THIMBLE_TRY(make_room(rows, evicts));
  THIMBLE_TRY(set_tokens(std::span(waiting_).first(rows)));
  const bool logits = rows == waiting_.size() && (!evicts || last);
  fill_heads(rows, evicts, last);
  return start({.work = Work::kChunk,
                .program = &chunk_program(rows),
                .next = Decoder::kHead,
                .last = tail_ + logits,
                .step = step_params(rows),
                .waiting = true,
                .logits = logits,
                .evicts = evicts && policies_.retention->reads_again(),
                .ends_prompt = last});
}

void Session::report_progress() {
  if (!progress_) return;
  const double seconds = steady_seconds() - call_start_;
  progress_({.done = read_,
             .total = read_ + waiting_.size() +
                      (unfinished_.call == Call::kFeed ? unfinished_.count - unfinished_.taken : 0),
             .entries = most_entries(),
             .capacity = plan_.capacity,
             .tokens_per_second = seconds > 0 ? static_cast<double>(read_ - call_start_read_) / seconds : 0});
}

}  // namespace thimble
