// scatter_add on every device: sums for a slice of the text's positions, bit by bit equal to those of a plain
// loop.
#include "tests/ops/kv_reference.h"

namespace thimble::test {
namespace {

// One layer: the entries that its heads hold of a text.
struct Layer {
  std::vector<uint32_t> held;
  uint32_t text = 0;
  std::vector<uint32_t> listed = {};  // how many entries are listed, per head; empty: no lists
  uint32_t window = 0;
  bool weights = true;
};

class ScatterAdds : public OpTest {
 protected:
  // Sums for positions [first, first + slots): computed from zero, then added to once more.
  void check(const Layer& l, uint32_t first, uint32_t slots) {
    SCOPED_TRACE(::testing::Message()
                 << slots << " positions from " << first << " of " << l.text << ", " << l.held.size()
                 << " heads, window " << l.window << (l.listed.empty() ? "" : ", lists")
                 << (l.weights ? "" : ", no weights"));
    clear();
    Random random{first + slots + l.text};
    const std::vector<HeadState> heads = unequal_heads(l.held, 2);
    const uint32_t count = static_cast<uint32_t>(heads.size()), entries = layer_entries(heads) + 5;
    // Entries that belong to no head have positions in the slice, and are NaN.
    std::vector<int32_t> pos(entries, static_cast<int32_t>(first));
    std::vector<float> weights = padded_rows(std::vector<float>(), entries);
    std::vector<std::vector<uint32_t>> listed;
    for (uint32_t head = 0; head < count; ++head) {
      const std::vector<uint32_t> own = some_entries(random, l.text, l.held[head], 0);
      std::copy(own.begin(), own.end(), pos.begin() + heads[head].first);
      const std::vector<float> given = random.floats(l.held[head], 0, 1);
      std::copy(given.begin(), given.end(), weights.begin() + heads[head].first);
      if (!l.listed.empty()) listed.push_back(some_entries(random, l.held[head], l.listed[head], 0));
    }
    const uint32_t capacity = l.listed.empty() ? 0 : 2 + *std::max_element(l.listed.begin(), l.listed.end());

    std::vector<float> once(slots), twice;
    const auto add = [&](std::vector<float>& sums) {
      for (uint32_t head = 0; head < count; ++head) {
        const uint32_t n = listed.empty() ? l.held[head] : static_cast<uint32_t>(listed[head].size());
        for (uint32_t i = l.window && n > l.window ? n - l.window : 0; i < n; ++i) {
          const uint32_t entry = listed.empty() ? i : listed[head][i];
          const int64_t slot = int64_t{pos[heads[head].first + entry]} - first;
          if (slot >= 0 && slot < slots)
            sums[static_cast<size_t>(slot)] += l.weights ? weights[heads[head].first + i] : 1;
        }
      }
    };
    add(once);
    add(twice = once);

    size_for(count, 1, 8, session_of(behind_other_rows(heads), 4));
    const View sums = output<float>(slots);
    ScatterAdd op{input(pos),
                  l.weights ? input(weights) : View{},
                  capacity ? input(lists(listed, capacity)) : View{},
                  sums,
                  {.heads = count,
                   .head_state = kOtherRows,
                   .slots = slots,
                   .window = l.window,
                   .list_capacity = capacity}};
    const StepParams step{.position = static_cast<int32_t>(first)};
    const auto expect = [&](const std::vector<float>& want) {
      run(step, behind_other_rows(heads), 1, [&](Recorder& r) { r.record(op); });
      const std::vector<float> got = get<float>(sums);
      for (uint32_t i = 0; i < slots; ++i)
        ASSERT_EQ(std::memcmp(&got[i], &want[i], sizeof(float)), 0)
            << got[i] << " is not " << want[i] << ", position " << first + i;
    };
    expect(once);
    op.p.add = 1;
    expect(twice);
  }
};
THIMBLE_OP_TESTS(ScatterAdds);

TEST_P(ScatterAdds, SumEachPositionOverItsHeads) {
  const std::vector<uint32_t> held{700, 0, 1, 63, 64, 3000, 129, 128, 2999, 33};  // more than 8 heads
  for (const bool weights : {true, false})
    for (const uint32_t window : {0u, 1u, 100u})
      for (const bool listed : {false, true}) {
        Layer l{held, 3000, {}, window, weights};
        if (listed)
          for (const uint32_t n : held) l.listed.push_back(n == 63 ? 0 : (n + 1) / 2);
        for (const auto& [first, slots] : std::vector<std::pair<uint32_t, uint32_t>>{
                 {0, 3000}, {0, 1}, {2999, 1}, {1, 255}, {777, 1025}, {2048, 4096}, {3000, 70}}) {
          check(l, first, slots);
          if (HasFatalFailure()) return;
        }
      }
}

TEST_P(ScatterAdds, SupportOneHeadAndMany) {
  for (const uint32_t count : {1u, 8u, 9u, 33u, 70u}) {
    check({std::vector<uint32_t>(count, 40), 60}, 7, 50);
    if (HasFatalFailure()) return;
  }
}

// Far into a text of which few entries are held.
TEST_P(ScatterAdds, FindEntriesInADistantSlice) {
  for (const uint32_t first : {0u, 65536u, 99990u, 32768u * 3}) {
    check({{5000, 20000, 1}, 100000}, first, 32768);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace thimble::test
