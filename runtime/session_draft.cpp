// Drafts of a session: several tokens are read in one step, and those that are generated anyway stay.
//
// A step reads a generated token and a guess of the tokens after it, and computes the logits of every row.
// The next token is then sampled from the logits of its row as always, with the same random numbers. If it is
// the guessed one, its row is already computed. Otherwise the rows from there on are left: the state never
// counted them. So the tokens have exactly the distribution that they have without drafts.
#include <algorithm>
#include <utility>

#include "base/system.h"
#include "runtime/session.h"

namespace thimble {

Result<uint32_t> Session::guess(std::span<int32_t> draft) {
  const uint32_t most = drafter_ ? most_drafted() : 0, fixed = options().draft_tokens;
  if (!most) return 0u;
  const uint32_t wanted = fixed ? std::min(fixed, most) : pace_.choose(most);
  if (!wanted) return 0u;
  const double start = steady_seconds();
  drafter_->read();
  const double read = steady_seconds();
  pace_.read(read - start);
  THIMBLE_LET(guessed, drafter_->guess(draft.first(wanted)));
  guess_seconds_ = steady_seconds() - read;
  state_.prefill_seconds += read - start;
  state_.decode_seconds += guess_seconds_;
  return guessed;
}

// The most tokens that may be drafted after the next token: no eviction, no scoring of waiting tokens and no
// snapshot falls inside a draft.
uint32_t Session::most_drafted() const {
  const uint64_t bound = options().context ? options().context : INT32_MAX;
  uint64_t rows = std::min<uint64_t>({kLogitRowsAtOnce, options().chunk, room(), bound - state_.read});
  if (const uint32_t waiting = unscored_rows(options()))
    rows = std::min<uint64_t>(rows, waiting - state_.unscored);
  if (engine_->dimensions().state_slots) rows = std::min(rows, state_.until_snapshot());
  return rows ? static_cast<uint32_t>(rows) - 1 : 0;
}

// Runs a generated token and a guess of the tokens after it.
Status Session::append_draft(std::span<const int32_t> tokens) {
  const auto rows = static_cast<uint32_t>(tokens.size());
  engine_->set_tokens(tokens);
  ahead_ = {.rows = rows, .seconds = guess_seconds_};
  std::copy(tokens.begin(), tokens.end(), ahead_.tokens.begin());
  THIMBLE_LET(saturated, engine_->saturated());
  ahead_.saturated_before = saturated;
  Step step = new_rows(draft_program(rows), rows);
  step.first_logit_row = 0;
  step.n_logit_rows = rows;
  return start({.work = Work::kDraft, .step = step});
}

Program& Session::draft_program(uint32_t rows) const {
  const std::unique_ptr<Program>& draft = engine_->programs().draft;
  return draft ? *draft : engine_->chunk_program(rows);
}

// If rows of a draft were beyond the range of f16, they must not be counted unless their tokens are
// generated. The first token then runs alone. Returns whether it must.
Result<bool> Session::must_run_alone(const Run& draft) {
  THIMBLE_LET(saturated, engine_->saturated());
  if (saturated == ahead_.saturated_before) return false;
  THIMBLE_TRY(engine_->set_saturated(ahead_.saturated_before));
  pace_.drafted(ahead_.rows - 1, 0, true, ahead_.seconds + draft.seconds);
  return true;
}

// Counts the next row of the draft's run, whose token was generated.
void Session::commit_row() {
  const uint32_t row = ahead_.counted++;
  const bool last = ahead_.counted == ahead_.rows;
  ++state_.read;
  ++state_.generated;
  if (again_rows(options()) || (unscored_rows(options()) && engine_->programs().draft)) ++state_.unscored;
  for (uint32_t& entries : state_.entries) ++entries;
  state_.attended = Attended::kEverything;
  show_rows(row, 1, state_.decode_seconds);
  note_logits(row);
  if (!last) return;
  if (engine_->dimensions().state_slots) state_.state_slot = engine_->written_slot();
  keep_states(false);
  pace_.drafted(row, row, false, ahead_.seconds);
}

// Leaves the rows that the state does not count. The states of recurrent layers are those after all rows, so
// the rows that count are read again. `wrong`: another token than the guessed one was generated.
Status Session::leave_draft(bool wrong) {
  const Ahead left = std::exchange(ahead_, {});
  if (!left.counted) return {};
  THIMBLE_TRY(engine_->move_logits(left.counted - 1));
  if (left.counted == left.rows) return {};
  pace_.drafted(left.rows - 1, left.counted - 1, wrong, left.seconds);
  if (!engine_->dimensions().state_slots) return {};
  engine_->set_tokens(std::span(left.tokens).first(left.counted));
  Step step = new_rows(draft_program(left.counted), left.counted);
  step.last = engine_->tail();
  step.rows = Step::Rows::kAgain;
  step.position -= left.counted;
  return start({.work = Work::kCatchUp, .step = step});
}

}  // namespace thimble
