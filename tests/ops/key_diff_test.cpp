// key_diff on every device, compared with its definition in double.
#include <cmath>

#include "tests/ops/kv_reference.h"

namespace thimble::test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class KeyDiffs : public OpTest {
 protected:
  // The keys of every head [entry][dh]: those that it holds, followed by those of the chunk's rows.
  using Keys = std::vector<std::vector<uint16_t>>;

  // The scores of a head, and their error bounds. A unit key is off by (dh / 2 + 8) 2^-24 of itself: half of
  // the error of a sum of dh squares, a root and a division. Sums of n keys are made in blocks of 256, so
  // their error is less than e = (dh / 2 + 8 + 256 + n / 256) 2^-24 times the total length n of the summands,
  // and rotates the sum by e n / |sum|. A dot product and two lengths are added to that, each of dh terms.
  struct Scores {
    std::vector<double> score;
    double tolerance = 0;
  };
  static Scores expected(const std::vector<uint16_t>& keys, uint32_t dh) {
    const size_t n = keys.size() / dh;
    std::vector<double> sum(dh);
    for (size_t i = 0; i < n; ++i) {
      const std::vector<double> key = doubles(keys, i * dh, dh);
      const double length = std::sqrt(dot(key, key));
      if (!(length > 0)) continue;
      for (uint32_t c = 0; c < dh; ++c) sum[c] += key[c] / length;
    }
    Scores s;
    const double of_sum = std::sqrt(dot(sum, sum));
    for (size_t i = 0; i < n; ++i) {
      const std::vector<double> key = doubles(keys, i * dh, dh);
      const double lengths = of_sum * std::sqrt(dot(key, key));
      s.score.push_back(lengths == 0 ? -1 : -dot(key, sum) / lengths);
    }
    const double count = static_cast<double>(n);
    s.tolerance =
        of_sum == 0 ? 0 : ((dh / 2.0 + 8 + 256 + count / 256) * count / of_sum + 2.0 * dh + 8) * 0x1p-24;
    return s;
  }

  void expect_scores(const Keys& keys, uint32_t dh, uint32_t rows, bool chunk) {
    clear();
    std::vector<uint32_t> held;
    for (const auto& k : keys) held.push_back(static_cast<uint32_t>(k.size() / dh) - rows);
    const std::vector<HeadState> heads = unequal_heads(held, 2);
    const uint32_t count = static_cast<uint32_t>(heads.size()), max_rows = rows + 2;
    const size_t entries = layer_entries(heads);
    const uint32_t blocks = units(*std::max_element(held.begin(), held.end()) + rows, kKeyDiffBlock) + 1;
    std::vector<uint16_t> k = padded_rows(std::vector<uint16_t>(), entries * dh), chunk_k;
    for (uint32_t head = 0; head < count; ++head) {
      const auto first_row = keys[head].end() - ptrdiff_t{rows} * dh;
      std::copy(keys[head].begin(), first_row, k.begin() + ptrdiff_t{heads[head].first} * dh);
      chunk_k.insert(chunk_k.end(), first_row, keys[head].end());
      chunk_k = padded_rows(chunk_k, size_t{head + 1} * max_rows * dh);
    }
    size_for(count, 1, dh, session_of(behind_other_rows(heads), max_rows));
    const View cis = output<float>(entries), chunk_cis = output<float>(size_t{count} * max_rows);
    const KeyDiff op{{input(k)},
                     {chunk ? input(chunk_k) : View{}},
                     output<float>(size_t{count} * blocks * dh),
                     cis,
                     chunk ? chunk_cis : View{},
                     {.heads = count,
                      .head_dim = dh,
                      .chunk_capacity = max_rows,
                      .head_state = kOtherRows,
                      .blocks = blocks}};
    const auto program = record(max_rows, [&](Recorder& r) { r.record(op); });
    ASSERT_TRUE(program);
    run(*program, {.n_rows = rows}, behind_other_rows(heads));
    const std::vector<float> got = get<float>(cis), of_chunk = get<float>(chunk_cis);
    size_t used = 0;
    for (uint32_t head = 0; head < count; ++head) {
      SCOPED_TRACE(::testing::Message() << "head " << head);
      const Scores want = expected(keys[head], dh);
      EXPECT_TRUE(is_poison(got, used, heads[head].first - used));
      used = heads[head].first + held[head];
      for (uint32_t i = 0; i < held[head] + rows; ++i) {
        const float score =
            i < held[head] ? got[heads[head].first + i] : of_chunk[size_t{head} * max_rows + i - held[head]];
        if (std::isnan(want.score[i]))
          EXPECT_TRUE(std::isnan(score)) << i;
        else
          EXPECT_NEAR(score, want.score[i], want.tolerance) << i;
      }
      EXPECT_TRUE(is_poison(of_chunk, size_t{head} * max_rows + rows, max_rows - rows));
    }
    EXPECT_TRUE(is_poison(got, used, entries - used));
    run(*program, {.n_rows = rows}, behind_other_rows(heads));  // sums are made in the same order
    const std::vector<float> again = get<float>(cis);
    EXPECT_EQ(std::memcmp(again.data(), got.data(), got.size() * sizeof(float)), 0);
  }
};
THIMBLE_OP_TESTS(KeyDiffs);

// Like real keys, these have something in common: each is its head's mean plus a random part of the same
// size.
TEST_P(KeyDiffs, AreTheCosinesWithTheMeanOfTheUnitKeys) {
  for (const uint32_t dh : {8u, 64u, 80u, 128u, 256u, 512u, 576u})
    for (const uint32_t rows : {0u, 1u, 33u, 300u})
      for (const bool chunk : {false, true}) {
        if ((rows && !chunk) || !takes_heads_of(dh)) continue;
        SCOPED_TRACE(::testing::Message()
                     << "dh " << dh << ", " << rows << " rows" << (chunk ? "" : ", alone"));
        Random random{dh + rows};
        Keys keys;
        for (const uint32_t n : {0u, 1u, 255u, 256u, 257u, 700u}) {
          const std::vector<float> middle = random.floats(dh, -1, 1);
          std::vector<float> k = random.floats(size_t{n + rows} * dh, -1, 1);
          for (size_t i = 0; i < k.size(); ++i)
            k[i] = (k[i] + middle[i % dh]) * (1 + static_cast<float>(i / dh % 7));
          keys.push_back(halves(k));
        }
        expect_scores(keys, dh, rows, chunk);
      }
}

TEST_P(KeyDiffs, IgnoreKeysWithoutADirection) {
  constexpr uint32_t kDim = 64, kRows = 3;
  Random random;
  Keys keys;
  for (uint32_t head = 0; head < 2; ++head) keys.push_back(halves(random.floats(40 * kDim, 0.5f, 1)));
  for (const uint32_t entry : {0u, 17u, 38u}) std::fill_n(&keys[0][entry * kDim], kDim, uint16_t{0});
  for (const uint32_t entry : {5u, 39u}) keys[0][entry * kDim + 7] = f32_to_f16(kNaN);
  std::fill(keys[1].begin(), keys[1].end(), uint16_t{0});  // a head without a mean
  expect_scores(keys, kDim, kRows, true);
}

}  // namespace
}  // namespace thimble::test
