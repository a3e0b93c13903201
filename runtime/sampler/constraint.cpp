#include "runtime/sampler/constraint.h"

namespace thimble {

void Constraint::set(Grammar grammar) {
  grammar_ = std::move(grammar);
  reset();
}

const grammar::TokenMask& Constraint::allowed() {
  if (!has_mask_) grammar_->allowed(place_, mask_);
  has_mask_ = true;
  return mask_;
}

void Constraint::accept(int32_t token, uint64_t position) {
  if (!grammar_ || !grammar_->take(place_, token)) return;
  taken_.push_back({position, token});
  has_mask_ = false;
}

void Constraint::rewind(uint64_t position) {
  if (taken_.empty() || taken_.back().position < position) return;
  const std::vector<Taken> taken = std::move(taken_);
  reset();
  for (const Taken& t : taken)
    if (t.position < position) accept(t.token, t.position);
}

void Constraint::reset() {
  place_ = grammar_ ? grammar_->start() : grammar::TokenGrammar::Place();
  taken_.clear();
  has_mask_ = false;
}

}  // namespace thimble
