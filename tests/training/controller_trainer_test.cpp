// Tests the training of a controller, from texts to the sidecar file.
#include "training/controller_trainer.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/training/small_trainer.h"

namespace thimble::test {
namespace {

using Phase = TrainingProgress::Phase;

class ControllerTraining : public ::testing::Test {
 protected:
  TrainingOptions options(const std::string& output) const {
    TrainingOptions o;
    o.kind = Retainer::Kind::kAdore;
    o.data = {book};
    o.output = folder.file(output);
    o.texts = 3;
    o.steps = 4;
    o.text_tokens = 1024;
    return o;
  }
  std::unique_ptr<ControllerTrainer> open(const TrainingOptions& o,
                                          const std::shared_ptr<Device>& device = cpu()) const {
    return must(ControllerTrainer::create(small.model, device, o));
  }
  static void finish(ControllerTrainer& trainer) {
    while (must(trainer.step())) {
    }
  }
  // Returns the file that an uninterrupted training writes.
  std::string trained(const TrainingOptions& o, const std::shared_ptr<Device>& device = cpu()) const {
    finish(*open(o, device));
    return contents_of(o.output);
  }

  const Folder folder;
  const SeededModel small = seeded_model(bytes_model(true));
  const std::string book = folder.written("book", some_book());
};

TEST_F(ControllerTraining, WritesASidecarOfItsModel) {
  const TrainingOptions o = options("out");
  const std::unique_ptr<Training> trainer = must(open_training(small.model, cpu(), o));
  EXPECT_EQ(trainer->progress().phase, Phase::kReading);
  double first_loss = 0;
  while (must(trainer->step()))
    if (trainer->progress().phase == Phase::kFitting && trainer->progress().done == 1)
      first_loss = trainer->progress().loss;
  EXPECT_EQ(trainer->progress().phase, Phase::kDone);
  EXPECT_LT(trainer->progress().loss, 0.8 * first_loss);
  EXPECT_FALSE(std::filesystem::exists(o.output + ".partial"));

  const MappedFile file = must(MappedFile::open(o.output));
  const Gguf written = must(Gguf::parse(file, o.output));
  EXPECT_EQ(must(written.need_string("general.type")), "adapter");
  EXPECT_EQ(must(written.need_string("adapter.type")), "adore");
  EXPECT_EQ(must(written.need_string("general.architecture")), "llama");
  EXPECT_EQ(must(written.need_uint("adore.width")), 128u);
  EXPECT_EQ(must(written.need_uint("adore.top_k")), 96u);
  EXPECT_EQ(must(written.need_uint("adore.pool")), 384u);
  EXPECT_EQ(must(written.need_uint("adore.base.block_count")), small.model->shape.layers);
  EXPECT_EQ(must(written.need_uint("adore.base.fingerprint")), small.model->fingerprint());
  EXPECT_EQ(written.find("retainer.kind"), nullptr);
  // Sessions accept the file.
  const auto retainer = must(small.model->open_retainer(must(MappedFile::open(o.output)), o.output));
  EXPECT_EQ(retainer->kind, Retainer::Kind::kAdore);
  EXPECT_EQ(retainer->warning, "");
  const uint64_t d = small.model->shape.d_model;
  const std::vector<std::pair<const char*, std::vector<uint64_t>>> shapes = {
      {"adore.gru.weight_ih", {d, 384}},        {"adore.gru.bias_ih", {384}},
      {"adore.gru.weight_hh", {128, 384}},      {"adore.gru.bias_hh", {384}},
      {"adore.position.weight", {128}},         {"adore.position.bias", {128}},
      {"adore.interaction.weight", {128, 128}}, {"adore.interaction.bias", {128}},
      {"adore.output.weight", {128}},           {"adore.output.bias", {1}}};
  EXPECT_EQ(written.tensors().size(), shapes.size());
  for (const auto& [name, shape] : shapes) {
    const GgufTensor* tensor = written.tensor(name);
    ASSERT_NE(tensor, nullptr) << name;
    EXPECT_EQ(std::vector<uint64_t>(tensor->shape, tensor->shape + tensor->dims), shape) << name;
    EXPECT_EQ(static_cast<DType>(tensor->type), DType::kF32) << name;
    std::vector<float> values(tensor->bytes / sizeof(float));
    std::memcpy(values.data(), tensor->data, tensor->bytes);
    for (const float value : values) ASSERT_TRUE(std::isfinite(value)) << name;
  }
}

// Every query of the held-out text has 96 labels, one of which may be its own.
TEST_F(ControllerTraining, MeasuresOnHeldOutTexts) {
  const auto trainer = open(options("out"));
  finish(*trainer);
  const ControllerQuality& q = trainer->quality();
  EXPECT_EQ(trainer->best_step(), 4u);
  EXPECT_EQ(q.chosen, 32u * 96);
  EXPECT_LE(q.positives, 32u * 96);
  EXPECT_GE(q.positives, 32u * 95);
  EXPECT_GT(q.pairs, q.positives);
  EXPECT_LE(q.best_hits, q.positives);
  EXPECT_GT(q.best_hits, 0u);
  const std::string report = trainer->report();
  for (const char* key : {"\"kind\": \"adore\"", "\"queries\": 32", "\"base_rate\"", "\"accuracy\"", "\"f1\"",
                          "\"f1_of_best\"", "\"f1_of_last\"", "\"seconds\"", "\"verdict\""})
    EXPECT_NE(report.find(key), std::string::npos) << key << " in " << report;
}

TEST_F(ControllerTraining, GivesTheSameFileTwiceAndWithAnyNumberOfThreads) {
  const std::string first = trained(options("first"));
  EXPECT_FALSE(first.empty());
  TrainingOptions one = options("one");
  one.threads = 1;
  EXPECT_EQ(trained(one, must(open_device("cpu", {.threads = 1}))), first);
  TrainingOptions three = options("three");
  three.threads = 3;
  EXPECT_EQ(trained(three), first);
  TrainingOptions other = options("other");
  other.seed = 1;
  EXPECT_NE(trained(other), first);
}

// The training is stopped while it reads the second text, and again after two steps of the fit.
TEST_F(ControllerTraining, GoesOnAsIfItHadNotBeenStopped) {
  const std::string whole = trained(options("whole"));
  const TrainingOptions o = options("broken");
  {
    const auto trainer = open(o);
    while (trainer->progress().done < 2048) ASSERT_TRUE(must(trainer->step()));
    EXPECT_FALSE(trainer->resumed());
  }
  {
    const auto trainer = open(o);
    EXPECT_TRUE(trainer->resumed());
    EXPECT_GE(trainer->progress().done, 1024u);
    while (trainer->progress().phase != Phase::kFitting || trainer->progress().done < 2)
      ASSERT_TRUE(must(trainer->step()));
    must(trainer->save());
    ASSERT_TRUE(must(trainer->step()));  // this step is lost
  }
  const auto trainer = open(o);
  while (trainer->progress().phase == Phase::kReading) ASSERT_TRUE(must(trainer->step()));
  EXPECT_EQ(trainer->progress().done, 2u);
  finish(*trainer);
  EXPECT_EQ(contents_of(o.output), whole);
}

TEST_F(ControllerTraining, IsRefusedIfTheModelGivesNaN) {
  for (const std::string broken : {"token_embd.weight", "blk.1.attn_k.weight"}) {
    Seeded s = bytes_model(true);
    s.edit = [&](const std::string& name, std::vector<float>& values) {
      for (size_t i = 0; name == broken && i < values.size(); i += 8) values[i] = NAN;
    };
    const SeededModel model = seeded_model(s);
    const TrainingOptions o = options("nan-" + broken);
    const auto trainer = must(ControllerTrainer::create(model.model, cpu(), o));
    Result<bool> more = true;
    while (more.ok() && *more) more = trainer->step();
    ASSERT_FALSE(more.ok());
    EXPECT_EQ(more.status().code(), Code::kNotFinite) << more.status().message();
    EXPECT_FALSE(std::filesystem::exists(o.output));
  }
}

TEST_F(ControllerTraining, IsRefusedInASentence) {
  const auto expect = [&](const std::shared_ptr<const Model>& model, const TrainingOptions& o, Code code,
                          const char* word) {
    const auto refused = ControllerTrainer::create(model, cpu(), o);
    ASSERT_FALSE(refused.ok()) << word;
    EXPECT_EQ(refused.status().code(), code) << refused.status().message();
    EXPECT_NE(refused.status().message().find(word), std::string::npos) << refused.status().message();
  };
  TrainingOptions o = options("refused");
  o.texts = 1;
  expect(small.model, o, Code::kInvalidArgument, "held out");
  o = options("refused");
  o.target = Target::kLogKvzipPlus;
  expect(small.model, o, Code::kInvalidArgument, "--target");
  o = options("refused");
  o.equal_shares = true;
  expect(small.model, o, Code::kInvalidArgument, "--budgets");
  o = options("refused");
  o.data.clear();
  expect(small.model, o, Code::kInvalidArgument, "--data");
  Seeded windowed = bytes_model(true);
  windowed.window = 16;
  expect(seeded_model(windowed).model, options("refused"), Code::kUnsupported, "window");
}

TEST_F(ControllerTraining, TakesNoMoreMemoryThanItMay) {
  TrainingOptions o = options("small");
  o.memory = 1;
  for (int tries = 0;; ++tries) {
    const auto tried = ControllerTrainer::create(small.model, cpu(), o);
    if (tried.ok()) break;
    ASSERT_LT(tries, 3);  // first only the reading, then everything
    EXPECT_EQ(tried.status().code(), Code::kBudget);
    EXPECT_GT(tried.status().bytes_missing(), 0u);
    o.memory += tried.status().bytes_missing();
  }
  o.memory -= 1;
  EXPECT_FALSE(ControllerTrainer::create(small.model, cpu(), o).ok());
}

}  // namespace
}  // namespace thimble::test
