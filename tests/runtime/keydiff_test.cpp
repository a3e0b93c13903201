// Tests KeyDiff on whole sessions: the kept entries must follow from the keys of a model in double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "tests/support/judged.h"

namespace thimble::test {
namespace {

SessionOptions keydiff(Positions positions) {
  return {.retention = Retention::kKeyDiff,
          .keeps = {24, 40, 150, 60},
          .chunk = 40,
          .stabilizers = 12,
          .local = 20,
          .protect_init = 2,
          .max_new = 50,
          .positions = positions};
}

// The session's keys may differ from the reference's by one unit of f16, 2^-10, which turns them by as much.
// Their mean turns by n / |sum| times that.
class JudgedByKeys : public Judged {
 public:
  using Judged::Judged;

 private:
  Scores scores(uint32_t layer, uint32_t head, const std::vector<int32_t>& there) override {
    std::vector<double> sum(f->model().shape.head_dim);
    Scores s;
    const auto length = [](const auto& x) {
      return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
    };
    for (const int32_t p : there) {
      const auto key = f.reference.key(layer, head, p);
      for (size_t c = 0; c < sum.size(); ++c) sum[c] += key[c] / length(key);
    }
    for (const int32_t p : there) {
      const auto key = f.reference.key(layer, head, p);
      s.score.push_back(-std::inner_product(key.begin(), key.end(), sum.begin(), 0.0) /
                        (length(key) * length(sum)));
    }
    s.tolerance = 2 * 0x1p-10 * (1 + static_cast<double>(there.size()) / length(sum));
    return s;
  }
};

TEST(KeyDiff, KeepsTheKeysThatAreLeastLikeTheMean) {
  const SeededModel m = seeded_model();
  for (const Positions positions : {Positions::kList, Positions::kOriginal}) {
    SCOPED_TRACE(positions == Positions::kList ? "list" : "original");
    JudgedByKeys s(m, keydiff(positions));
    s.read_and_generate();  // the scores of generated tokens are computed when an eviction needs them
    EXPECT_GE(s.judged, 10u);
    EXPECT_GE(s.of_generated, 2u);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(KeyDiff, IsForEachHeadAlone) {
  SessionOptions o = keydiff(Positions::kList);
  o.retain_scope = RetainScope::kLayer;
  const Status status = make_plan(*seeded_model().model, *cpu(), o).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("keydiff compares the keys of one head"), std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace thimble::test
