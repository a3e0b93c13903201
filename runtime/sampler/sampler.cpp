#include "runtime/sampler/sampler.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <utility>

#include "base/splitmix64.h"

namespace thimble {

Sampler::Sampler(uint32_t vocab, uint32_t rewindable, std::span<const int32_t> suppressed)
    : suppressed_(suppressed),
      candidates_(vocab),
      biases_(kMostBiased),
      history_(uint64_t(kLongestHistory) + rewindable) {}

Status Sampler::check(const SamplerOptions& o) {
  // Each condition is written so that NaN fails it.
  if (!(o.temperature >= 0) || !std::isfinite(o.temperature))
    return error(Code::kInvalidArgument, "temperature is %g; it must be 0 or more",
                 static_cast<double>(o.temperature));
  if (!(o.top_p >= 0 && o.top_p <= 1))
    return error(Code::kInvalidArgument, "top_p is %g; it must be from 0 to 1", static_cast<double>(o.top_p));
  if (!(o.min_p >= 0 && o.min_p <= 1))
    return error(Code::kInvalidArgument, "min_p is %g; it must be from 0 to 1", static_cast<double>(o.min_p));
  if (!(o.repeat_penalty > 0) || !std::isfinite(o.repeat_penalty))
    return error(Code::kInvalidArgument, "repeat_penalty is %g; it must be more than 0 (1: none)",
                 static_cast<double>(o.repeat_penalty));
  if (o.repeat_last > kLongestHistory)
    return error(Code::kInvalidArgument, "repeat_last is %u; at most %u tokens are remembered", o.repeat_last,
                 kLongestHistory);
  return {};
}

Status Sampler::set(const SamplerOptions& o) {
  THIMBLE_TRY(check(o));
  options_ = o;
  random_ = o.seed;
  for (Accepted& a : history_) a.random = o.seed;  // so that rewind() also starts from the new seed
  return {};
}

Status Sampler::set_penalties(const AnswerPenalties& p) {
  for (const auto& [name, value] : {std::pair("presence", p.presence), std::pair("frequency", p.frequency)})
    if (!std::isfinite(value))
      return error(Code::kInvalidArgument, "%s_penalty is %g; it must be finite (0: none)", name,
                   static_cast<double>(value));
  penalties_ = p;
  return {};
}

Status Sampler::set_bias(std::span<const int32_t> tokens, std::span<const float> biases) {
  if (tokens.size() > kMostBiased)
    return error(Code::kInvalidArgument, "there are %zu biases; at most %u tokens may have one",
                 tokens.size(), kMostBiased);
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || static_cast<size_t>(tokens[i]) >= candidates_.size())
      return error(Code::kInvalidArgument, "token %d has a bias; the vocabulary has %zu tokens", tokens[i],
                   candidates_.size());
    if (!std::isfinite(biases[i]))
      return error(Code::kInvalidArgument, "the bias of token %d is %g; it must be finite", tokens[i],
                   static_cast<double>(biases[i]));
    const auto before = tokens.first(i);
    if (std::find(before.begin(), before.end(), tokens[i]) != before.end())
      return error(Code::kInvalidArgument, "token %d has two biases; give it one", tokens[i]);
  }
  for (size_t i = 0; i < tokens.size(); ++i) biases_[i] = {tokens[i], biases[i]};
  biased_ = tokens.size();
  return {};
}

void Sampler::accept(int32_t token, uint64_t position) {
  if (token < 0 || static_cast<size_t>(token) >= candidates_.size()) return;
  history_[accepted_++ % history_.size()] = {random_, static_cast<uint32_t>(position), token};
}

void Sampler::rewind(uint64_t position) {
  while (accepted_ > 0 && recent(0).position >= position) --accepted_;
  random_ = accepted_ > 0 ? recent(0).random : options_.seed;
}

void Sampler::reset() {
  accepted_ = 0;
  random_ = options_.seed;
}

Sampler::Saved Sampler::saved() const {
  std::vector<Accepted> all(std::min<uint64_t>(accepted_, history_.size()));
  for (uint64_t i = 0; i < all.size(); ++i) all[all.size() - 1 - i] = recent(i);
  return {options_, random_, std::move(all)};
}

bool Sampler::takes(std::span<const Accepted> accepted) const {
  return std::all_of(accepted.begin(), accepted.end(), [&](const Accepted& a) {
    return a.token >= 0 && static_cast<size_t>(a.token) < candidates_.size();
  });
}

void Sampler::restore(const Saved& saved) {
  options_ = saved.options;
  random_ = saved.random;
  const std::span<const Accepted> all(saved.accepted);
  const auto accepted = all.last(std::min(all.size(), history_.size()));
  std::copy(accepted.begin(), accepted.end(), history_.begin());
  accepted_ = accepted.size();
}

