#include "runtime/draft_model.h"

#include <algorithm>

namespace thimble {

DraftModel::DraftModel(std::unique_ptr<Session> session, uint64_t bytes, uint32_t target_vocab)
    : session_(std::move(session)), target_vocab_(target_vocab) {
  waiting_.reserve(session_->plan().options.pool);
  ahead_.reserve(kMostDrafted);
  bytes_ = bytes + (waiting_.capacity() + ahead_.capacity()) * sizeof(int32_t);
}

Result<std::unique_ptr<Drafter>> DraftModel::create(const SessionOptions& target, uint32_t target_vocab,
                                                    std::shared_ptr<Device> device) {
  THIMBLE_LET(session, Session::create(target.draft_model, std::move(device),
                                       draft_options(*target.draft_model, target)));
  const MemoryPlan& plan = session->plan();
  const uint64_t bytes = session->allocated() - (plan.fixed - plan.programs);
  return std::unique_ptr<Drafter>(new DraftModel(std::move(session), bytes, target_vocab));
}

// ---- the text ----

Status DraftModel::note(uint64_t position, std::span<const int32_t> tokens) {
  if (position < first_ || position > end_)
    start_at(position);
  else if (position < end_)
    go_back(position);
  for (const int32_t token : tokens) note(token);
  return {};
}

void DraftModel::note(int32_t token) {
  ++end_;
  if (static_cast<uint32_t>(token) >= session_->model().shape.vocab) return start_at(end_);
  if (!ahead_.empty()) {
    if (ahead_.front() == token) {
      ahead_.erase(ahead_.begin());
      return;
    }
    const uint64_t before = end_ - 1;
    ahead_.clear();
    if (!session_->rewind(before - first_).ok()) start_at(before), ++end_;
  }
  if (waiting_.size() ==
      waiting_.capacity()) {  // more than the window: the session starts with its last half
    const auto half = static_cast<ptrdiff_t>(waiting_.size() / 2);
    std::vector<int32_t>& w = waiting_;
    w.erase(w.begin(), w.begin() + half);
    static_cast<void>(session_->reset());
    first_ = end_ - 1 - w.size();
  }
  waiting_.push_back(token);
}

// Forgets the tokens from this position on, which is one of the noted.
void DraftModel::go_back(uint64_t position) {
  const uint64_t given = end_ - waiting_.size();
  ahead_.clear();
  if (position >= given) {
    waiting_.resize(position - given);
  } else {
    waiting_.clear();
    if (!session_->rewind(position - first_).ok()) return start_at(position);
  }
  end_ = position;
}

// Forgets the text before this position.
void DraftModel::start_at(uint64_t position) {
  static_cast<void>(session_->reset());  // if it fails, so do later steps
  waiting_.clear();
  ahead_.clear();
  first_ = end_ = position;
}

Status DraftModel::reset() {
  start_at(0);
  return {};
}

// ---- guessing ----

bool DraftModel::read_waiting() {
  session_->forget_interrupt();
  if (waiting_.empty()) return session_->state().has_logits;
  // A single token is read as a generated one, which is faster.
  const bool alone = waiting_.size() == 1 && session_->state().has_logits;
  Status read = alone ? session_->accept(waiting_[0]) : session_->feed(waiting_);
  if (read.ok()) read = session_->flush();
  waiting_.clear();
  if (!read.ok()) start_at(end_);
  return read.ok();
}

void DraftModel::read() {
  constexpr size_t kFew = 16;
  if (waiting_.size() > kFew) read_waiting();
}

Result<uint32_t> DraftModel::guess(std::span<int32_t> draft) {
  if (!ahead_.empty() || !read_waiting()) return 0u;
  // An eviction after a guess would make it impossible to go back.
  const size_t most = std::min<size_t>(draft.size(), session_->room() + size_t{1});
  for (uint32_t i = 0; i < most; ++i) {
    const int32_t token = session_->state().arg_max;
    if (token < 0 || static_cast<uint32_t>(token) >= target_vocab_) return i;
    draft[i] = token;
    if (i + 1 == most) return i + 1;
    if (!session_->accept(token).ok()) {
      start_at(end_);
      return i + 1;
    }
    ahead_.push_back(token);
  }
  return 0u;
}

// ---- copies ----

Result<std::unique_ptr<Drafter>> DraftModel::clone() const {
  const uint64_t before = session_->allocated();
  THIMBLE_LET(session, session_->clone());
  const uint64_t bytes = session->allocated() - before;
  std::unique_ptr<DraftModel> twin(new DraftModel(std::move(session), bytes, target_vocab_));
  twin->first_ = first_;
  twin->end_ = end_;
  twin->waiting_.insert(twin->waiting_.end(), waiting_.begin(), waiting_.end());
  twin->ahead_ = ahead_;
  return std::unique_ptr<Drafter>(std::move(twin));
}

}  // namespace thimble
