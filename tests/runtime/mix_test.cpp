// Tests Mix on whole sessions: trained scores decide if all keys are equal, keys decide if all trained scores
// are equal, and both decide otherwise.
#include <gtest/gtest.h>

#include "tests/support/seeded_model.h"
#include "tests/support/watched.h"

namespace thimble::test {
namespace {

SessionOptions options(const SeededModel& m, Retention retention) {
  return {.retainer = m.retainer,
          .retention = retention,
          .keeps = {24, 40, 150, 60},
          .chunk = 40,
          .stabilizers = 12,
          .local = 20,
          .protect_init = 2,
          .max_new = 50};
}

// The entries that are kept of a text, generated tokens and another text. Evictions of every kind happen, and
// later ones choose among entries that earlier ones kept.
Kept kept_of(const SeededModel& m, const SessionOptions& o) {
  const auto session = open_session(m.model, o);
  read(*session, seeded_tokens(301));
  for (int32_t i = 0; i < 120; ++i) accept(*session, i % 64);
  read(*session, seeded_tokens(170, 64, 9));
  return kept(*session);
}

// A model in which the tensors with this name are zeros.
SeededModel without(const char* name) {
  return seeded_model({.edit = [name](const std::string& tensor, std::vector<float>& values) {
    if (tensor.find(name) != std::string::npos) std::fill(values.begin(), values.end(), 0.0f);
  }});
}

TEST(Mix, RanksByTrainedScoresIfAllKeysAreAlike) {
  const SeededModel m = without("attn_k.");
  EXPECT_EQ(kept_of(m, options(m, Retention::kMix)), kept_of(m, options(m, Retention::kLocret)));
}

TEST(Mix, RanksByKeysIfAllTrainedScoresAreAlike) {
  const SeededModel m = without("locret_fc2");
  EXPECT_EQ(kept_of(m, options(m, Retention::kMix)), kept_of(m, options(m, Retention::kKeyDiff)));
}

// The number of positions that are in both.
size_t shared(const Kept& a, const Kept& b) {
  size_t count = 0;
  for (size_t layer = 0; layer < a.size(); ++layer)
    for (size_t head = 0; head < a[layer].size(); ++head)
      for (const int32_t p : a[layer][head])
        count += std::binary_search(b[layer][head].begin(), b[layer][head].end(), p);
  return count;
}

TEST(Mix, SharesMoreWithEachThanTheyShare) {
  const SeededModel m = seeded_model();
  const Kept mix = kept_of(m, options(m, Retention::kMix)),
             trained = kept_of(m, options(m, Retention::kLocret)),
             by_keys = kept_of(m, options(m, Retention::kKeyDiff));
  const size_t alike = shared(trained, by_keys);
  EXPECT_GT(shared(mix, trained), alike);
  EXPECT_GT(shared(mix, by_keys), alike);
}

TEST(Mix, IsForEachHeadAlone) {
  const SeededModel m = seeded_model();
  SessionOptions o = options(m, Retention::kMix);
  o.retain_scope = RetainScope::kLayer;
  const Status status = make_plan(*m.model, *cpu(), o).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("mix compares the keys of one head"), std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace thimble::test
