// Tests what is held and what was attended to, by position. The expected values come from the heads' own
// positions, and from a model in double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "tests/support/device_test_name.h"
#include "tests/support/reference_model.h"
#include "tests/support/seeded_model.h"

namespace thimble::test {
namespace {

constexpr uint32_t kLocal = 20, kWindow = 24;

const SeededModel& plain() {
  static const SeededModel m = seeded_model();
  return m;
}
const SeededModel& windowed() {  // layers 0 and 2 have a window
  static const SeededModel m = seeded_model({.layers = 4, .window = kWindow});
  return m;
}

const SeededModel& grown() {
  static const SeededModel m = seeded_model(growing());
  return m;
}
std::string in_words(const SeededModel* m) {
  return m == &windowed() ? ", windows" : m == &grown() ? ", growing queries" : "";
}

struct Case {
  std::string name;
  SessionOptions options;
};

// Every retention with every selection, with heads that keep different numbers of entries if the retention
// allows it.
std::vector<Case> cases(const SeededModel& m) {
  std::vector<Case> all;
  for (const Retention retention :
       {Retention::kNone, Retention::kWindow, Retention::kRandom, Retention::kLocret, Retention::kKeyDiff,
        Retention::kTova, Retention::kReread, Retention::kMix})
    for (const Selection selection : {Selection::kDense, Selection::kTokenSelect, Selection::kQuest}) {
      const bool none = retention == Retention::kNone;
      SessionOptions o{.retainer = m.retainer,
                       .retention = retention,
                       .pool = none ? 400u : 60u,
                       .chunk = 32,
                       .stabilizers = 10,
                       .local = kLocal,
                       .max_new = 40,
                       .selection = selection,
                       .select_k = 32,
                       .select_init = 2,
                       .select_local = 12,
                       .select_page = 8,
                       .dense_layers = 1,
                       .watch = true};
      if (!none && retention != Retention::kTova && m.model->shape.layers == 2) o.keeps = {24, 61, 90, 33};
      all.push_back({std::string(policy_name(retention)) + " and " + policy_name(selection), o});
    }
  // A retention that evicts, with dense attention and with lists.
  for (const size_t i : {size_t{3}, size_t{4}}) {
    all.push_back(all[i]);
    all.back().name += ", original positions";
    all.back().options.positions = Positions::kOriginal;
  }
  return all;
}

struct Held {
  std::vector<float> kept, attended;
};
Held ask(Session& session, bool attention = true) {
  Held h;
  const uint64_t read = must(session.positions_read());
  h.kept.resize(read);
  h.attended.resize(read);
  must(session.kept_by_position(h.kept.data(), attention ? h.attended.data() : nullptr));
  return h;
}

void expect_kept(const Session& session, const std::vector<float>& shares) {
  const Kept sets = kept(session);
  std::vector<uint32_t> count(shares.size());
  uint32_t heads = 0;
  for (size_t layer = 0; layer < sets.size(); ++layer)
    if (!session.model().layers[layer].attention()->window)
      for (const auto& head : sets[layer]) {
        ++heads;
        for (const int32_t position : head) ++count.at(static_cast<size_t>(position));
      }
  for (size_t i = 0; i < shares.size(); ++i)
    ASSERT_EQ(shares[i], static_cast<float>(count[i]) / static_cast<float>(heads)) << i;
}

// The session's keys may differ from the reference's by one unit of f16, 2^-10. This moves a logit by 2^-10
// of the product of lengths, and a weight and the sum of all weights by the same, relative to themselves. The
// queries of a later layer differ likewise, because they depend on entries read with such keys.
void expect_attended(const Followed& f, const std::vector<float>& attended) {
  const std::vector<double>& expected = f.reference.attended();
  ASSERT_EQ(attended.size(), expected.size());
  const double share = 2 * 2 * 0x1p-10 * f.reference.most_moved();
  for (size_t i = 0; i < attended.size(); ++i)
    ASSERT_NEAR(attended[i], expected[i], share * expected[i] + 0x1p-40) << i;
  EXPECT_NEAR(std::accumulate(attended.begin(), attended.end(), 0.0), 1,
              0x1p-24 * static_cast<double>(attended.size()));
}

void expect_held(Followed& f) {
  const Held h = ask(*f);
  expect_kept(*f, h.kept);
  expect_attended(f, h.attended);
}

TEST(KeptByPosition, IsWhatTheReferenceSays) {
  for (const SeededModel* m : {&plain(), &windowed(), &grown()})
    for (const auto& [name, options] : cases(*m)) {
      SCOPED_TRACE(name + in_words(m));
      Followed f(m->model, options);
      f.read(seeded_tokens(150));
      expect_held(f);
      for (int32_t i = 0; i < 50; ++i) {  // until after an eviction
        f.accept(i % 64);
        expect_held(f);
        if (HasFailure()) return;
      }
      f.read(seeded_tokens(30, 64, 8));
      expect_held(f);
      if (HasFailure()) return;
    }
}

// Products of generated tokens are f32 on every device, so the tolerance of the reference holds.
class KeptOnDevice : public ::testing::TestWithParam<std::string> {};

TEST_P(KeptOnDevice, IsWhatTheReferenceSays) {
  const auto device = must(open_device(GetParam(), {.threads = 1}));
  uint32_t turn = 0;
  for (const SeededModel* m : {&plain(), &windowed(), &grown()})
    for (const auto& [name, options] : cases(*m)) {
      // Each kind of list, with and without eviction, with heads of different sizes, and with both kinds of
      // positions. A software driver runs each of the eight cases on one of the models.
      if (options.retention != Retention::kWindow && options.retention != Retention::kNone) continue;
      if (turn++ % 3 != 1 && device->info().software) continue;
      SCOPED_TRACE(name + in_words(m));
      SessionOptions o = options;
      o.local = 0;
      o.select_prefill = 0;
      Followed f(m->model, o, device);
      f.read(seeded_tokens(1));
      for (int32_t i = 0; i < 105; ++i) {  // 100 tokens fit
        f.accept(i * 7 % 64);
        if (i % 25 < 2) expect_held(f);
        if (HasFailure()) return;
      }
    }
}

std::vector<std::string> device_names() {
  std::vector<std::string> names;
  for (const DeviceInfo& info : list_devices())
    if (info.usable) names.push_back(info.name);
  return names;
}
INSTANTIATE_TEST_SUITE_P(On, KeptOnDevice, ::testing::ValuesIn(device_names()), device_test_name);

// On a device with its own memory, the host reads copies.
TEST(KeptByPosition, IsTheSameIfTheHostReadsCopies) {
  for (const auto& [name, options] : cases(plain())) {
    SCOPED_TRACE(name);
    const auto copies = std::make_shared<SpyDevice>(cpu());
    copies->discrete = true;
    const auto one = open_session(plain().model, options),
               other = open_session(plain().model, options, copies);
    for (Session* s : {one.get(), other.get()}) {
      read(*s, seeded_tokens(150));
      accept(*s, 3);
    }
    const Held a = ask(*one), b = ask(*other);
    EXPECT_EQ(a.kept, b.kept);
    EXPECT_EQ(a.attended, b.attended);
  }
}

// A text longer than two slices, whose first tokens are held in addition to its last ones, compared with the
// weights themselves.
TEST(KeptByPosition, ServesTextsLongerThanASlice) {
  SessionOptions o = cases(plain())[3].options;  // a window
  o.pool = 2000;
  o.keeps = {500, 3001, 2900, 1599};
  o.chunk = 1024;
  Watched w(plain().model, o);
  const std::vector<int32_t> text = seeded_tokens(2 * kPositionsAtOnce);
  read(*w, text);
  accept(*w, 1);
  const Held h = ask(*w);
  ASSERT_EQ(h.kept.size(), text.size() + 1);
  expect_kept(*w, h.kept);
  EXPECT_GT(h.kept[0], 0);
  EXPECT_EQ(h.kept.back(), 1);
  std::vector<float> expected(h.attended.size());
  const Kept sets = kept(*w);
  const std::vector<HeadRun>& runs = w->runs();
  for (size_t layer = 0; layer < sets.size(); ++layer) {
    const View& all = w.device->watches[layer].cis;
    std::vector<float> weights(all.bytes / sizeof(float));
    must(w.device->read(weights.data(), all));
    for (size_t head = 0; head < sets[layer].size(); ++head)
      for (size_t i = 0; i < sets[layer][head].size(); ++i)
        expected[static_cast<size_t>(sets[layer][head][i])] +=
            weights[runs[layer * sets[layer].size() + head].first + i];
  }
  const double sum = std::accumulate(expected.begin(), expected.end(), 0.0);
  for (float& share : expected) share = static_cast<float>(share / sum);
  EXPECT_EQ(h.attended, expected);
}

TEST(KeptByPosition, ChangesNoBitOfAnAnswer) {
  for (const SeededModel* m : {&plain(), &windowed()})
    for (const auto& [name, options] : cases(*m)) {
      SCOPED_TRACE(name);
      SessionOptions unwatched = options;
      unwatched.watch = false;
      const auto one = open_session(m->model, options), other = open_session(m->model, unwatched);
      const auto expect_same = [](const std::vector<float>& a, const std::vector<float>& b) {
        ASSERT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0);
      };
      expect_same(read(*one, seeded_tokens(150)), read(*other, seeded_tokens(150)));
      for (int32_t i = 0; i < 45; ++i) {
        ask(*one);
        expect_same(accept(*one, i), accept(*other, i));
      }
      ask(*one);
      expect_same(read(*one, seeded_tokens(40, 64, 8)), read(*other, seeded_tokens(40, 64, 8)));
      EXPECT_EQ(ask(*one, false).kept, ask(*other, false).kept);
      EXPECT_EQ(must(one->stats()).selected, must(other->stats()).selected);
      EXPECT_EQ(must(one->stats()).cache_hits, must(other->stats()).cache_hits);
    }
}

TEST(KeptByPosition, IsAskedOfASessionThatWatches) {
  SessionOptions o = cases(plain())[0].options;
  o.watch = false;
  const auto session = open_session(plain().model, o);
  read(*session, seeded_tokens(10));
  std::vector<float> attended(10);
  const Status status = session->kept_by_position(nullptr, attended.data());
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("options.watch"), std::string::npos) << status.message();
  EXPECT_EQ(ask(*session, false).kept, std::vector<float>(10, 1));
}