bool Sampler::operator==(const Sampler& other) const {
  return saved() == other.saved() && penalties_ == other.penalties_ &&
         std::ranges::equal(biases(), other.biases());
}

uint64_t Sampler::bytes(uint32_t vocab, uint32_t rewindable) {
  return uint64_t(vocab) * sizeof(Candidate) + kMostBiased * sizeof(Bias) +
         (uint64_t(kLongestHistory) + rewindable) * sizeof(Accepted);
}

uint64_t Sampler::bytes() const {
  return candidates_.capacity() * sizeof(Candidate) + biases_.capacity() * sizeof(Bias) +
         history_.capacity() * sizeof(Accepted);
}

// The upper 53 bits of a random number, as a number in [0, 1).
double Sampler::uniform() { return static_cast<double>(splitmix64(random_) >> 11) * 0x1p-53; }

bool Sampler::samples_best(int32_t best) const {
  return options_.temperature == 0 && options_.repeat_penalty == 1 && penalties_ == AnswerPenalties{} &&
         biased_ == 0 && std::find(suppressed_.begin(), suppressed_.end(), best) == suppressed_.end();
}

// Penalises the candidates that are tokens of the answer. The ids of those that were penalised are
// complemented meanwhile, so that what applies once does so.
void Sampler::penalise_answer(uint64_t position) {
  const bool repeats = options_.repeat_penalty != 1, others = penalties_ != AnswerPenalties{};
  const uint64_t most = others ? kLongestHistory : repeats ? options_.repeat_last : 0;
  uint64_t count = 0;
  while (count < std::min<uint64_t>(accepted_, most) && recent(count).position + count + 1 == position)
    ++count;
  const auto candidate = [&](uint64_t i) -> Candidate& {
    return candidates_[static_cast<size_t>(recent(i).token)];
  };
  const auto restore_ids = [&] {
    for (uint64_t i = 0; i < count; ++i) candidate(i).id = recent(i).token;
  };
  for (uint64_t i = 0; repeats && i < std::min<uint64_t>(count, options_.repeat_last); ++i) {
    Candidate& c = candidate(i);
    if (c.id < 0) continue;
    const float by = options_.repeat_penalty;
    c.logit = std::clamp(c.logit > 0 ? c.logit / by : c.logit * by, -INFINITY, FLT_MAX);
    c.id = ~c.id;
  }
  restore_ids();
  for (uint64_t i = 0; i < count; ++i) {
    Candidate& c = candidate(i);
    c.logit -= penalties_.frequency;
    if (c.id < 0) continue;
    c.logit -= penalties_.presence;
    c.id = ~c.id;
  }
  restore_ids();
}

int32_t Sampler::sample(const float* logits, const grammar::TokenMask* allowed, uint64_t position) {
  const auto vocab = static_cast<uint32_t>(candidates_.size());
  for (uint32_t id = 0; id < vocab; ++id) {
    const float logit = std::isnan(logits[id]) ? -INFINITY : std::min(logits[id], FLT_MAX);
    candidates_[id] = {logit, static_cast<int32_t>(id)};
  }
  penalise_answer(position);
  for (const Bias& b : biases()) candidates_[static_cast<size_t>(b.token)].logit += b.bias;
  for (const int32_t id : suppressed_) candidates_[static_cast<size_t>(id)].logit = -INFINITY;
  // Ids make the order total, so the result does not depend on the sorting algorithm.
  const auto before = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
  };
  const auto first = candidates_.begin();
  auto last = candidates_.end();
  if (allowed) last = std::remove_if(first, last, [&](const Candidate& c) { return !(*allowed)[c.id]; });
  if (options_.temperature == 0) return std::min_element(first, last, before)->id;

  if (options_.top_k > 0 && options_.top_k < last - first) {
    const auto end = last;
    last = first + options_.top_k;
    std::nth_element(first, last, end, before);
  }
  std::sort(first, last, before);

  // From here on the candidates are sorted in descending order, so each filter cuts off the end. The first
  // candidate always stays.
  const double best = first->logit;
  const auto weight = [&](const Candidate& c, double temperature) {
    return std::exp((c.logit - best) / temperature);
  };
  if (options_.top_p < 1) {
    double all = 0, sum = 0;
    for (auto c = first; c != last; ++c) all += weight(*c, 1);
    auto c = first;
    do sum += weight(*c++, 1);
    while (c != last && sum < all * options_.top_p);
    last = c;
  }
  if (options_.min_p > 0)
    last = std::find_if(first + 1, last, [&](const Candidate& c) { return weight(c, 1) < options_.min_p; });

  double all = 0;
  for (auto c = first; c != last; ++c) all += weight(*c, options_.temperature);
  double left = uniform() * all;
  for (auto c = first; c != last; ++c) {
    left -= weight(*c, options_.temperature);
    if (left < 0) return c->id;
  }
  return first->id;  // rounding left a remainder, or every logit is -inf
}

}  // namespace thimble
