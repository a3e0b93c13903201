// Tests the controller of ADORE against another implementation and finite differences, and the labels that it
// learns.
#include "training/controller.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/data.h"
#include "tests/support/random.h"
#include "tests/support/seeded_model.h"
#include "tests/support/sessions.h"
#include "training/controller_labels.h"
#include "training/controller_trainer.h"
#include "training/reading.h"

namespace thimble::test {
namespace {

nlohmann::json reference() {  // tests/reference/controller.py
  std::ifstream file(project_file("tests/reference/controller.json"));
  return nlohmann::json::parse(file);
}

std::vector<LabelledQuery> queries_of(const nlohmann::json& list) {
  std::vector<LabelledQuery> queries;
  for (const auto& q : list) queries.push_back({q.at("position"), q.at("best")});
  return queries;
}

// The small controller of the reference, and the text that it reads.
template <typename T>
struct Small {
  const nlohmann::json given = reference().at("controller");
  const std::vector<T> embeddings = given.at("embeddings");
  const std::vector<uint32_t> rows = given.at("rows");
  const std::vector<LabelledQuery> queries = queries_of(given.at("queries"));
  const ControllerShape shape{4, 3};
  ThreadPool threads{2};
  ControllerNetwork<T> controller{shape, embeddings, threads};

  Small() {
    for (const ControllerTensor& tensor : tensors_of(shape)) {
      const std::vector<T> values = given.at("parameters").at(tensor.name);
      EXPECT_EQ(values.size(), tensor.size()) << tensor.name;
      std::copy(values.begin(), values.end(), controller.parameters().begin() + ptrdiff_t(tensor.first));
    }
  }
  Excerpt excerpt(uint32_t first, uint32_t warm, uint32_t end) const {
    return {.rows = std::span(rows).subspan(first, end - first),
            .first = first,
            .warm = warm,
            .queries = queries};
  }
};

// f32 rounds about ten times per channel, for values near 1, and sums three: 2^-19 of the logits, which are
// below 2.
template <typename T>
void expect_scores_of_reference(double tolerance) {
  Small<T> small;
  const auto scores = small.controller.score(small.rows, small.queries);
  ASSERT_EQ(scores.size(), small.queries.size());
  for (size_t q = 0; q < scores.size(); ++q) {
    const std::vector<double> expected = small.given.at("queries")[q].at("logits");
    ASSERT_EQ(scores[q].size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(scores[q][i], expected[i], tolerance);
  }
  std::vector<T> gradient(small.controller.parameters().size());
  const Excerpt whole = small.excerpt(0, 0, 9);
  const double loss = small.given.at("loss");
  EXPECT_NEAR(small.controller.loss({&whole, 1}, gradient), loss, tolerance);
}
TEST(Controller, ScoresAsTheReference) {
  expect_scores_of_reference<double>(1e-14);
  expect_scores_of_reference<float>(0x1p-18);
}

// Steps of 1e-5 give errors of 1e-10 times the third derivative, and of 1e-16 / 1e-5 by rounding. Tokens
// before an excerpt's own tokens get no gradient, so only the parameters after the state are compared there.
TEST(Controller, GradientsAreFiniteDifferences) {
  Small<double> small;
  for (const uint32_t warm : {0u, 2u}) {
    const Excerpt excerpts[] = {small.excerpt(0, warm, 9), small.excerpt(2, warm, 6)};
    std::vector<double> gradient(small.controller.parameters().size()), unused(gradient.size());
    small.controller.loss(excerpts, gradient);
    const ControllerTensors tensors = tensors_of(small.shape);
    for (uint32_t t = warm ? kPositionWeight : kWeightIh; t < kControllerParts; ++t) {
      double largest = 0;
      for (uint64_t i = tensors[t].first; i < tensors[t].first + tensors[t].size(); ++i) {
        constexpr double kStep = 1e-5;
        double& p = small.controller.parameters()[i];
        const double before = p;
        p = before + kStep;
        const double above = small.controller.loss(excerpts, unused);
        p = before - kStep;
        const double below = small.controller.loss(excerpts, unused);
        p = before;
        EXPECT_NEAR(gradient[i], (above - below) / (2 * kStep), 1e-9) << tensors[t].name << ", " << i;
        largest = std::max(largest, std::fabs(gradient[i]));
      }
      EXPECT_GT(largest, 1e-4) << tensors[t].name;
    }
  }
}

// The loss of an excerpt covers only its own tokens, starting from the state after the tokens before them.
TEST(Controller, IsWarmedUp) {
  Small<double> small;
  std::vector<double> gradient(small.controller.parameters().size());
  const Excerpt excerpt = small.excerpt(0, 4, 6);
  const double loss = small.controller.loss({&excerpt, 1}, gradient);
  const auto scores = small.controller.score(small.rows, small.queries);
  double sum = 0, pairs = 0;
  for (size_t q = 0; q < scores.size(); ++q)
    for (uint32_t i = 4; i < std::min(6u, small.queries[q].position); ++i) {
      const auto& best = small.queries[q].best;
      const bool label = std::find(best.begin(), best.end(), i) != best.end();
      sum += std::log(1 + std::exp(label ? -scores[q][i] : scores[q][i]));
      ++pairs;
    }
  EXPECT_EQ(pairs, 4);
  EXPECT_NEAR(loss, sum / pairs, 1e-14);
}

TEST(Controller, IsTheSameForAnyNumberOfThreads) {
  constexpr uint32_t kRows = 30, kTokens = 200;
  const ControllerShape shape{20, 16};
  Random random{7};
  const std::vector<float> embeddings = random.floats(kRows * shape.inputs),
                           parameters = random.floats(parameters_of(shape));
  std::vector<uint32_t> rows(kTokens);
  for (uint32_t& row : rows) row = static_cast<uint32_t>(random.next() % kRows);
  const std::vector<LabelledQuery> queries = {{60, {2, 5, 50}}, {190, {1, 2, 188}}};
  std::vector<std::vector<float>> gradients;
  for (const uint32_t count : {1u, 3u}) {
    ThreadPool threads(count);
    ControllerNetwork<float> controller(shape, embeddings, threads);
    std::copy(parameters.begin(), parameters.end(), controller.parameters().begin());
    std::vector<Excerpt> excerpts;
    for (uint32_t first = 0; first < 160; first += 20)
      excerpts.push_back(
          {.rows = std::span(rows).subspan(first, 30), .first = first, .warm = 10, .queries = queries});
    controller.loss(excerpts, gradients.emplace_back(parameters.size()));
  }
  EXPECT_EQ(gradients[0], gradients[1]);
}

TEST(AttentionLabels, AreThoseOfTheReference) {
  const auto given = reference();
  const uint32_t best = given.at("best");
  ASSERT_EQ(given.at("labels").size(), 3u);
  for (const auto& c : given.at("labels")) {
    const std::string name = c.at("model"), path = project_file("tests/reference/" + name);
    SCOPED_TRACE(name);
    const auto model = must(Model::open(must(MappedFile::open(path)), path));
    TrainingText text;
    c.at("text").get_to(text.tokens);
    const auto tokens = static_cast<uint32_t>(text.tokens.size());
    const std::vector<LabelledQuery> expected = queries_of(c.at("queries"));
    std::vector<uint32_t> asked;
    for (const LabelledQuery& query : expected) asked.push_back(query.position);
    auto reader = must(Reader::open(model, cpu(), Retainer::Input::kQkv, tokens, 0, 0));
    ThreadPool threads(2);
    AttentionLabels labels(*model, tokens, best, threads);
    reader->begin(text);
    labels.begin(asked);
    while (must(reader->step([&](uint32_t layer, uint32_t first, uint32_t rows, const float* qkv) {
      labels.add(layer, first, rows, qkv);
    }))) {
    }
    const std::vector<LabelledQuery> found = labels.labels();
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(found[i].position, expected[i].position);
      EXPECT_EQ(found[i].best, expected[i].best);
    }
  }
}

// If all keys are zero, every entry gets equal attention, so the last entries are taken, also among the
// tokens that no head chose. Rows come in two parts, and one of the queries is in each.
TEST(AttentionLabels, PreferTheLaterOfEquals) {
  const SeededModel small = seeded_model();
  const ModelShape& shape = small.model->shape;
  const uint32_t cols = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
  const std::vector<float> zeros(size_t(20) * cols);
  ThreadPool threads(1);
  AttentionLabels labels(*small.model, 40, 4, threads);
  labels.begin({10, 30});
  for (uint32_t first = 0; first < 40; first += 20)
    for (uint32_t layer = 0; layer < shape.layers; ++layer) labels.add(layer, first, 20, zeros.data());
  const std::vector<LabelledQuery> found = labels.labels();
  EXPECT_EQ(found[0].best, (std::vector<uint32_t>{7, 8, 9, 10}));
  EXPECT_EQ(found[1].best, (std::vector<uint32_t>{27, 28, 29, 30}));
}

// 100 tokens, of which 96 are chosen. The tokens with label 1 are 0 and 1, which have the smallest logits,
// 50, and 99; and the query itself, which does not count.
TEST(ControllerQuality, CountsWhatIsChosen) {
  std::vector<float> logits(100, -1);
  logits[0] = logits[1] = -2;
  logits[50] = logits[60] = 3;
  ControllerQuality q;
  q.add({100, {0, 1, 50, 99, 100}}, logits);
  EXPECT_EQ(q.base_rate(), 0.04);
  EXPECT_EQ(q.accuracy(), 0.96);         // all but 0, 1, 99 and 60
  EXPECT_EQ(q.f1(), 2 * 1.0 / (2 + 4));  // 50 of {50, 60}
  // 50 and 99: among equal logits, the later tokens are chosen.
  EXPECT_EQ(q.f1_of_best(), 2 * 2.0 / (96 + 4));
  EXPECT_EQ(q.f1_of_last(), 2 * 2.0 / (96 + 4));  // the same, without 0 to 3
  // The cost of a logit whose label is 0.
  const auto cost = [](double x) { return std::log(1 + std::exp(x)); };
  EXPECT_EQ(q.pairs, 100u);
  EXPECT_NEAR(q.loss, 95 * cost(-1) + cost(1) + 2 * cost(2) + cost(3) + cost(-3), 1e-12 * q.loss);
}

}  // namespace
}  // namespace thimble::test
