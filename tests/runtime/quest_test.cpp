// Tests Quest on whole sessions: pages and their bounds, the selected entries, and the times of selection.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/support/reference_model.h"
#include "tests/support/seeded_model.h"

namespace thimble::test {
namespace {

constexpr uint32_t kPage = 8, kPages = 4;

const SeededModel& model() {
  static const SeededModel m = seeded_model();
  return m;
}

SessionOptions quest(uint32_t dense_layers = 1) {
  return {.pool = 300,
          .chunk = 32,
          .max_new = 64,
          .selection = Selection::kQuest,
          .select_k = kPage * kPages,
          .select_page = kPage,
          .dense_layers = dense_layers};
}
SessionOptions over_window(SessionOptions o) {
  o.retention = Retention::kWindow;
  o.pool = 70;
  o.local = 20;
  return o;
}
SessionOptions over_heads(SessionOptions o) {
  o.retention = Retention::kLocret;
  o.retainer = model().retainer;
  o.keeps = {24, 61, 90, 33};
  o.local = 20;
  return o;
}

// Checks the bounds of every page of held entries, in every layer that has bounds: they must be exactly the
// smallest and the largest of the stored keys. The last page may be short.
void expect_bounds(Watched& w) {
  const ModelShape& shape = w->model().shape;
  std::vector<bool> seen(shape.layers);
  for (const PageBounds& op : w.device->pages) {
    const uint32_t layer = op.p.head_state / shape.kv_heads;
    if (seen[layer]) continue;
    seen[layer] = true;
    const auto halves = [&](const View& view) {
      std::vector<uint16_t> bits(view.bytes / 2);
      must(w.device->read(bits.data(), view));
      std::vector<float> values(bits.size());
      std::transform(bits.begin(), bits.end(), values.begin(), f16_to_f32);
      return values;
    };
    const std::vector<float> keys = halves(op.k.values), bounds = halves(op.bounds);
    const uint32_t dh = shape.head_dim;
    for (uint32_t head = 0; head < shape.kv_heads; ++head) {
      const uint32_t first = w->runs()[op.p.head_state + head].first;
      const uint32_t entries = must(w->kept_count(layer, head));
      for (uint32_t begin = 0; begin < entries; begin += kPage)
        for (uint32_t c = 0; c < dh; ++c) {
          float smallest = INFINITY, largest = -INFINITY;
          for (uint32_t i = begin; i < std::min(begin + kPage, entries); ++i) {
            smallest = std::min(smallest, keys[(first + i) * dh + c]);
            largest = std::max(largest, keys[(first + i) * dh + c]);
          }
          const float* page = &bounds[(first / kPage + head + begin / kPage) * 2 * dh];
          ASSERT_EQ(page[c], smallest) << "layer " << layer << " head " << head << " entry " << begin;
          ASSERT_EQ(page[dh + c], largest) << "layer " << layer << " head " << head << " entry " << begin;
        }
    }
  }
}

// Checks the list of the last token in layer 1: whole pages in ascending order, the open page, and the other
// pages with the largest upper bounds for the query heads together.
void expect_choice(Followed& f, const Kept& before) {
  const ModelShape& shape = f->model().shape;
  const auto lists = f.lists()[1];
  ASSERT_EQ(lists.size(), shape.kv_heads);
  const auto own = static_cast<int32_t>(must(f->stats()).position - 1);
  for (uint32_t head = 0; head < shape.kv_heads; ++head) {
    std::vector<int32_t> positions = before[1][head];
    positions.push_back(own);
    const auto n = static_cast<uint32_t>(positions.size());
    const std::vector<uint32_t>& list = lists[head];
    const uint32_t pages = (n + kPage - 1) / kPage;
    if (pages <= kPages) {
      ASSERT_EQ(list.size(), n);
      continue;
    }
    ASSERT_TRUE(std::adjacent_find(list.begin(), list.end(), std::greater_equal<>()) == list.end());
    ASSERT_EQ(list.back(), n - 1);
    ASSERT_EQ(list.size(), (kPages - 1) * kPage + (n - (pages - 1) * kPage));
    std::vector<bool> picked(pages);
    for (size_t i = 0; i < list.size(); ++i) {
      ASSERT_EQ(list[i] % kPage, i % kPage);  // whole pages; only the last may be short
      picked[list[i] / kPage] = true;
    }
    ASSERT_TRUE(picked[pages - 1]);

    std::vector<double> votes(pages - 1);
    const uint32_t group = shape.heads / shape.kv_heads;
    for (uint32_t q = head * group; q < (head + 1) * group; ++q) {
      std::vector<double> scores(pages - 1);
      const auto query = f.reference.query(1, q);
      for (uint32_t page = 0; page < pages - 1; ++page)
        for (uint32_t c = 0; c < shape.head_dim; ++c) {
          double most = -INFINITY;  // the upper bound of the channel's product
          for (uint32_t i = page * kPage; i < (page + 1) * kPage; ++i)
            most = std::max(most, query[c] * f.reference.key(1, head, positions[i])[c]);
          scores[page] += most / std::sqrt(double(shape.head_dim));
        }
      const double top = *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      for (const double s : scores) sum += std::exp(s - top);
      for (uint32_t page = 0; page < pages - 1; ++page) votes[page] += std::exp(scores[page] - top) / sum;
    }
    std::vector<double> sorted = votes;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    const double threshold = sorted[kPages - 2];
    // A key may differ from the reference's by a rounding step of f16, 2^-11. Scores of 8 channels are below
    // 16, so a vote is off by at most 2^-6 of itself if all steps add up.
    for (uint32_t page = 0; page < pages - 1; ++page) {
      if (picked[page])
        EXPECT_GE(votes[page], threshold * (1 - 0x1p-6)) << "page " << page;
      else
        EXPECT_LE(votes[page], threshold * (1 + 0x1p-6)) << "page " << page;
    }
  }
}

TEST(Quest, EqualsDenseAttentionIfThePagesCoverTheText) {
  const std::vector<int32_t> text = seeded_tokens(150);
  SessionOptions dense{.pool = 300, .chunk = 32, .max_new = 64, .positions = Positions::kOriginal};
  const auto reference = open_session(model().model, dense);
  SessionOptions o = quest(0);
  o.select_k = 200;
  const auto session = open_session(model().model, o);
  expect_close(read(*session, text), read(*reference, text));
  for (int32_t i = 0; i < 40; ++i) expect_close(accept(*session, i), accept(*reference, i));
  EXPECT_EQ(must(session->stats()).selected, 190u);
}

TEST(Quest, PicksThePagesThatPromiseMost) {
  using Case = std::pair<SeededModel, SessionOptions>;
  for (const auto& [m, o] : {Case{model(), quest()}, Case{model(), over_window(quest())},
                             Case{model(), over_heads(quest())}, Case{seeded_model(growing()), quest()}}) {
    SCOPED_TRACE(m.model->info.architecture + ", " + policy_name(o.retention));
    Followed f(m.model, o);
    f.read(seeded_tokens(20));
    for (const size_t n : {0u, 150u}) {
      if (n) f.read(seeded_tokens(n, 64, 8));
      for (const int32_t token : seeded_tokens(50, 64, 9)) {
        Kept before;  // an eviction may happen in between
        f.on_submit = [&](const Program&, const StepParams& step, std::span<const HeadState>) {
          if (step.n_rows == 1) before = kept(*f);
        };
        f.accept(token);
        f.on_submit = nullptr;
        expect_choice(f, before);
        if (HasFailure()) return;
      }
    }
  }
}

// Invariant 30: the bounds hold for all ways in which entries were written.
TEST(Quest, BoundsAreThoseOfTheStoredKeys) {
  for (const SessionOptions& o : {quest(0), over_window(quest(0)), over_heads(quest(0))}) {
    SCOPED_TRACE(policy_name(o.retention));
    Watched w(model().model, o);
    const auto check = [&] {
      expect_bounds(w);
      return !HasFailure();
    };
    read(*w, seeded_tokens(3));
    ASSERT_TRUE(check());
    for (const int32_t token : seeded_tokens(30, 64, 8)) {  // one by one
      accept(*w, token);
      ASSERT_TRUE(check());
    }
    for (const size_t n : {61u, 1u, 33u}) {  // in bulk, after an open page
      read(*w, seeded_tokens(n, 64, 9));
      ASSERT_TRUE(check());
    }
    for (int32_t i = 0; i < 11; ++i) accept(*w, i);
    must(w->rewind(must(w->stats()).position - 11));  // into an earlier page
    accept(*w, 60);
    ASSERT_TRUE(check());
    for (int32_t i = 0; i < 20; ++i) accept(*w, i);
    must(w->rewind(must(w->stats()).position - 17));
    read(*w, seeded_tokens(5, 64, 10));
    ASSERT_TRUE(check());
    for (int32_t i = 0; i < (o.retention == Retention::kNone ? 40 : 120); ++i) {  // until after evictions
      accept(*w, i % 64);
      ASSERT_TRUE(check());
    }
  }
}

TEST(Quest, TheFirstLayersAreDense) {
  for (const uint32_t dense_layers : {0u, 1u, 2u, 7u}) {
    const SeededModel m = seeded_model({.layers = 3});
    Watched w(m.model, quest(dense_layers));
    for (uint32_t layer = 0; layer < 3; ++layer) {
      const bool chooses = std::any_of(w.device->selections.begin(), w.device->selections.end(),
                                       [&](const TopK& op) { return op.p.head_state == layer * 2; });
      EXPECT_EQ(chooses, layer >= dense_layers) << layer;
    }
  }
  EXPECT_EQ(must(resolve(*model().model, {.selection = Selection::kQuest})).dense_layers, 2u);
}

TEST(Quest, IsAtOriginalPositionsAndReadsDensely) {
  const SessionOptions o = must(resolve(*model().model, {.selection = Selection::kQuest}));
  EXPECT_EQ(o.positions, Positions::kOriginal);
  EXPECT_EQ(o.select_prefill, 0u);
  EXPECT_EQ(o.select_page, 16u);
  EXPECT_EQ(o.select_k, 2048u);
  EXPECT_EQ(o.context, 4096u);
}

TEST(Quest, RefusesWhatContradictsIt) {
  const auto refused = [](const char* part, auto change) {
    SessionOptions o = quest();
    change(o);
    const Status status = Session::create(model().model, cpu(), o).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.message();
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  };
  refused("reads densely", [](SessionOptions& o) { o.select_prefill = 1; });
  refused("two pages", [](SessionOptions& o) { o.select_k = 2 * kPage - 1; });
  refused("two pages", [](SessionOptions& o) { o.select_page = 3 * kPage; });
  refused("the largest is", [](SessionOptions& o) {
    o.select_page = 1u << 29;
    o.select_k = 1u << 30;
  });
}

// If heads share a pool, their runs move as a text grows, also while tokens are generated.
TEST(Quest, BoundsArePlacedAnewWhenRunsMove) {
  const SeededModel m = seeded_model({.shares = {0.25f, 0.25f, 2.9f, 0.6f}});
  SessionOptions o = over_heads(quest(0));
  o.retainer = m.retainer;
  o.keeps.clear();
  o.pool = 150;
  Watched w(m.model, o);
  read(*w, seeded_tokens(155));
  uint32_t moved = 0;
  for (int32_t i = 0; i < 900 && moved < 2; ++i) {
    const uint32_t before = w->state().division;
    accept(*w, i % 64);
    if (w->state().division == before) continue;
    ++moved;
    expect_bounds(w);
  }
  EXPECT_EQ(moved, 2u);
}

}  // namespace
}  // namespace thimble::test
