#include "runtime/draft/lookup.h"

#include <algorithm>

namespace thimble {
namespace {

// The text probably repeats if at least kLeastMatch tokens are equal. More than kMostMatch equal tokens do
// not make the guess better.
constexpr size_t kLeastMatch = 3, kMostMatch = 16;

}  // namespace

Lookup::Lookup() { tokens_.reserve(2 * kRemembered); }

Status Lookup::note(uint64_t position, std::span<const int32_t> tokens) {
  if (position < first_ || position > first_ + tokens_.size()) {  // it does not know the token before
    tokens_.clear();
    first_ = position;
  }
  tokens_.resize(position - first_);
  while (!tokens.empty()) {
    if (tokens_.size() == 2 * kRemembered) {
      tokens_.erase(tokens_.begin(), tokens_.begin() + kRemembered);
      first_ += kRemembered;
    }
    const auto next = tokens.first(std::min(tokens.size(), 2 * kRemembered - tokens_.size()));
    tokens_.insert(tokens_.end(), next.begin(), next.end());
    tokens = tokens.subspan(next.size());
  }
  return {};
}

// The longest match wins, and the latest of equally long ones.
Result<uint32_t> Lookup::guess(std::span<int32_t> draft) {
  const size_t size = tokens_.size();
  if (size <= kLeastMatch) return 0u;
  const int32_t* const text = tokens_.data();
  size_t best = 0, longest = kLeastMatch - 1;
  for (size_t end = size - 1; end-- > 0 && longest < kMostMatch;) {  // the match ends with this token
    if (text[end] != text[size - 1]) continue;
    const size_t most = std::min(kMostMatch, end + 1);
    size_t length = 1;
    while (length < most && text[end - length] == text[size - 1 - length]) ++length;
    if (length > longest) longest = length, best = end + 1;
  }
  if (!best) return 0u;
  // A guess that reaches the end of the text goes on with its own first tokens.
  for (size_t i = 0; i < draft.size(); ++i)
    draft[i] = best + i < size ? text[best + i] : draft[best + i - size];
  return static_cast<uint32_t>(draft.size());
}

Status Lookup::reset() {
  tokens_.clear();
  first_ = 0;
  return {};
}

Result<std::unique_ptr<Drafter>> Lookup::clone() const {
  auto twin = std::make_unique<Lookup>();
  twin->tokens_.insert(twin->tokens_.end(), tokens_.begin(), tokens_.end());
  twin->first_ = first_;
  return std::unique_ptr<Drafter>(std::move(twin));
}

}  // namespace thimble
