// given_score on every device: scores are copied bit by bit.
#include "tests/ops/kv_reference.h"

namespace thimble::test {
namespace {

class GivenScores : public OpTest {};
THIMBLE_OP_TESTS(GivenScores);

TEST_P(GivenScores, GoToEveryHeadsEntriesAndAfterThemOrToTheChunk) {
  for (const std::vector<uint32_t>& held : {std::vector<uint32_t>{0, 1, 63, 64, 700}, {5000, 5000}})
    for (const uint32_t rows : {0u, 1u, 33u, 300u})
      for (const bool chunk : {false, true}) {
        SCOPED_TRACE(::testing::Message() << rows << " rows" << (chunk ? " of a chunk" : ""));
        clear();
        Random random{rows + 1};
        const std::vector<HeadState> heads = unequal_heads(held, rows + 3);
        const uint32_t count = static_cast<uint32_t>(heads.size()), max_rows = rows + 2;
        const uint32_t longest = *std::max_element(held.begin(), held.end()) + rows;
        std::vector<float> scores = random.floats(longest);
        scores[longest / 2] = std::numeric_limits<float>::quiet_NaN();
        std::vector<float> want = padded_rows(std::vector<float>(), layer_entries(heads) + 5),
                           want_chunk = padded_rows(std::vector<float>(), size_t{count} * max_rows);
        const View cis = inout(want), chunk_cis = inout(want_chunk);
        size_for(count, 1, 8, session_of(behind_other_rows(heads), max_rows));
        const GivenScore op{input(padded_rows(scores, longest + 7)),
                            cis,
                            chunk ? chunk_cis : View{},
                            {.heads = count, .chunk_capacity = max_rows, .head_state = kOtherRows}};
        run({.n_rows = rows}, behind_other_rows(heads), max_rows, [&](Recorder& r) { r.record(op); });
        for (uint32_t head = 0; head < count; ++head)
          for (uint32_t i = 0; i < held[head] + rows; ++i)
            (chunk && i >= held[head] ? want_chunk[size_t{head} * max_rows + i - held[head]]
                                      : want[heads[head].first + i]) = scores[i];
        const std::vector<float> got = get<float>(cis), got_chunk = get<float>(chunk_cis);
        EXPECT_EQ(std::memcmp(got.data(), want.data(), want.size() * sizeof(float)), 0);
        EXPECT_EQ(std::memcmp(got_chunk.data(), want_chunk.data(), want_chunk.size() * sizeof(float)), 0);
      }
}

}  // namespace
}  // namespace thimble::test
