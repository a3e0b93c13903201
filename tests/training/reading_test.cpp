// Tests the readings of training against a model in double precision.
#include "training/reading.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/data.h"
#include "tests/support/reference_model.h"
#include "tests/support/seeded_model.h"
#include "tests/support/sessions.h"
#include "tests/support/synthetic_model.h"

namespace thimble::test {
namespace {

// Reads the whole text and returns its states by layer.
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

// The text is longer than a chunk, and it does not end where a whole chunk would end.
TEST(Reading, GivesStatesAndLabelsOfTheModelItself) {
  using Case = std::pair<Retainer::Input, Seeded>;
  for (const auto& [input, seeded] : {Case{Retainer::Input::kQkv, {}}, Case{Retainer::Input::kX, {}},
                                      Case{Retainer::Input::kQkv, growing()}}) {
    SCOPED_TRACE(seeded.architecture);
    const SeededModel small = seeded_model(seeded);
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
          // The tolerance of expect_close(): a few roundings to halves through two layers.
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

// Compares labels with those of another implementation, tests/reference/labels.py. Both cache keys and values
// as halves, which may round differently if the value differs in f32 and f64: 2^-11 of a key's channel. A
// logit is a sum of head_dim such products, here below 8 in all, and a label is the difference of a logit and
// a mean of logits. The lengths of rows and values by which KVzip+ multiplies have the same relative error.
// After two layers, states differ by a few times as much: 2^-8 altogether, four times the observed error.
TEST(Reading, GivesTheLabelsOfKvzipAndKvzipPlus) {
  std::ifstream file(project_file("tests/reference/labels.json"));
  const auto cases = nlohmann::json::parse(file);
  ASSERT_EQ(cases.size(), 4u);
  for (const auto& c : cases) {
    const std::string name = c.at("model");
    SCOPED_TRACE(name + (c.at("weighed") ? ", weighed" : ""));
    const std::string path = project_file("tests/reference/" + name);
    const auto model = must(Model::open(must(MappedFile::open(path)), path));
    TrainingText text;
    c.at("text").get_to(text.tokens);
    for (const auto& t : c.at("tails"))
      text.tails.push_back({t.at("tokens"), t.at("marked"), t.at("sinks"), t.at("first"), t.at("end")});
    const auto tokens = static_cast<uint32_t>(text.tokens.size());
    auto reader = must(
        Reader::open(model, cpu(), Retainer::Input::kX, tokens, text.longest_tail(), 0, c.at("weighed")));
    read_all(*reader, text, model->shape.layers);
    const auto expected = c.at("labels").get<std::vector<float>>();
    size_t next = 0;
    for (uint32_t layer = 0; layer < model->shape.layers; ++layer)
      for (const float label : must(reader->labels(layer)).log_prob)
        ASSERT_NEAR(label, expected.at(next++), 0x1p-8) << "layer " << layer << ", label " << next;
    EXPECT_EQ(next, expected.size());
  }
}

// This also holds for a model with windows: the entries of a tail are removed from them before the next tail.
TEST(Reading, ForgetsATailBeforeTheNext) {
  for (const uint32_t window : {0u, 16u}) {
    const SeededModel small = seeded_model({.window = window});
    TrainingText text = text_of(600, 40);
    text.tails.push_back({seeded_tokens(530, 64, 5), std::vector<uint32_t>(530, 1), 4, 500, 600});
    text.tails[0].end = 500;
    TrainingText alone = text;
    alone.tails.erase(alone.tails.begin());
    auto reader = must(Reader::open(small.model, cpu(), Retainer::Input::kX, 600, 530, 0));
    read_all(*reader, text, 2);
    const std::vector<float> both = must(reader->labels(1)).log_prob;
    read_all(*reader, alone, 2);
    const std::vector<float> second = must(reader->labels(1)).log_prob;
    for (uint32_t head = 0; head < 2; ++head)
      for (uint32_t t = 0; t < 600; ++t) {
        const uint32_t i = head * 600 + t;
        EXPECT_EQ(second[i] == -30, t < 500);
        EXPECT_GT(both[i], -30);
        if (t >= 500) {
          EXPECT_EQ(both[i], second[i]);
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

// Layers of lfm2 without attention have a state. Each tail begins with the state at the end of the text, so a
// label for several tails is the largest of those for one.
TEST(Reading, BeginsEachTailWithTheStateOfTheText) {
  THIMBLE_NEEDS(shared_file("tools/synth_gguf.py"));
  const auto model = family_model("lfm2", "reading");
  const uint32_t layers = model->shape.layers;
  TrainingText first = text_of(300, 40);
  std::reverse(first.tails[0].tokens.begin(), first.tails[0].tokens.end());
  const TrainingText second = text_of(300, 1100);  // more than two chunks
  TrainingText both = first;
  both.tails.push_back(second.tails[0]);
  const auto open = [&] { return must(Reader::open(model, cpu(), Retainer::Input::kX, 300, 1100, 0)); };
  auto of_first = open(), of_second = open(), of_both = open();
  const auto states = read_all(*of_both, both, layers);
  read_all(*of_first, first, layers);
  read_all(*of_second, second, layers);
  for (uint32_t layer = 0; layer < layers; ++layer) {
    SCOPED_TRACE(layer);
    if (!model->layers[layer].attention()) {
      EXPECT_TRUE(states[layer].empty());
      continue;
    }
    EXPECT_EQ(states[layer].size(), 300u * of_both->state_cols());
    const auto a = must(of_first->labels(layer)).log_prob, b = must(of_second->labels(layer)).log_prob,
               got = must(of_both->labels(layer)).log_prob;
    ASSERT_EQ(got.size(), a.size());
    for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], std::max(a[i], b[i])) << i;
  }
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