TEST(KeptByPosition, SaysWhenTheLastTokensAttentionIsNotKnown) {
  const auto known = [](Session& session) {
    std::vector<float> attended(must(session.positions_read()) + 1);
    const Status status = session.kept_by_position(nullptr, attended.data());
    if (status.ok()) return true;
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find("not known"), std::string::npos) << status.message();
    return false;
  };
  SessionOptions o = cases(plain())[3].options;  // a window
  Followed f(plain().model, o);
  EXPECT_FALSE(known(*f));  // nothing was read
  f.feed(seeded_tokens(20));
  EXPECT_FALSE(known(*f));  // all tokens wait
  f.feed(seeded_tokens(180));
  EXPECT_FALSE(known(*f));  // the chunk lost entries
  f.read(seeded_tokens(1));
  expect_held(f);
  f.accept(1);
  f.accept(2);
  const Held before = ask(*f);
  const auto clone = must(f->clone());
  EXPECT_EQ(ask(*clone).attended, before.attended);
  f.rewind(203);  // its current position
  EXPECT_TRUE(known(*f));
  f.rewind(202);
  EXPECT_FALSE(known(*f));
  f.accept(2);
  EXPECT_EQ(ask(*f).attended, before.attended);
  must(f->reset());
  EXPECT_FALSE(known(*f));
  EXPECT_EQ(ask(*f, false).kept.size(), 0u);
  EXPECT_EQ(ask(*clone).attended, before.attended);
  o.local = 0;  // a prompt then ends with an eviction
  const auto session = open_session(plain().model, o);
  read(*session, seeded_tokens(150));
  EXPECT_FALSE(known(*session));
  accept(*session, 1);
  EXPECT_TRUE(known(*session));
}

