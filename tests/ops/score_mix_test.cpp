// score_mix on every device, against its definition in double.
#include <cmath>

#include "tests/ops/kv_reference.h"

namespace thimble::test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(),
                kInfinity = std::numeric_limits<float>::infinity();

// A head's scores before an eviction: those of its entries, then those of the step's rows.
struct Head {
  std::vector<float> scores, mixed;
  uint32_t keep, protect_first, protect_last;
};

class ScoreMixes : public OpTest {
 protected:
  // z of a score, and its largest error. With (x - mean) / sd: a thread adds n / 128 values or fewer, then
  // sums of 128 threads are added in three steps of 8 or fewer. So the mean errs by e = (n / 128 + 16) 2^-24
  // of the largest |x|, and moves z by that over sd. The deviation errs by 2 e relatively, and by (e / sd)^2
  // through the mean. Four more roundings follow.
  struct Standard {
    double mean = 0, sd = 0, most = 0;
    double n = 0;
    double of(double x) const { return sd > 0 ? (x - mean) / sd : 0 * x; }
    double tolerance(double x) const {
      if (!(sd > 0)) return 0;
      const double e = (n / 128 + 16) * 0x1p-24, off = e * most / sd;
      return off + (2 * e + off * off + 4 * 0x1p-24) * std::fabs(of(x));
    }
  };
  static Standard standard(const std::vector<float>& x, uint32_t begin, uint32_t end) {
    Standard s;
    for (uint32_t i = begin; i < end; ++i)
      if (std::isfinite(x[i]))
        s.mean += double{x[i]}, ++s.n, s.most = std::max(s.most, std::fabs(double{x[i]}));
    s.mean /= std::max(s.n, 1.0);
    for (uint32_t i = begin; i < end; ++i)
      if (std::isfinite(x[i])) s.sd += (x[i] - s.mean) * (x[i] - s.mean);
    s.sd = std::sqrt(s.sd / std::max(s.n, 1.0));
    return s;
  }

  void expect_mixed(const std::vector<Head>& all, uint32_t rows) {
    clear();
    std::vector<uint32_t> held;
    for (const Head& h : all) held.push_back(static_cast<uint32_t>(h.scores.size()) - rows);
    std::vector<HeadState> heads = unequal_heads(held, 2);
    const uint32_t count = static_cast<uint32_t>(heads.size()), max_rows = rows + 2;
    const size_t entries = layer_entries(heads);
    for (uint32_t i = 0; i < count; ++i) {
      heads[i].keep = all[i].keep;
      heads[i].protect_first = all[i].protect_first;
      heads[i].protect_last = all[i].protect_last;
    }
    // The arrays of the pool and of the chunk.
    const auto laid_out = [&](std::vector<float> Head::*of) {
      std::vector<float> pool = padded_rows(std::vector<float>(), entries), chunk;
      for (uint32_t i = 0; i < count; ++i) {
        const std::vector<float>& x = all[i].*of;
        const auto first_row = x.end() - ptrdiff_t{rows};
        std::copy(x.begin(), first_row, pool.begin() + ptrdiff_t{heads[i].first});
        chunk.insert(chunk.end(), first_row, x.end());
        chunk = padded_rows(chunk, size_t{i + 1} * max_rows);
      }
      return std::pair(pool, chunk);
    };
    const auto [scores, chunk_scores] = laid_out(&Head::scores);
    const auto [before, chunk_before] = laid_out(&Head::mixed);
    size_for(count, 1, 64, session_of(behind_other_rows(heads), max_rows));
    const View mixed = inout(before), chunk_mixed = inout(chunk_before);
    const ScoreMix op{input(scores),
                      rows ? input(chunk_scores) : View{},
                      mixed,
                      rows ? chunk_mixed : View{},
                      {.heads = count, .chunk_capacity = max_rows, .head_state = kOtherRows}};
    const auto program = record(max_rows, [&](Recorder& r) { r.record(op); });
    ASSERT_TRUE(program);
    run(*program, {.n_rows = rows}, behind_other_rows(heads));
    std::vector<float> want = before, chunk_want = chunk_before;
    const std::vector<float> got = get<float>(mixed), of_chunk = get<float>(chunk_mixed);
    for (uint32_t i = 0; i < count; ++i) {
      SCOPED_TRACE(::testing::Message() << "head " << i);
      const Head& h = all[i];
      if (h.keep >= h.scores.size()) continue;
      const Regions r = kept_regions(heads[i], held[i] + rows);
      const Standard a = standard(h.scores, r.begin, r.end), b = standard(h.mixed, r.begin, r.end);
      for (uint32_t e = r.begin; e < r.end; ++e) {
        const bool pooled = e < held[i];
        const size_t at = pooled ? heads[i].first + e : size_t{i} * max_rows + e - held[i];
        const double exact = a.of(double{h.scores[e]}) + b.of(double{h.mixed[e]});
        const float value = (pooled ? got : of_chunk)[at];
        (pooled ? want : chunk_want)[at] = value;
        if (std::isnan(exact))
          EXPECT_TRUE(std::isnan(value)) << e;
        else if (std::isinf(exact))
          EXPECT_EQ(double{value}, exact) << e;
        else
          EXPECT_NEAR(value, exact, a.tolerance(double{h.scores[e]}) + b.tolerance(double{h.mixed[e]})) << e;
      }
    }
    // Nothing else is changed.
    EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)), 0);
    EXPECT_EQ(std::memcmp(of_chunk.data(), chunk_want.data(), of_chunk.size() * sizeof(float)), 0);
  }

  static Head random_head(Random& random, uint32_t entries, uint32_t keep, uint32_t first, uint32_t last) {
    Head h{random.floats(entries, -9, 1), random.floats(entries, -1, -0.5f), keep, first, last};
    if (entries > 20) h.scores[20] = 40;  // an outlier
    return h;
  }
};
THIMBLE_OP_TESTS(ScoreMixes);

TEST_P(ScoreMixes, AddWhatIsLeftOfMeansInUnitsOfDeviations) {
  for (const uint32_t rows : {0u, 1u, 33u, 300u}) {
    SCOPED_TRACE(::testing::Message() << rows << " rows");
    Random random{rows};
    std::vector<Head> heads;
    for (const uint32_t n : {1u, 127u, 128u, 129u, 1023u, 1024u, 1025u, 3000u})
      heads.push_back(random_head(random, n + rows, (n + rows) / 2, n / 16, n / 8));
    heads.push_back(random_head(random, 50 + rows, 50 + rows, 4, 8));  // all stay
    heads.push_back(random_head(random, 50 + rows, 10, 4, 20));        // more is protected than stays
    expect_mixed(heads, rows);
  }
}

TEST_P(ScoreMixes, PassOverWhatIsNotFiniteOrAllTheSame) {
  Random random;
  std::vector<Head> heads;
  for (int i = 0; i < 4; ++i) heads.push_back(random_head(random, 60, 30, 4, 8));
  heads[0].scores[10] = kNaN;
  heads[0].scores[59] = kNaN;
  heads[0].scores[11] = -kInfinity;
  heads[0].scores[12] = kInfinity;
  heads[0].mixed[13] = kNaN;
  std::fill(heads[1].scores.begin(), heads[1].scores.end(), 2.5f);
  std::fill(heads[2].mixed.begin(), heads[2].mixed.end(), -1.0f);
  std::fill(heads[3].scores.begin(), heads[3].scores.end(), kNaN);
  expect_mixed(heads, 3);
}

}  // namespace
}  // namespace thimble::test
