// Tests ADORE (invariants 33 to 36): the kept and the rebuilt tokens are compared with a controller and a
// selection in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "tests/support/judged.h"
#include "tests/support/saved_sessions.h"

namespace thimble::test {
namespace {

constexpr uint32_t kFirst = 4, kLast = 16;  // number of first and last tokens that always stay

SessionOptions adore(const SeededModel& m, uint32_t pool, uint32_t rebuild = 0, uint32_t chunk = 20) {
  return {.retainer = m.controller,
          .retention = Retention::kAdore,
          .pool = pool,
          .chunk = chunk,
          .rebuild = rebuild};
}
SessionOptions dense(uint32_t pool = 400) { return {.pool = pool, .chunk = 20, .max_new = 32}; }

// The controller of methods 5.1, as PyTorch computes it, in double precision.
class Reference {
 public:
  Reference(const SeededModel& m, std::vector<int32_t> tokens) : c_(m.controller->controller) {
    const auto* table = reinterpret_cast<const float*>(m.model->token_embedding.data);
    std::vector<double> h(c_.width);
    for (const int32_t token : tokens) {
      const std::vector<double> x(table + token * c_.cols, table + (token + 1) * c_.cols);
      const auto row = [](const float* w, const float* b, uint32_t i, const std::vector<double>& v) {
        double sum = b[i];
        for (size_t j = 0; j < v.size(); ++j) sum += w[i * v.size() + j] * v[j];
        return sum;
      };
      std::vector<double> next(c_.width);
      for (uint32_t i = 0; i < c_.width; ++i) {
        const auto gate = [&](uint32_t g) { return row(c_.input, c_.input_bias, g * c_.width + i, x); };
        const auto past = [&](uint32_t g) {
          return row(c_.recurrent, c_.recurrent_bias, g * c_.width + i, h);
        };
        const double r = sigmoid(gate(0) + past(0)), u = sigmoid(gate(1) + past(1));
        next[i] = (1 - u) * std::tanh(gate(2) + r * past(2)) + u * h[i];
      }
      states_.push_back(h = next);
    }
  }

  // The score of token `at` when `now` is the last token; scores are recomputed at every 16th token.
  double score(uint32_t at, uint32_t now) const {
    const uint32_t then = now - now % 16;
    const double age = std::log2(1.0 + (then > at ? then - at : 0)) / 12;
    double sum = c_.output_bias[0];
    for (uint32_t i = 0; i < c_.width; ++i) {
      double mixed = c_.interaction_bias[i];
      for (uint32_t j = 0; j < c_.width; ++j)
        mixed += c_.interaction[i * c_.width + j] * (states_[at][j] + age * c_.age[j] + c_.age_bias[j]);
      sum += c_.output[i] * std::tanh(mixed);
    }
    return sigmoid(sum);
  }