TEST(KeptByPosition, IsNotKnownOfTokensThatEvictAsAdoresDo) {
  const SessionOptions o{
      .retainer = plain().controller, .retention = Retention::kAdore, .pool = 60, .chunk = 20, .watch = true};
  const auto session = open_session(plain().model, o);
  read(*session, seeded_tokens(50));
  for (uint64_t position = 51; position <= 70; ++position) {
    accept(*session, 3);
    std::vector<float> attended(position);
    ASSERT_EQ(session->kept_by_position(nullptr, attended.data()).ok(), position <= o.pool) << position;
    EXPECT_EQ(ask(*session, false).kept.size(), position);
  }
}

TEST(KeptByPosition, FinishesWhatWasInterrupted) {
  const SessionOptions o = cases(plain())[0].options;
  const std::vector<int32_t> text = seeded_tokens(100);
  const auto whole = open_session(plain().model, o), cut = open_session(plain().model, o);
  const std::vector<float> expected = read(*whole, text);
  cut->interrupt();
  EXPECT_EQ(cut->feed(text).code(), Code::kInterrupted);
  EXPECT_EQ(ask(*cut).kept, std::vector<float>(32, 1));  // the chunk in which it stopped
  EXPECT_EQ(read(*cut, text), expected);
  EXPECT_EQ(ask(*cut).attended, ask(*whole).attended);
}

}  // namespace
}  // namespace thimble::test
