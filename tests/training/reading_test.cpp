// A reading of training against a model in double precision.
#include "training/reading.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/support/reference_model.h"
#include "tests/support/seeded_model.h"
#include "tests/support/sessions.h"

namespace thimble::test {
namespace {

// Reads all of it; states by layer.
std::vector<std::vector<float>> read_all(Reader& reader, const TrainingText& text, uint32_t layers) {
  std::vector<std::vector<float>> states(layers);
  reader.begin(text);
  while (must(reader.step([&](uint32_t layer, uint32_t first, uint32_t rows, const float* data) {
    EXPECT_EQ(first, states[layer].size() / reader.state_cols());
    states[layer].insert(states[layer].end(), data, data + size_t(rows) * reader.state_cols());
  }))) {
  }
  return states;
}

TrainingText text_of(uint32_t tokens, uint32_t tail) {
  TrainingText text;
  text.tokens = seeded_tokens(tokens);
  Tail& behind = text.tails.emplace_back();
  behind.end = tokens;
  for (const int32_t token : seeded_tokens(tail, 64, 11)) behind.add({token}, behind.tokens.size() % 3 == 2);
  return text;
}

// The text is longer than a chunk, and its end is none of the borders that a whole chunk would have.
TEST(Reading, GivesStatesAndLabelsOfTheModelItself) {
  for (const Retainer::Input input : {Retainer::Input::kQkv, Retainer::Input::kX}) {
    const SeededModel small = seeded_model();
    const ModelShape& shape = small.model->shape;
    const TrainingText text = text_of(600, 40);
    const Tail& tail = text.tails[0];
    auto reader = must(Reader::open(small.model, cpu(), input, 700, 50, 0));
    const auto states = read_all(*reader, text, shape.layers);

    ReferenceModel reference(*small.model, Positions::kOriginal);
    std::vector<int32_t> all = text.tokens;
    all.insert(all.end(), tail.tokens.begin(), tail.tokens.end());
    const uint32_t group = shape.heads / shape.kv_heads;
    const auto tokens = static_cast<uint32_t>(text.tokens.size());
    std::vector<std::vector<double>> max_logit(shape.layers), log_prob(shape.layers);
    for (auto* labels : {&max_logit, &log_prob})
      for (auto& layer : *labels) layer.assign(size_t(shape.kv_heads) * tokens, -30);
    for (uint32_t p = 0; p < all.size(); ++p) {
      reference.append(all[p], p, [&](uint32_t, uint32_t) {
        std::vector<int32_t> seen(p);
        std::iota(seen.begin(), seen.end(), 0);
        return seen;
      });
      for (uint32_t layer = 0; layer < shape.layers; ++layer) {
        if (p < tokens) {
          const auto& expected =
              input == Retainer::Input::kQkv ? reference.projections(layer) : reference.input(layer);
          ASSERT_EQ(reader->state_cols(), expected.size());
          // As expect_close() has it: a few roundings to halves through two layers.
          double scale = 0;
          for (const double x : expected) scale = std::max(scale, std::fabs(x));
          for (size_t c = 0; c < expected.size(); ++c)
            ASSERT_NEAR(states[layer][p * expected.size() + c], expected[c], scale * 0x1p-9);
          continue;
        }
        if (!tail.marked[p - tokens]) continue;
        for (uint32_t h = 0; h < shape.heads; ++h) {
          const uint32_t head = h / group;
          std::vector<double> logits;
          double sum = 0;
          for (uint32_t t = 0; t <= p; ++t) {
            const auto key = reference.key(layer, head, static_cast<int32_t>(t));
            const auto query = reference.query(layer, h);
            logits.push_back(std::inner_product(key.begin(), key.end(), query.begin(), 0.0) /
                             std::sqrt(double(shape.head_dim)));
            sum += std::exp(logits.back());
          }
          for (uint32_t t = 0; t < tokens; ++t) {
            double& logit = max_logit[layer][head * tokens + t];
            double& log = log_prob[layer][head * tokens + t];
            logit = std::max(logit, logits[t]);
            log = std::max(log, logits[t] - std::log(sum));
          }
        }
      }
    }
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      const Reader::Labels labels = must(reader->labels(layer));
      ASSERT_EQ(labels.max_logit.size(), max_logit[layer].size());
      double scale = 0;
      for (const double x : max_logit[layer]) scale = std::max(scale, std::fabs(x));
      for (size_t i = 0; i < max_logit[layer].size(); ++i) {
        ASSERT_NEAR(labels.max_logit[i], max_logit[layer][i], scale * 0x1p-8)
            << "layer " << layer << ", " << i;
        ASSERT_NEAR(labels.log_prob[i], log_prob[layer][i], scale * 0x1p-7) << "layer " << layer << ", " << i;
      }
    }
  }
}

TEST(Reading, OfOneTextLeavesNothingToTheNext) {
  const SeededModel small = seeded_model();
  const TrainingText first = text_of(600, 40), second = text_of(300, 9);
  auto used = must(Reader::open(small.model, cpu(), Retainer::Input::kX, 600, 40, 0));
  auto fresh = must(Reader::open(small.model, cpu(), Retainer::Input::kX, 600, 40, 0));
  read_all(*used, first, 2);
  EXPECT_EQ(read_all(*used, second, 2), read_all(*fresh, second, 2));
  EXPECT_EQ(must(used->labels(1)).log_prob, must(fresh->labels(1)).log_prob);
}

TEST(Reading, PassesOverLayersWithAWindow) {
  const SeededModel small = seeded_model({.window = 16});
  auto reader = must(Reader::open(small.model, cpu(), Retainer::Input::kQkv, 600, 40, 0));
  const auto states = read_all(*reader, text_of(600, 40), 2);
  EXPECT_TRUE(states[0].empty());
  EXPECT_EQ(states[1].size(), 600u * reader->state_cols());
}

TEST(Reading, IsRefusedWithWhatIsMissing) {
  const SeededModel small = seeded_model();
  const auto fits = must(Reader::open(small.model, cpu(), Retainer::Input::kX, 600, 40, 0));
  const auto refused = Reader::open(small.model, cpu(), Retainer::Input::kX, 600, 40, fits->bytes() - 5000);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kBudget);
  EXPECT_EQ(refused.status().bytes_missing(), 5000u);
}

}  // namespace
}  // namespace thimble::test