 private:
  static double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
  const Controller& c_;
  std::vector<std::vector<double>> states_;
};

// The tolerance of the library's scores: its tanh is off by 1e-4 and its argument by 1 / 4096, and each
// counts with a weight of the output. The slope of a sigmoid is a quarter. Float sums of 32 and 16 terms add
// little.
double tolerance(const Controller& c) {
  double sum = 0;
  for (uint32_t i = 0; i < c.width; ++i) sum += std::abs(c.output[i]);
  return sum / 4 * (1e-4 + 1.0 / 4096 + 1e-5);
}

// Checks that `kept`, a subset of `candidates`, consists of the first and the last tokens and those with the
// highest scores. Scores that are almost equal may be exchanged.
void expect_best(const Reference& reference, const std::vector<int32_t>& candidates,
                 const std::vector<int32_t>& kept, uint32_t pool, uint32_t now, double tolerance) {
  ASSERT_EQ(kept.size(), std::min<size_t>(pool, candidates.size()));
  ASSERT_TRUE(std::is_sorted(kept.begin(), kept.end()));
  const std::set<int32_t> stays(kept.begin(), kept.end());
  std::vector<double> in, out;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const bool is_protected = i < kFirst || i + kLast >= candidates.size();
    const double score = reference.score(static_cast<uint32_t>(candidates[i]), now);
    if (is_protected)
      EXPECT_TRUE(stays.contains(candidates[i])) << candidates[i] << " after token " << now;
    else
      (stays.contains(candidates[i]) ? in : out).push_back(score);
  }
  EXPECT_EQ(in.size() + kFirst + kLast, pool) << "of these candidates and no others";
  if (!in.empty() && !out.empty()) {
    EXPECT_GE(*std::min_element(in.begin(), in.end()),
              *std::max_element(out.begin(), out.end()) - 2 * tolerance)
        << "after token " << now;
  }
}

TEST(Adore, EqualsDenseAttentionIfThePoolCoversTheText) {
  const SeededModel m = seeded_model();
  for (const uint32_t rebuild : {0u, 5u}) {
    const auto ours = open_session(m.model, adore(m, 300, rebuild)), all = open_session(m.model, dense());
    EXPECT_EQ(read(*ours, seeded_tokens(150)), read(*all, seeded_tokens(150)));
    for (const int32_t t : seeded_tokens(40, 64, 8)) ASSERT_EQ(accept(*ours, t), accept(*all, t));
  }
}

// At every step, all earlier tokens are in the pool or are rebuilt. So the rebuilt entries equal the original
// ones (invariant 34), and nothing is lost.
TEST(Adore, EqualsDenseAttentionIfPoolAndRebuiltTokensCoverTheText) {
  const Seeded models[] = {{.layers = 3, .kv_heads = 1},
                           {.layers = 3, .kv_heads = 2},
                           {.layers = 3, .kv_heads = 4},
                           growing({.layers = 3})};
  for (const Seeded& shape : models) {
    SCOPED_TRACE(::testing::Message() << shape.architecture << ", " << shape.kv_heads << " KV heads");
    const SeededModel m = seeded_model(shape);
    const auto ours = open_session(m.model, adore(m, 52, 32)), all = open_session(m.model, dense());
    const std::vector<int32_t> tokens = seeded_tokens(84);
    read(*ours, std::span(tokens).first(1));
    read(*all, std::span(tokens).first(1));
    for (size_t i = 1; i < tokens.size(); ++i) {
      SCOPED_TRACE(i);
      expect_close(accept(*ours, tokens[i]), accept(*all, tokens[i]));
    }
  }
}

// In the first layer, a rebuilt token has the same key and value as before, bit for bit (invariant 33),
// because they depend only on its embedding.
TEST(Adore, RebuildsExactlyInTheFirstLayer) {
  Seeded ageing;  // so that the order of scores changes
  ageing.edit = [](const std::string& name, std::vector<float>& values) {
    if (name == "adore.position.weight")
      for (float& v : values) v *= 6;
  };
  const SeededModel m = seeded_model(ageing);
  const auto ours = open_session(m.model, adore(m, 40, 12)), all = open_session(m.model, dense());
  const std::vector<int32_t> tokens = seeded_tokens(200);
  read(*ours, std::span(tokens).first(90));
  read(*all, tokens);
  std::set<int32_t> before;
  size_t rebuilt = 0;
  for (size_t i = 90; i < tokens.size(); ++i) {
    accept(*ours, tokens[i]);
    const std::vector<int32_t> held = kept(*ours)[0][0];
    const std::set<int32_t> now(held.begin(), held.end());
    for (const int32_t position : now)
      rebuilt += !before.empty() && position < int32_t(i) && !before.contains(position);
    before = now;
  }
  EXPECT_GT(rebuilt, 5u) << "tokens that came back";
  // The body of a file begins with the first head's keys and values.
  const SessionBytes saved = save(*ours), whole = save(*all);
  const SessionFile some = must(SessionFile::open(lend(saved), "ours")),
                    dense_file = must(SessionFile::open(lend(whole), "all"));
  const uint32_t row = m.model->shape.head_dim * 2;
  const std::vector<int32_t> positions = kept(*ours)[0][0];
  const auto at = [&](const SessionFile& file, size_t entries, size_t array, size_t entry) {
    return file.body.subspan((array * entries + entry) * row, row);
  };
  for (size_t array = 0; array < 2; ++array)
    for (size_t i = 0; i < positions.size(); ++i) {
      const auto got = at(some, positions.size(), array, i),
                 expected = at(dense_file, tokens.size(), array, size_t(positions[i]));
      EXPECT_TRUE(std::equal(got.begin(), got.end(), expected.begin())) << "position " << positions[i];
    }
}

// Checks what is kept of a prompt and of each step, which is the same in all layers and heads (invariant 35).
TEST(Adore, KeepsTheHighestScores) {
  constexpr uint32_t kPool = 50, kChunk = 20;
  const SeededModel m = seeded_model();
  const std::vector<int32_t> tokens = seeded_tokens(260);
  const Reference reference(m, tokens);
  const double close = tolerance(m.controller->controller);
  for (const uint32_t rebuild : {0u, 1u, 7u, 30u})
    for (const uint32_t every : {1u, 3u}) {
      SCOPED_TRACE(::testing::Message() << rebuild << " rebuilt every " << every);
      SessionOptions o = adore(m, kPool, rebuild, std::max(kChunk, rebuild + 1));
      o.rebuild_every = every;
      const auto session = open_session(m.model, o);
      std::vector<int32_t> held;
      const auto check = [&](std::vector<int32_t> candidates, uint32_t now) {
        const Kept all = kept(*session);
        for (const auto& layer : all)
          for (const auto& head : layer) ASSERT_EQ(head, all[0][0]);
        expect_best(reference, candidates, all[0][0], kPool, now, close);
        held = all[0][0];
      };
      for (int32_t first = 0; first < 120; first += int32_t(o.chunk)) {
        const int32_t end = std::min(first + int32_t(o.chunk), 120);
        must(session->feed(std::span(tokens).subspan(size_t(first), size_t(end - first))));
        must(session->flush());
        std::vector<int32_t> candidates = held;
        for (int32_t i = first; i < end; ++i) candidates.push_back(i);
        if (candidates.size() > kPool)
          check(candidates, uint32_t(end) - 1);
        else
          held = candidates;
      }
      for (int32_t i = 120; i < 260; ++i) {
        std::vector<int32_t> candidates = held;
        if (rebuild && uint32_t(i) % every == 0) {
          std::vector<std::pair<double, int32_t>> released;
          const std::set<int32_t> here(held.begin(), held.end());
          for (int32_t p = 0; p < i; ++p)
            if (!here.contains(p)) released.push_back({reference.score(uint32_t(p), uint32_t(i)), p});
          std::sort(released.rbegin(), released.rend());
          // If the last rebuilt token and the first token that is not rebuilt have almost equal scores,
          // either may be rebuilt.
          if (released.size() > rebuild &&
              released[rebuild - 1].first - released[rebuild].first < 2 * close) {
            accept(*session, tokens[size_t(i)]);
            held = kept(*session)[0][0];
            continue;
          }
          for (size_t r = 0; r < std::min<size_t>(rebuild, released.size()); ++r)
            candidates.push_back(released[r].second);
          std::sort(candidates.begin(), candidates.end());
        }
        candidates.push_back(i);
        accept(*session, tokens[size_t(i)]);
        check(candidates, uint32_t(i));
      }
      const SessionStats stats = must(session->stats());
      EXPECT_EQ(stats.entries, kPool);
      EXPECT_EQ(stats.position, 260u);
    }
}

// Scores depend only on the text, not on how calls divide it (invariant 36).
TEST(Adore, ReadsTheSameInAnyPieces) {
  const SeededModel m = seeded_model();
  const std::vector<int32_t> tokens = seeded_tokens(200);
  const auto whole = open_session(m.model, adore(m, 60, 3)), pieces = open_session(m.model, adore(m, 60, 3));
  const std::vector<float> logits = read(*whole, tokens);
  for (size_t at = 0; at < tokens.size();) {
    const size_t count = std::min<size_t>(1 + at % 37, tokens.size() - at);
    must(pieces->feed(std::span(tokens).subspan(at, count)));
    at += count;
  }
  EXPECT_EQ(flush(*pieces), logits);
  EXPECT_EQ(kept(*pieces), kept(*whole));
}

// Local tokens are read after a full pool, and the first generated token releases entries until the pool has
// its size.
TEST(Adore, ReadsLocalTokensAfterThePoolIsFull) {
  const SeededModel m = seeded_model();
  for (const uint32_t chunk : {16u, 64u}) {
    SessionOptions o = adore(m, 60, 9, chunk);
    o.local = 70;
    const auto session = open_session(m.model, o);
    read(*session, seeded_tokens(300));
    EXPECT_EQ(must(session->stats()).entries, 130u);
    for (int32_t t = 0; t < 30; ++t) accept(*session, t);
    EXPECT_EQ(must(session->stats()).entries, 60u);
    EXPECT_EQ(kept(*session)[1][1].back(), 329);
  }
}

// A session whose pool is made smaller continues like one created with that pool, and so does its clone.
TEST(Adore, GoesOnWithASmallerPool) {
  const SeededModel m = seeded_model();
  const auto session = open_session(m.model, adore(m, 100, 5));
  read(*session, seeded_tokens(159));
  must(session->shrink(40));
  const auto twin = must(session->clone()), smaller = open_session(m.model, adore(m, 40, 5));
  restore(*smaller, save(*session));
  for (int32_t t = 0; t < 40; ++t) {
    const std::vector<float> logits = accept(*session, t);
    ASSERT_EQ(accept(*twin, t), logits) << t;
    ASSERT_EQ(accept(*smaller, t), logits) << t;
  }
  EXPECT_EQ(kept(*twin), kept(*session));
  EXPECT_EQ(kept(*smaller), kept(*session));
}

// After a rewind before the pool is full, the controller continues from its state at that position.
TEST(Adore, GoesOnFromTheStateOfAnEarlierPosition) {
  const SeededModel m = seeded_model();
  const auto straight = open_session(m.model, adore(m, 60, 3)), back = open_session(m.model, adore(m, 60, 3));
  read(*straight, seeded_tokens(40));
  read(*back, seeded_tokens(40));
  for (const int32_t t : seeded_tokens(15, 64, 20)) accept(*back, t);
  must(back->rewind(40));
  for (const int32_t t : seeded_tokens(90, 64, 8)) ASSERT_EQ(accept(*back, t), accept(*straight, t));
  EXPECT_EQ(kept(*back), kept(*straight));
}

// score() attends and releases tokens as generating does.
TEST(Adore, ScoresATextAsIfItWereGenerated) {
  const SeededModel m = seeded_model();
  const auto session = open_session(m.model, adore(m, 60, 4)), steps = open_session(m.model, adore(m, 60, 4));
  const std::vector<int32_t> text = seeded_tokens(30, 64, 5);
  std::vector<float> logits = read(*steps, seeded_tokens(120)), log_probs(text.size());
  read(*session, seeded_tokens(120));
  must(session->score(text, log_probs));
  for (size_t i = 0; i < text.size(); ++i) {
    const float largest = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const float l : logits) sum += std::exp(double(l) - largest);
    EXPECT_NEAR(log_probs[i], logits[size_t(text[i])] - largest - std::log(sum), 1e-5);
    logits = accept(*steps, text[i]);
  }
  EXPECT_EQ(kept(*session), kept(*steps));
}

