#include "runtime/draft_block.h"

#include <algorithm>

namespace thimble {

// It only counts: no token is sampled from it.
DraftBlock::DraftBlock(std::unique_ptr<Engine> engine, uint64_t bytes, uint64_t most_waiting)
    : engine_(std::move(engine)), state_(engine_->dimensions().runs.size(), Sampler(1, 1, {})) {
  waiting_.reserve(most_waiting);
  positions_.reserve(engine_->plan().capacity);
  bytes_ = bytes + state_.host_bytes() + (waiting_.capacity() + positions_.capacity()) * sizeof(int32_t);
}

Result<std::unique_ptr<Drafter>> DraftBlock::create(const std::shared_ptr<const Model>& model,
                                                    const SessionOptions& target,
                                                    std::shared_ptr<Device> device) {
  const std::shared_ptr<const Model> block(model, model->draft_block.get());
  THIMBLE_LET(plan, make_plan(*block, *device, draft_options(*block, target)));
  const uint64_t of_device = plan.fixed - plan.programs;
  Policies policies(plan.options);
  THIMBLE_LET(engine, Engine::create(block, std::move(device), std::move(plan), std::move(policies),
                                     std::make_shared<Ledger>(), true));
  const uint64_t bytes = engine->allocated() - of_device;
  const uint64_t most_waiting = uint64_t(target.chunk) + engine->options().chunk;
  return std::unique_ptr<Drafter>(new DraftBlock(std::move(engine), bytes, most_waiting));
}

// ---- the text ----

Status DraftBlock::note(uint64_t position, std::span<const int32_t> tokens) {
  if (position != end()) go_back(position);
  if (!rows_ && !tokens.empty()) {  // the row before the first token is not known
    next_ = position + 1;
    tokens = tokens.subspan(1);
  }
  waiting_.insert(waiting_.end(), tokens.begin(), tokens.end());
  return {};
}

// Forgets the tokens from this position on.
void DraftBlock::go_back(uint64_t position) {
  if (position >= next_ && position < end()) {
    waiting_.resize(position - next_);
    rows_ = std::min(rows_, static_cast<uint32_t>(waiting_.size()) + 1);
    return;
  }
  waiting_.clear();
  rows_ = 0;
  next_ = position;
  positions_.resize(state_.entries[0]);
  if (!engine_->positions(state_, 0, positions_).ok()) positions_.clear();
  const auto kept = std::lower_bound(positions_.begin(), positions_.end(), static_cast<int32_t>(position));
  keep_entries(static_cast<uint32_t>(kept - positions_.begin()));
}

// Forgets entries after the first ones. All heads hold the same.
void DraftBlock::keep_entries(uint32_t count) {
  std::fill(state_.entries.begin(), state_.entries.end(), count);
}

// Reads the tokens that wait when their rows fill the buffer.
void DraftBlock::follow(uint64_t position, const View& rows) {
  const uint64_t row_bytes = engine_->model().shape.d_model * sizeof(float);
  const auto count = static_cast<uint32_t>(rows.bytes / row_bytes);
  if (position + 1 != next_ + rows_) return static_cast<void>(reset());
  for (uint32_t done = 0; done < count;) {
    const uint32_t now = std::min(count - done, engine_->options().chunk + 1 - rows_);
    const Status copied =
        engine_->device().copy(slice(engine_->layout().model_rows, rows_, now), slice(rows, done, now));
    rows_ += now;
    done += now;
    const bool full = rows_ == engine_->options().chunk + 1;
    if (!copied.ok() || (full && !read_waiting(engine_->options().chunk, false).ok()))
      return static_cast<void>(reset());
  }
}

View DraftBlock::slice(const View& of, uint64_t first, uint64_t count) const {
  const uint64_t row_bytes = engine_->model().shape.d_model * sizeof(float);
  return of.slice(first * row_bytes, count * row_bytes);
}

// A guess reads the last token.
void DraftBlock::read() {
  constexpr uint32_t kFew = 16;
  if (rows_ > kFew && rows_ == waiting_.size() && !read_waiting(rows_ - 1, false).ok())
    static_cast<void>(reset());
}

Status DraftBlock::reset() {
  state_.reset();
  waiting_.clear();
  rows_ = 0;
  next_ = 0;
  return engine_->forget();
}

// ---- steps ----

// Reads the first of the waiting tokens. At most one row is left for those after them.
Status DraftBlock::read_waiting(uint32_t count, bool logits) {
  THIMBLE_TRY(run(next_, std::span(waiting_).first(count), logits));
  const View& all = engine_->layout().model_rows;
  rows_ -= count;
  if (rows_) THIMBLE_TRY(engine_->device().copy(slice(all, 0, rows_), slice(all, count, rows_)));
  waiting_.erase(waiting_.begin(), waiting_.begin() + count);
  next_ += count;
  return {};
}

// Reads tokens from this position on with the first of the waiting rows.
Status DraftBlock::run(uint64_t position, std::span<const int32_t> tokens, bool logits) {
  const auto count = static_cast<uint32_t>(tokens.size());
  const Programs& programs = engine_->programs();
  Program& program = count == 1 ? *programs.decode : engine_->chunk_program(count);
  THIMBLE_TRY(make_room(count));
  engine_->set_tokens(tokens);
  return run({.program = &program,
              .last = logits || count == 1 ? program.segments : engine_->tail(),
              .n_rows = count,
              .position = position,
              .first_logit_row = count - 1});
}

Status DraftBlock::run(const Step& step) {
  THIMBLE_TRY(engine_->start(step, state_));
  THIMBLE_TRY(engine_->run());
  state_.read += step.n_rows;
  engine_->count_entries(state_);
  return {};
}

Status DraftBlock::make_room(uint32_t rows) {
  if (state_.entries[0] + rows <= engine_->plan().capacity) return {};
  Program& program = *engine_->programs().evict;
  return run({.program = &program, .last = program.segments, .position = next_, .evicts = true});
}

// ---- guessing ----

Result<uint32_t> DraftBlock::guess(std::span<int32_t> draft) {
  read();
  if (!rows_ || rows_ != waiting_.size()) return 0u;
  const Result<uint32_t> guessed = guess_on(draft);
  if (!guessed.ok()) static_cast<void>(reset());
  return guessed.ok() ? *guessed : 0u;
}

// After its first guess, the layer goes on with its own rows in place of the model's. Their entries are
// dropped.
Result<uint32_t> DraftBlock::guess_on(std::span<int32_t> draft) {
  THIMBLE_TRY(make_room(rows_ + static_cast<uint32_t>(draft.size())));
  THIMBLE_TRY(read_waiting(rows_, true));
  const uint32_t entries = state_.entries[0];
  const Layout& l = engine_->layout();
  uint32_t guessed = 0;
  for (;;) {
    const int32_t token = engine_->arg_max(1)[0];
    if (token < 0) break;
    draft[guessed++] = token;
    if (guessed == draft.size()) break;
    THIMBLE_TRY(engine_->device().copy(slice(l.model_rows, 0, 1), slice(l.logit_x, 0, 1)));
    THIMBLE_TRY(run(next_ + guessed - 1, {&token, 1}, true));
  }
  keep_entries(entries);
  return guessed;
}

// ---- copies ----

Result<std::unique_ptr<Drafter>> DraftBlock::clone() const {
  const uint64_t before = engine_->allocated();
  THIMBLE_LET(engine, engine_->clone(state_));
  const uint64_t bytes = engine->allocated() - before;
  std::unique_ptr<DraftBlock> twin(new DraftBlock(std::move(engine), bytes, waiting_.capacity()));
  twin->state_ = state_;
  twin->next_ = next_;
  twin->waiting_.insert(twin->waiting_.end(), waiting_.begin(), waiting_.end());
  twin->rows_ = rows_;
  return std::unique_ptr<Drafter>(std::move(twin));
}

}  // namespace thimble
