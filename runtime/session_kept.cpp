// Reports which positions of the text a session holds, and which of them the last token attended to.
#include <algorithm>
#include <numeric>

#include "runtime/session.h"

namespace thimble {

Result<uint64_t> Session::positions_read() {
  THIMBLE_TRY(settle());
  return state_.read;
}

Status Session::kept_by_position(float* kept, float* attended) {
  if (attended && !options().watch)
    return error(Code::kInvalidArgument,
                 "this session does not record attention; create it with options.watch = 1");
  if (attended && state_.attended == Attended::kUnknown)
    return error(
        Code::kInvalidArgument,
        "the attention of the last token is not known: no token was read, or entries were evicted or the "
        "text was rewound after it, or it attended to a store; read or generate a token first");
  if (kept) THIMBLE_TRY(count_kept(kept));
  return attended ? add_attention(attended) : Status();
}

// Reads the sums of a segment with scatter_add for all positions that were read, one slice of positions at a
// time.
Status Session::read_sums(Program& program, uint32_t segment, float* sums) {
  const uint64_t read = state_.read;
  Step step{.program = &program, .first = segment, .last = segment + 1};
  for (; step.position < read; step.position += kPositionsAtOnce) {
    THIMBLE_TRY(engine_->submit(step, state_));
    THIMBLE_TRY(engine_->wait());
    const uint64_t count = std::min<uint64_t>(read - step.position, kPositionsAtOnce);
    const View& slice = engine_->layout().position_sums;
    THIMBLE_TRY(engine_->device().read(sums + step.position, slice.slice(0, count * sizeof(float))));
  }
  return {};
}

Status Session::count_kept(float* kept) {
  const uint64_t read = state_.read;
  if (!engine_->programs().kept) {
    std::fill_n(kept, read, 0.0f);
    return {};
  }
  THIMBLE_TRY(read_sums(*engine_->programs().kept, 0, kept));
  const auto heads = static_cast<float>(full_heads(model()));
  for (uint64_t i = 0; i < read; ++i) kept[i] /= heads;
  return {};
}

void Session::stored_by_position(std::span<float> stored) const {
  std::fill(stored.begin(), stored.end(), 0.0f);
  const RecallStore* const store = engine_->store();
  if (!store) return;
  for (size_t run = 0; run < runs().size(); ++run)
    for (uint32_t i = 0; i < store->count(run); ++i) {
      const RecallStore::Page& page = store->page(run, i);
      for (uint32_t place = 0; place < kRecallPage; ++place)
        if ((page.held & ~page.recalled) >> place & 1)
          ++stored[static_cast<uint32_t>(page.number) * kRecallPage + place];
    }
  const auto heads = static_cast<float>(full_heads(model()));
  for (float& share : stored) share /= heads;
}

// Computes the attention weights again from the queries of the last token. Sinks take part of the weight, and
// sums are rounded, so the result is scaled to sum 1.
Status Session::add_attention(float* attended) {
  const uint64_t read = state_.read;
  const uint32_t segment = state_.attended == Attended::kList ? 1 : 0;
  Step step = new_rows(*engine_->programs().watch, 0);
  step.first = segment;
  step.last = segment + 1;
  THIMBLE_TRY(engine_->submit(step, state_));
  THIMBLE_TRY(read_sums(*engine_->programs().attended, segment, attended));
  const double sum = std::accumulate(attended, attended + read, 0.0);
  if (!(sum > 0))
    return error(Code::kNotFinite, "the last token's attention is NaN, infinite or paid to nothing it read");
  for (uint64_t i = 0; i < read; ++i) attended[i] = static_cast<float>(attended[i] / sum);
  return {};
}

}  // namespace thimble
