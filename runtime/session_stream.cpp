// A session: the stream of tokens that is fed, generated and scored.
#include <algorithm>
#include <cmath>

#include "base/system.h"
#include "runtime/plan/lay_out.h"
#include "runtime/session.h"

namespace thimble {

namespace {

// FNV-1a over token ids: recognises a call that is repeated after an interrupt.
uint64_t hash_tokens(std::span<const int32_t> tokens) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const int32_t token : tokens) hash = (hash ^ static_cast<uint32_t>(token)) * 0x100000001b3u;
  return hash;
}

}  // namespace

// Begins a public call: goes on with the interrupted one if it is the same again, else finishes the run that
// was interrupted and leaves it at that. Ids are checked each time: those of a repeated call that are still
// to be taken need not be the ones that were checked. A call with an id that there is not changes nothing.
Status Session::begin(Call call, std::span<const int32_t> tokens) {
  THIMBLE_TRY(check_files());
  THIMBLE_TRY(check_tokens(tokens));
  const Unfinished& u = unfinished_;
  const uint64_t hash = hash_tokens(tokens);
  const bool same = call != Call::kNone && u.call == call && u.count == tokens.size() && u.hash == hash;
  if (!same) {
    if (u.sampled && !u.started) sampler_.set_random(u.random);  // the token goes nowhere
    unfinished_ = {};
  }
  call_start_ = steady_seconds();
  call_start_read_ = read_;
  THIMBLE_TRY(go_on());
  if (same) return {};
  THIMBLE_TRY(check_room(tokens.size()));
  unfinished_.call = call;
  unfinished_.count = tokens.size();
  unfinished_.hash = hash;
  return {};
}

// Gives a step its tokens, which are read for the first time.
Status Session::set_tokens(std::span<const int32_t> tokens) {
  thimble::set_tokens(*model_, layout_, tokens);
  if (policies_.retention->reads_again())
    unscored_tokens_.insert(unscored_tokens_.end(), tokens.begin(), tokens.end());
  return policies_.retention->scores_on_host() ? note_tokens(tokens) : Status();
}

// Tells a retention that scores on the host of tokens which come next.
Status Session::note_tokens(std::span<const int32_t> tokens) {
  THIMBLE_TRY(
      stream_->submit(*programs_.embed, 0, 1, step_params(static_cast<uint32_t>(tokens.size())), heads_));
  THIMBLE_TRY(stream_->wait());
  const uint64_t cols = model_->shape.d_model;
  for (size_t first = 0; first < tokens.size(); first += kNotedAtOnce) {
    const auto some = tokens.subspan(first, std::min<size_t>(kNotedAtOnce, tokens.size() - first));
    const std::span<float> rows = std::span(embeddings_).first(some.size() * cols);
    THIMBLE_TRY(device_->read(rows.data(), layout_.x.slice(first * cols * sizeof(float), rows.size_bytes())));
    policies_.retention->note(read_ + first, some, rows);
  }
  return {};
}

Status Session::feed(std::span<const int32_t> tokens) {
  const SessionOptions& o = plan_.options;
  THIMBLE_TRY(begin(Call::kFeed, tokens));
  const uint64_t enough = uint64_t(o.chunk) + o.local + 1;
  for (;;) {
    if (waiting_.size() == enough) THIMBLE_TRY(read_waiting(o.chunk, plan_.dimensions.evicts, false));
    const auto left = tokens.subspan(unfinished_.taken);
    if (left.empty()) break;
    const auto next = left.first(std::min<uint64_t>(left.size(), enough - waiting_.size()));
    waiting_.insert(waiting_.end(), next.begin(), next.end());
    unfinished_.taken += next.size();
    has_logits_ = false;
  }
  unfinished_ = {};
  return {};
}

Status Session::flush() {
  THIMBLE_TRY(begin(Call::kNone, {}));
  return flush_waiting();
}

