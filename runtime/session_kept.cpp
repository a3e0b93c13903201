// A session: which positions of its text it still holds, and which of them the last token attended to.
#include <algorithm>
#include <numeric>

#include "runtime/session.h"

namespace thimble {

Result<uint64_t> Session::positions_read() {
  THIMBLE_TRY(settle());
  return read_;
}

Status Session::kept_by_position(float* kept, float* attended) {
  if (attended && !plan_.options.watch)
    return error(Code::kInvalidArgument,
                 "this session does not keep what attention is told by; make it with options.watch = 1");
  if (attended && attended_ == Attended::kUnknown)
    return error(
        Code::kInvalidArgument,
        "what the last token attended to is not known: none was read, or entries were evicted or the "
        "text was rewound after it; read or generate a token first");
  if (kept) THIMBLE_TRY(count_kept(kept));
  return attended ? add_attention(attended) : Status();
}

// What a segment of scatter_add gives to all positions that were read, a slice of them at a time.
Status Session::read_sums(Program& program, uint32_t segment, float* sums) {
  fill_heads(0, false, false);
  StepParams step = step_params(0);
  for (uint64_t first = 0; first < read_; first += kPositionsAtOnce) {
    step.position = static_cast<int32_t>(first);
    THIMBLE_TRY(stream_->submit(program, segment, segment + 1, step, heads_));
    THIMBLE_TRY(stream_->wait());
    const uint64_t count = std::min<uint64_t>(read_ - first, kPositionsAtOnce);
    THIMBLE_TRY(device_->read(sums + first, layout_.position_sums.slice(0, count * sizeof(float))));
  }
  return {};
}

Status Session::count_kept(float* kept) {
  if (!programs_.kept) {
    std::fill_n(kept, read_, 0.0f);
    return {};
  }
  THIMBLE_TRY(read_sums(*programs_.kept, 0, kept));
  const auto heads = static_cast<float>(full_layers(*model_) * model_->shape.kv_heads);
  for (uint64_t i = 0; i < read_; ++i) kept[i] /= heads;
  return {};
}

// By the queries of the last token, anew. A sink takes its share, and sums are rounded: what is left is made
// to sum to 1.
Status Session::add_attention(float* attended) {
  const uint32_t segment = attended_ == Attended::kList ? 1 : 0;
  fill_heads(0, false, false);
  THIMBLE_TRY(stream_->submit(*programs_.watch, segment, segment + 1, step_params(0), heads_));
  THIMBLE_TRY(read_sums(*programs_.attended, segment, attended));
  const double sum = std::accumulate(attended, attended + read_, 0.0);
  if (!(sum > 0))
    return error(Code::kNotFinite, "the last token's attention is NaN, infinite or paid to nothing it read");
  for (uint64_t i = 0; i < read_; ++i) attended[i] = static_cast<float>(attended[i] / sum);
  return {};
}

}  // namespace thimble