// A file in which heads hold different tokens would give lists with indices outside a head's entries.
TEST(Adore, TakesNoSavedStateWithUnequalHeads) {
  const SeededModel m = seeded_model();
  const auto session = open_session(m.model, adore(m, 60, 3)), other = open_session(m.model, adore(m, 60, 3));
  read(*session, seeded_tokens(120));
  const SessionBytes saved = save(*session);
  const std::vector<float> logits = accept(*session, 5);
  restore(*other, saved);
  EXPECT_EQ(accept(*other, 5), logits);
}

TEST(Adore, RefusesWhatItCannotDo) {
  const SeededModel m = seeded_model(), windowed = seeded_model({.layers = 3, .window = 25});
  const auto refusal = [](const SeededModel& on, SessionOptions o) {
    const auto session = Session::create(on.model, cpu(), o);
    return session.ok() ? std::string("accepted") : session.status().message();
  };
  const auto expect = [](const std::string& message, const char* part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  SessionOptions o = adore(m, 60);
  o.retainer = nullptr;
  expect(refusal(m, o), "needs the controller of this model");
  o.retainer = m.retainer;
  expect(refusal(m, o), "needs the controller of this model");
  o = adore(m, 60);
  o.retention = Retention::kLocret;
  expect(refusal(m, o), "needs the retainer of this model");
  expect(refusal(windowed, adore(windowed, 60)), "layers with a sliding window");
  for (const Selection selection : {Selection::kTokenSelect, Selection::kQuest}) {
    o = adore(m, 60);
    o.selection = selection;
    expect(refusal(m, o), "has nothing to select from");
  }
  o = adore(m, 60);
  o.positions = Positions::kOriginal;
  expect(refusal(m, o), "rotates them by their index in the list");
  o = adore(m, 60);
  o.keeps = {60, 60, 60, 60};
  expect(refusal(m, o), "leave out positions and pools of single heads");
  expect(refusal(m, adore(m, 27, 8)), "takes at least 28");
  expect(refusal(m, adore(m, 28, 8)), "accepted");
  expect(refusal(m, adore(m, 20)), "a pool of 20");
  expect(refusal(m, adore(m, 200, 64)), "at most 63");
  o = dense();
  o.rebuild = 3;
  expect(refusal(m, o), "none can be rebuilt");
  o = adore(m, 60);
  o.context = 100;
  const auto session = open_session(m.model, o);
  EXPECT_EQ(session->feed(seeded_tokens(101)).code(), Code::kContextFull);
}

}  // namespace
}  // namespace thimble::test