Status Session::flush_waiting() {
  const SessionOptions& o = plan_.options;
  while (!waiting_.empty()) {
    const uint32_t waiting = static_cast<uint32_t>(waiting_.size());
    if (plan_.dimensions.evicts && waiting > o.local) {
      const uint32_t rows = std::min(o.chunk, waiting - o.local);
      THIMBLE_TRY(read_waiting(rows, true, rows == waiting - o.local));
    } else {
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
    u.random = sampler_.random();
    if (sampler_.greedy()) {
      u.token = *on_host<int32_t>(layout_.arg_max);
    } else {
      THIMBLE_LET(logits, this->logits());
      u.token = sampler_.sample(logits.data());
    }
    u.sampled = true;
  }
  THIMBLE_TRY(append_token(u.token, true));
  const int32_t token = u.token;
  u = {};
  return token;
}

// A token that an interrupted step sampled and did not start is sampled anew.
Status Session::set_sampler(const SamplerOptions& options) {
  THIMBLE_TRY(sampler_.set(options));
  if (!unfinished_.started) unfinished_.sampled = false;
  return {};
}

Status Session::accept(int32_t token) {
  const std::span<const int32_t> tokens(&token, 1);
  THIMBLE_TRY(begin(Call::kAccept, tokens));
  THIMBLE_TRY(flush_waiting());
  THIMBLE_TRY(append_token(token, true));
  unfinished_ = {};
  return {};
}

// Runs one token through the model; `generated`: the sampler remembers it. Repeated after an interrupt it
// runs it once all the same.
Status Session::append_token(int32_t token, bool generated) {
  if (unfinished_.started) return {};  // and begin() finished it
  if (unscored_ && unscored_ == policies_.retention->upkeep_rows(plan_.options)) THIMBLE_TRY(upkeep());
  THIMBLE_TRY(make_room(1, false));
  THIMBLE_TRY(set_tokens({&token, 1}));
  unfinished_.started = true;
  if (generated) sampler_.accept(token, read_);
  fill_heads(1, policies_.retention->scores_on_host(), false);
  return start({.work = Work::kDecode,
                .program = programs_.decode.get(),
                .next = 0,
                .last = 1,
                .step = step_params(1)});
}

Status Session::score(std::span<const int32_t> tokens, std::span<float> log_probs) {
  THIMBLE_TRY(begin(Call::kScore, tokens));
  Unfinished& u = unfinished_;
  if (u.taken == 0 && !tokens.empty()) {
    THIMBLE_TRY(flush_waiting());
    THIMBLE_TRY(check_logits());
  }
  // Where a generated token chooses what it attends to or what stays, a text is scored as if it were
  // generated.
  if (policies_.selection->selects(plan_.options) || policies_.retention->scores_on_host())
    return score_by_steps(tokens, log_probs);
  if (u.taken == 0 && !tokens.empty()) THIMBLE_TRY(target_log_probs(tokens.first(1), log_probs.data()));
  while (u.taken < tokens.size() || u.row < u.slice) {
    if (u.row == u.slice) THIMBLE_TRY(append_slice(tokens.subspan(u.taken)));
    // Row i of the slice gives the probability of the token after its own.
    const uint32_t rows = std::min(u.slice - u.row, kLogitRowsAtOnce);
    const uint64_t next = u.taken - u.slice + u.row + 1;
    const auto targets = tokens.subspan(next, std::min<uint64_t>(rows, tokens.size() - next));
    THIMBLE_TRY(slice_logits(u.row, rows));
    THIMBLE_TRY(check_finite());
    THIMBLE_TRY(target_log_probs(targets, log_probs.data() + next));
    u.row += rows;
    u.has_logits = u.has_log_probs = false;
  }
  if (u.slice) {  // the next token's logits belong in the first row
    THIMBLE_TRY(slice_logits(u.slice - 1, 1));
    has_logits_ = true;
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

// Appends as many of these tokens as one chunk and the pool have room for; they stay. Where rows are read
// again they are in the batches in which generated tokens are, however calls cut the text: an entry's score
// is a weight among its batch.
Status Session::append_slice(std::span<const int32_t> tokens) {
  const bool again = policies_.retention->reads_again();
  const uint32_t batch = again ? policies_.retention->upkeep_rows(plan_.options) : plan_.options.chunk;
  if (!again || unscored_ == batch) THIMBLE_TRY(upkeep());
  THIMBLE_TRY(make_room(1, false));
  const uint32_t rows = static_cast<uint32_t>(std::min<uint64_t>({tokens.size(), batch - unscored_, room()}));
  THIMBLE_TRY(set_tokens(tokens.first(rows)));
  unfinished_.taken += rows;
  unfinished_.slice = rows;
  unfinished_.row = 0;
  unfinished_.has_log_probs = false;  // the first token's are read
  fill_heads(rows, false, false);
  return start({.work = Work::kChunk,
                .program = &chunk_program(rows),
                .next = Decoder::kHead,
                .last = tail_,
                .step = step_params(rows)});
}

// Rows that every head has room for.
uint32_t Session::room() const {
  uint32_t room = UINT32_MAX;
  for (size_t i = 0; i < entries_.size(); ++i)
    room = std::min(room, plan_.dimensions.runs[i].capacity - entries_[i]);
  return room;
}

uint32_t Session::most_entries() const { return *std::max_element(entries_.begin(), entries_.end()); }

// Logits of these rows of the step that ran last.
Status Session::slice_logits(uint32_t first, uint32_t rows) {
  if (unfinished_.has_logits) return {};  // and begin() finished it
  unfinished_.has_logits = true;
  StepParams step = step_params(unfinished_.slice);
  step.first_logit_row = first;
  step.n_logit_rows = rows;
  for (HeadState& head : heads_)
    head.n_entries = 0;  // the tail reads no entries, and the rows are among them already
  return start({.work = Work::kLogits,
                .program = &chunk_program(unfinished_.slice),
                .next = tail_,
                .last = tail_ + 1,
                .step = step});
}

// Log-probabilities of these tokens, one for each row of logits.
Status Session::target_log_probs(std::span<const int32_t> targets, float* log_probs) {
  if (targets.empty()) return {};
  if (!unfinished_.has_log_probs) {
    unfinished_.has_log_probs = true;
    std::transform(targets.begin(), targets.end(), on_host<int32_t>(layout_.targets),
                   [&](int32_t target) { return may_follow(target) ? target : 0; });
    StepParams step = step_params(0);
    step.n_logit_rows = static_cast<uint32_t>(targets.size());
    fill_heads(0, false, false);
    THIMBLE_TRY(start(
        {.work = Work::kLogProb, .program = programs_.log_prob.get(), .next = 0, .last = 1, .step = step}));
  }
  const float* read = on_host<float>(layout_.log_prob);
  for (size_t i = 0; i < targets.size(); ++i) log_probs[i] = may_follow(targets[i]) ? read[i] : -INFINITY;
  return {};
}

Result<std::span<const float>> Session::logits() const {
  THIMBLE_TRY(check_logits());
  const View& readable = layout_.host_logits ? layout_.host_logits : layout_.logits;
  float* logits = on_host<float>(readable);
  if (layout_.host_logits) THIMBLE_TRY(device_->read(logits, layout_.logits.slice(0, readable.bytes)));
  return std::span<const float>(logits, model_->output.rows);
}

Status Session::check_logits() const {
  if (!has_logits_)
    return error(Code::kInvalidArgument,
                 "there are no logits to go on from: feed at least one token and flush first");
  return check_finite();
}

Status Session::check_finite() const {
  if (finite_logits_) return {};
  return error(Code::kNotFinite,
               "the model gave logits that are NaN or infinite before position %llu: its file is damaged, or "
               "its numbers "
               "overflow on this device; rewind to go on from an earlier position, or try another file",
               static_cast<unsigned long long>(read_));
}

// Whether what is read from mapped files is still there.
Status Session::check_files() const {
  THIMBLE_TRY(model_->check_files());
  const auto& retainer = plan_.options.retainer;
  return retainer ? retainer->file.check_whole("the file of heads") : Status();
}

Status Session::check_tokens(std::span<const int32_t> tokens) const {
  for (const int32_t token : tokens)
    if (token < 0 || static_cast<uint32_t>(token) >= model_->shape.vocab)
      return error(Code::kInvalidArgument, "token id %d is not in the vocabulary; ids go from 0 to %u", token,
                   model_->shape.vocab - 1);
  return {};
}

// Whether that many more tokens fit where nothing may be evicted, or positions are bounded.
Status Session::check_room(uint64_t tokens) const {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const HeadRun& run = plan_.dimensions.runs[i];
    const uint64_t entries = entries_[i] + waiting_.size();
    if (!run.evicts && entries + tokens > run.capacity)
      return error(Code::kContextFull,
                   "context_length_exceeded: %llu tokens are held and %llu more do not fit in a pool of %u, "
                   "which has room for %u with an answer; make the pool larger, or choose a retention policy "
                   "that evicts",
                   static_cast<unsigned long long>(entries), static_cast<unsigned long long>(tokens),
                   plan_.options.pool, run.capacity);
  }
  const uint64_t position = read_ + waiting_.size();
  const uint64_t bound = plan_.options.context ? plan_.options.context : INT32_MAX;
  if (position + tokens > bound)
    return error(Code::kContextFull,
                 "context_length_exceeded: %llu tokens after position %llu pass the bound of %llu positions; "
                 "raise the "
                 "context",
                 static_cast<unsigned long long>(tokens), static_cast<unsigned long long>(position),
                 static_cast<unsigned long long>(bound));
  return {};
}

}  // namespace thimble
