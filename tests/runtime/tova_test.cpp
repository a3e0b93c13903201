// Tests TOVA on whole sessions: the kept entries are those that the last query attends to in a model in
// double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>

#include "tests/support/judged.h"

namespace thimble::test {
namespace {

SessionOptions tova(Positions positions) {
  return {.retention = Retention::kTova,
          .pool = 60,
          .chunk = 40,
          .stabilizers = 12,
          .local = 20,
          .protect_init = 2,
          .max_new = 50,
          .positions = positions};
}

class JudgedByTheLastQuery : public Judged {
 public:
  JudgedByTheLastQuery(const SeededModel& m, const SessionOptions& options) : Judged(m, options) {
    f.on_token = [this](int32_t position) {
      for (uint32_t layer = 0; layer < f->model().shape.layers; ++layer)
        queries_[{layer, position}] = f.reference.queries(layer);
    };
  }

 private:
  // The mean weights of all query heads. The session's keys may differ from the reference's by one unit of
  // f16, 2^-10. This moves a logit by 2^-10 of the product of lengths, and its weight and the sum of all
  // weights by the same, relative to themselves. The queries of a model that read such keys differ likewise.
  Scores scores(uint32_t layer, uint32_t, const std::vector<int32_t>& there) override {
    const ModelShape& s = f->model().shape;
    Scores all{.score = std::vector<double>(there.size())};
    double moved = 0;
    for (uint32_t h = 0; h < s.heads; ++h) {
      const uint32_t head = h / (s.heads / s.kv_heads);
      const double* q = queries_.at({layer, there.back()}).data() + uint64_t(h) * s.head_dim;
      std::vector<double> weights = f.reference.logits(layer, head, q, there);
      for (double& weight : weights) weight = std::exp(weight);
      const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
      for (size_t i = 0; i < there.size(); ++i) all.score[i] += weights[i] / sum / s.heads;
      moved = std::max(moved, largest_logit(layer, head, q, there));
    }
    all.tolerance = 4 * 2 * 0x1p-10 * moved * *std::max_element(all.score.begin(), all.score.end() - 1);
    all.score.back() = std::numeric_limits<double>::infinity();
    return all;
  }

  std::map<std::pair<uint32_t, int32_t>, std::vector<double>> queries_;  // queries by layer and position
};

TEST(Tova, KeepsWhatTheLastQueryAttendsTo) {
  Seeded blunt = growing();  // with less distinctive keys, the growth of queries matters more
  blunt.edit = [](const std::string& name, std::vector<float>& values) {
    if (name.ends_with("attn_q.weight"))
      for (float& v : values) v *= 0.4f;
  };
  for (const SeededModel& m : {seeded_model(), seeded_model(blunt)})
    for (const Positions positions : {Positions::kList, Positions::kOriginal}) {
      SCOPED_TRACE(m.model->info.architecture + (positions == Positions::kList ? ", list" : ", original"));
      JudgedByTheLastQuery s(m, tova(positions));
      // For generated tokens, the query of the last one decides when an eviction is needed.
      s.read_and_generate();
      EXPECT_GE(s.judged, 10u);
      EXPECT_GE(s.of_generated, 2u);
      if (::testing::Test::HasFailure()) return;
    }
}

TEST(Tova, KeepsTheSameEntriesInAllHeadsOfALayer) {
  const auto session = open_session(seeded_model().model, tova(Positions::kList));
  read(*session, seeded_tokens(300));
  const Kept sets = kept(*session);
  for (const auto& layer : sets) {
    ASSERT_EQ(layer.size(), 2u);
    EXPECT_EQ(layer[0], layer[1]);
  }
  EXPECT_NE(sets[0], sets[1]);
  EXPECT_EQ(session->plan().options.retain_scope, RetainScope::kLayer);
}

TEST(Tova, RefusesHeadsOfDifferentSizes) {
  SessionOptions o = tova(Positions::kList);
  o.keeps = {24, 40, 150, 60};
  const Status status = make_plan(*seeded_model().model, *cpu(), o).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("tova keeps the same entries in all heads"), std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace thimble::test
