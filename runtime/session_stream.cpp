// The token stream of a session: feeding, generating and scoring.
#include <algorithm>
#include <cmath>

#include "base/fnv1a.h"
#include "base/system.h"
#include "runtime/session.h"

namespace thimble {

namespace {

// A hash by which begin() recognises a call that is repeated after an interrupt.
uint64_t hash_tokens(std::span<const int32_t> tokens) { return fnv1a(tokens.data(), tokens.size_bytes()); }

}  // namespace

// Begins a public call. If it repeats the interrupted call, that call continues. Otherwise the interrupted
// run is finished, and the rest of the interrupted call is dropped. Ids are checked in every call: the
// remaining tokens of a repeated call may differ from those that were checked. A call with an unknown id
// changes nothing.
Status Session::begin(Call call, std::span<const int32_t> tokens) {
  THIMBLE_TRY(engine_->check_files());
  THIMBLE_TRY(check_tokens(tokens));
  const Unfinished& u = unfinished_;
  const uint64_t hash = hash_tokens(tokens);
  const bool same = call != Call::kNone && u.call == call && u.count == tokens.size() && u.hash == hash;
  if (!same) {
    if (u.sampled && !u.started) state_.sampler.set_random(u.random);  // the sampled token is dropped
    unfinished_ = {};
  }
  call_start_ = steady_seconds();
  call_start_read_ = state_.read;
  THIMBLE_TRY(go_on());
  if (call != Call::kStep && call != Call::kAccept) THIMBLE_TRY(leave_draft(false));
  if (same) return {};
  THIMBLE_TRY(check_room(tokens.size()));
  unfinished_.call = call;
  unfinished_.count = tokens.size();
  unfinished_.hash = hash;
  return {};
}

// Gives a step its tokens, which are read for the first time.
Status Session::set_tokens(std::span<const int32_t> tokens) {
  engine_->set_tokens(tokens);
  return note_tokens(tokens);
}

// Notes the next tokens where tokens are kept.
Status Session::note_tokens(std::span<const int32_t> tokens) {
  if (drafter_) THIMBLE_TRY(drafter_->note(state_.read, tokens));
  if (engine_->dimensions().state_slots) {
    state_.recent.resize(state_.read - state_.last_eviction);  // without tokens of a step that failed
    state_.recent.insert(state_.recent.end(), tokens.begin(), tokens.end());
  }
  if (again_rows(options()))
    state_.unscored_tokens.insert(state_.unscored_tokens.end(), tokens.begin(), tokens.end());
  return engine_->note_tokens(tokens, state_);
}

// Reads the first `rows` of the waiting tokens. `evicts`: the pool is compacted to its size afterwards;
// otherwise all rows stay. `last`: the compaction protects no stabilizers.
Status Session::read_waiting(uint32_t rows, bool evicts, bool last) {
  THIMBLE_TRY(upkeep());
  if (evicts) THIMBLE_TRY(engine_->put_back(state_));
  THIMBLE_TRY(make_room(rows, evicts));
  THIMBLE_TRY(set_tokens(std::span(state_.waiting).first(rows)));
  const bool logits = rows == state_.waiting.size() && (!evicts || last);
  Step step = new_rows(engine_->chunk_program(rows), rows);
  step.last = engine_->tail() + logits;
  step.evicts = evicts;
  step.reads_store = options().recalls_all() && (!evicts || options().recall_prefill);
  step.ends_prompt = last;
  return start({.work = Work::kChunk,
                .step = step,
                .waiting = true,
                .logits = logits,
                .then_evicts = evicts && again_rows(options())});
}

Status Session::feed(std::span<const int32_t> tokens) {
  const SessionOptions& o = options();
  THIMBLE_TRY(begin(Call::kFeed, tokens));
  const uint64_t enough = uint64_t(o.chunk) + o.local + 1;
  for (;;) {
    while (state_.waiting.size() >= enough)
      THIMBLE_TRY(read_waiting(o.chunk, engine_->dimensions().evicts, false));
    const auto left = tokens.subspan(unfinished_.taken);
    if (left.empty()) break;
    const auto next = left.first(std::min<uint64_t>(left.size(), enough - state_.waiting.size()));
    state_.waiting.insert(state_.waiting.end(), next.begin(), next.end());
    unfinished_.taken += next.size();
    state_.ahead = 0;
    state_.forget_logits();
  }
  unfinished_ = {};
  return {};
}

Status Session::flush() {
  THIMBLE_TRY(begin(Call::kNone, {}));
  return flush_waiting();
}

Status Session::flush_waiting() {
  const SessionOptions& o = options();
  while (!state_.waiting.empty()) {
    const uint32_t waiting = static_cast<uint32_t>(state_.waiting.size());
    if (engine_->dimensions().evicts && waiting > o.local) {
      const uint32_t rows = std::min(o.chunk, waiting - o.local);
      THIMBLE_TRY(read_waiting(rows, true, rows == waiting - o.local));
    } else {
      THIMBLE_TRY(recall_ahead());
      THIMBLE_TRY(read_waiting(std::min(o.chunk, waiting), false, false));
    }
  }
  return {};
}

Result<int32_t> Session::step() {
  THIMBLE_TRY(begin(Call::kStep, {}));
  Unfinished& u = unfinished_;
  if (!u.sampled) {
    THIMBLE_TRY(flush_waiting());
    THIMBLE_TRY(check_logits());
    THIMBLE_TRY(check_room(1));
    u.random = state_.sampler.random();
    THIMBLE_SET(u.token, sample());
    u.sampled = true;
  }
  THIMBLE_TRY(append_token(u.token, true));
  const int32_t token = u.token;
  u = {};
  return token;
}

Result<int32_t> Session::sample() {
  Constraint& constraint = state_.constraint;
  if (state_.sampler.samples_best(state_.arg_max) && constraint.allows(state_.arg_max)) return state_.arg_max;
  THIMBLE_LET(logits, this->logits());
  if (!constraint.active()) return state_.sampler.sample(logits.data(), nullptr, state_.read);
  const grammar::TokenMask& allowed = constraint.allowed();
  if (allowed.none())
    return error(Code::kUnsupported,
                 "the grammar cannot go on: the vocabulary lacks a byte that must come next, or a token that "
                 "ends an answer");
  return state_.sampler.sample(logits.data(), &allowed, state_.read);
}

// A token that was sampled by an interrupted step, but not started, is sampled again with the new options.
Status Session::set_sampler(const SamplerOptions& options, const AnswerPenalties& penalties) {
  THIMBLE_TRY(Sampler::check(options));
  THIMBLE_TRY(state_.sampler.set_penalties(penalties));
  THIMBLE_TRY(state_.sampler.set(options));
  if (!unfinished_.started) unfinished_.sampled = false;
  return {};
}

Status Session::set_bias(std::span<const int32_t> tokens, std::span<const float> biases) {
  THIMBLE_TRY(state_.sampler.set_bias(tokens, biases));
  if (!unfinished_.started) unfinished_.sampled = false;
  return {};
}

void Session::set_grammar(Constraint::Grammar grammar) {
  state_.constraint.set(std::move(grammar));
  if (unfinished_.started || !unfinished_.sampled) return;
  state_.sampler.set_random(unfinished_.random);  // an interrupted step samples again
  unfinished_.sampled = false;
}

Status Session::accept(int32_t token) {
  const std::span<const int32_t> tokens(&token, 1);
  THIMBLE_TRY(begin(Call::kAccept, tokens));
  if (!unfinished_.started && !state_.constraint.allows(token))
    return error(Code::kInvalidArgument, "token %d does not continue a text of the grammar", token);
  THIMBLE_TRY(flush_waiting());
  THIMBLE_TRY(append_token(token, true));
  unfinished_ = {};
  return {};
}

// Runs one token through the model. `generated`: the sampler adds it to its history. If the call is repeated
// after an interrupt, the token still runs only once.
Status Session::append_token(int32_t token, bool generated) {
  if (unfinished_.started) return {};  // begin() finished it
  if (ahead_.leads_on(token)) {
    if (generated) note_generated(token);
    THIMBLE_TRY(note_tokens({&token, 1}));
    commit_row();
    return {};
  }
  THIMBLE_TRY(leave_draft(true));
  if (state_.unscored && state_.unscored == unscored_rows(options())) THIMBLE_TRY(upkeep());
  THIMBLE_TRY(make_room(1, false));
  THIMBLE_TRY(recall_in_time());
  THIMBLE_TRY(set_tokens({&token, 1}));
  std::array<int32_t, kLogitRowsAtOnce> tokens{token};
  THIMBLE_LET(drafted, generated ? guess(std::span(tokens).subspan(1)) : 0u);
  const bool upkeeps = drafted && state_.unscored && !engine_->programs().draft && !again_rows(options());
  if (upkeeps) THIMBLE_TRY(upkeep());  // a chunk is scored at once
  unfinished_.started = true;
  if (generated) note_generated(token);
  if (drafted) return append_draft(std::span(tokens).first(1 + drafted));
  return start(alone_run());
}

void Session::note_generated(int32_t token) {
  state_.sampler.accept(token, state_.read);
  state_.constraint.accept(token, state_.read);
}

// A run of the one token that the step has.
Session::Run Session::alone_run() const {
  Step step = new_rows(*engine_->programs().decode, 1);
  step.evicts = traits(options().retention).eviction == Eviction::kAfterEachToken;
  step.reads_store = options().recalls_all();
  return {.work = Work::kDecode, .step = step};
}

Status Session::score(std::span<const int32_t> tokens, std::span<float> log_probs) {
  THIMBLE_TRY(begin(Call::kScore, tokens));
  Unfinished& u = unfinished_;
  if (u.taken == 0 && !tokens.empty()) {
    THIMBLE_TRY(flush_waiting());
    THIMBLE_TRY(check_logits());
  }
  // If a policy selects for generated tokens, or compacts after each one, the text is scored token by token
  // as if it were generated.
  const bool evicts = traits(options().retention).eviction == Eviction::kAfterEachToken;
  return selects() || evicts ? score_by_steps(tokens, log_probs) : score_by_slices(tokens, log_probs);
}

Status Session::score_by_slices(std::span<const int32_t> tokens, std::span<float> log_probs) {
  Unfinished& u = unfinished_;
  if (u.taken == 0 && !tokens.empty()) THIMBLE_TRY(target_log_probs(tokens.first(1), log_probs.data()));
  while (u.taken < tokens.size() || u.row < u.slice) {
    if (u.row == u.slice) THIMBLE_TRY(append_slice(tokens.subspan(u.taken)));
    // Row i of the slice gives the probability of the token after token i.
    const uint32_t rows = std::min(u.slice - u.row, kLogitRowsAtOnce);
    const uint64_t next = u.taken - u.slice + u.row + 1;
    const auto targets = tokens.subspan(next, std::min<uint64_t>(rows, tokens.size() - next));
    THIMBLE_TRY(slice_logits(u.row, rows));
    const std::span<const int32_t> best = engine_->arg_max(rows);
    THIMBLE_TRY(check_finite(std::all_of(best.begin(), best.end(), [](int32_t id) { return id >= 0; })));
    THIMBLE_TRY(target_log_probs(targets, log_probs.data() + next));
    u.row += rows;
    u.has_logits = u.has_log_probs = false;
  }
  if (u.slice) {  // the first row of logits must be the next token's
    THIMBLE_TRY(slice_logits(u.slice - 1, 1));
    note_logits();
  }
  u = {};
  return {};
}

Status Session::score_by_steps(std::span<const int32_t> tokens, std::span<float> log_probs) {
  Unfinished& u = unfinished_;
  while (u.stepping || u.taken < tokens.size()) {
    if (!u.stepping) {
      THIMBLE_TRY(check_logits());
      THIMBLE_TRY(target_log_probs(tokens.subspan(u.taken, 1), &log_probs[u.taken]));
      ++u.taken;
      u.has_log_probs = false;
      u.stepping = true;
    }
    THIMBLE_TRY(append_token(tokens[u.taken - 1], false));
    u.started = u.stepping = false;
  }
  u = {};
  return {};
}

// Appends as many of these tokens as fit into one chunk and into the pool. They stay in the pool. For a
// policy that reads again, the batches are those of generated tokens, however calls divide the text. An
// entry's score is its weight relative to its batch, so it depends on the batch.
Status Session::append_slice(std::span<const int32_t> tokens) {
  const bool again = again_rows(options());
  const uint32_t batch = options().chunk;
  if (!again || state_.unscored == batch) THIMBLE_TRY(upkeep());
  THIMBLE_TRY(make_room(1, false));
  THIMBLE_TRY(recall_in_time());
  const uint32_t every = options().recall_every;
  const uint64_t before_recall = every ? every - state_.read % every : UINT64_MAX;
  const uint32_t rows = static_cast<uint32_t>(
      std::min<uint64_t>({tokens.size(), batch - state_.unscored, room(), before_recall}));
  THIMBLE_TRY(set_tokens(tokens.first(rows)));
  unfinished_.taken += rows;
  unfinished_.slice = rows;
  unfinished_.row = 0;
  unfinished_.has_log_probs = false;  // those of the first token are already read
  Step step = new_rows(engine_->chunk_program(rows), rows);
  step.last = engine_->tail();
  step.reads_store = options().recalls_all();
  return start({.work = Work::kChunk, .step = step});
}

// Computes the logits of these rows of the previous step.
Status Session::slice_logits(uint32_t first, uint32_t rows) {
  if (unfinished_.has_logits) return {};  // begin() finished it
  unfinished_.has_logits = true;
  Step step = new_rows(engine_->chunk_program(unfinished_.slice), unfinished_.slice);
  step.first = engine_->tail();
  step.rows = Step::Rows::kDone;
  step.first_logit_row = first;
  step.n_logit_rows = rows;
  return start({.work = Work::kLogits, .step = step});
}

// Computes the log-probabilities of these tokens, one for each row of logits.
Status Session::target_log_probs(std::span<const int32_t> targets, float* log_probs) {
  if (targets.empty()) return {};
  if (!unfinished_.has_log_probs) {
    unfinished_.has_log_probs = true;
    std::transform(targets.begin(), targets.end(), on_host<int32_t>(engine_->layout().targets),
                   [&](int32_t target) { return may_follow(target) ? target : 0; });
    Step step = new_rows(*engine_->programs().log_prob, 0);
    step.n_logit_rows = static_cast<uint32_t>(targets.size());
    THIMBLE_TRY(start({.work = Work::kLogProb, .step = step}));
  }
  const float* read = on_host<float>(engine_->layout().log_prob);
  for (size_t i = 0; i < targets.size(); ++i) log_probs[i] = may_follow(targets[i]) ? read[i] : -INFINITY;
  return {};
}

Result<std::span<const float>> Session::logits() const {
  THIMBLE_TRY(check_logits());
  return engine_->logits(ahead_.counted ? ahead_.counted - 1 : 0);
}

Status Session::check_logits() const {
  if (!state_.has_logits)
    return error(Code::kInvalidArgument,
                 "there are no logits to continue from: feed at least one token and flush first");
  return check_finite(state_.arg_max >= 0);
}

Status Session::check_finite(bool finite) const {
  if (finite) return {};
  return error(Code::kNotFinite,
               "the model gave logits that are NaN or infinite before position %llu: its file is damaged, or "
               "its numbers overflow on this device; rewind to an earlier position, or try another file",
               static_cast<unsigned long long>(state_.read));
}

Status Session::check_tokens(std::span<const int32_t> tokens) const {
  for (const int32_t token : tokens)
    if (token < 0 || static_cast<uint32_t>(token) >= model().shape.vocab)
      return error(Code::kInvalidArgument, "token id %d is not in the vocabulary; ids go from 0 to %u", token,
                   model().shape.vocab - 1);
  return {};
}

}  // namespace thimble
