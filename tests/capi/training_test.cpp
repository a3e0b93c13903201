// Tests training through the C API: refusals, and one complete training. tests/training/ tests the results.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "tests/capi/handles.h"
#include "tests/support/model_of_bytes.h"

namespace thimble {
namespace {

namespace fs = std::filesystem;

class Training : public ::testing::Test {
 protected:
  Training() {
    std::ofstream(book) << std::string(20000, 'a');
    thimble_training_options_init(&options, sizeof options);
    options.data = &data;
    options.data_count = 1;
    options.output = output.c_str();
  }
  ~Training() override { fs::remove(book); }

  void expect_refusal(thimble_status status, const char* word) {
    Error e;
    thimble_training* training = nullptr;
    EXPECT_EQ(thimble_training_create(small.model.get(), &options, &training, &e), status) << e.message;
    expect_sentence(e);
    EXPECT_NE(std::strstr(e.message, word), nullptr) << e.message;
    EXPECT_EQ(training, nullptr);
    EXPECT_FALSE(fs::exists(output + ".partial"));
  }

  const std::string book =
      (fs::temp_directory_path() / ("thimble-capi-book-" + std::to_string(getpid()))).string();
  const std::string output = book + ".gguf";
  const char* const data = book.c_str();
  const SmallModel small;
  thimble_training_options options;
};

TEST_F(Training, IsRefusedForWhatItCannotDo) {
  expect_refusal(THIMBLE_UNSUPPORTED, "context");  // the context has 512 positions
  options.kind = "gate";
  expect_refusal(THIMBLE_INVALID_ARGUMENT, "options.kind");
  options.kind = "sink";
  options.target = "max_logit";
  expect_refusal(THIMBLE_UNSUPPORTED, "is not a share");
  options.kind = "mlp";
  options.target = "guess";
  expect_refusal(THIMBLE_INVALID_ARGUMENT, "options.target");
  options.target = "max_logit";
  options.device = "abacus";
  expect_refusal(THIMBLE_UNSUPPORTED, "abacus");
  options.device = nullptr;
  options.data_count = 0;
  expect_refusal(THIMBLE_INVALID_ARGUMENT, "--data");
  const char* const none = nullptr;
  options.data = &none;
  options.data_count = 1;
  expect_refusal(THIMBLE_INVALID_ARGUMENT, "options.data");
  options.data = nullptr;
  expect_refusal(THIMBLE_INVALID_ARGUMENT, "options.data");
  options.output = nullptr;
  expect_refusal(THIMBLE_INVALID_ARGUMENT, "options.output");
}

struct FreeTraining {
  void operator()(thimble_training* training) const { thimble_training_free(training); }
};
using TrainingHandle = std::unique_ptr<thimble_training, FreeTraining>;

// A training for a small model, with a loop as in an app.
class Whole : public Training {
 protected:
  Whole() {
    std::ofstream written(book);
    for (int i = 0; i < 400; ++i)
      written << "The king of " << i * i % 997 << " villages did not say a word. ";
    Error e;
    EXPECT_OK(try_open(bytes, model, e), e);
    options.texts = 2;
    options.steps = 4;
    options.text_tokens = 1024;
    options.equal_shares = 1;
    options.threads = 2;
  }
  ~Whole() override {
    for (const char* ending : {"", ".partial"}) fs::remove(output + ending);
  }

  TrainingHandle create() const {
    Error e;
    thimble_training* training = nullptr;
    EXPECT_OK(thimble_training_create(model.get(), &options, &training, &e), e);
    return TrainingHandle(training);
  }
  static thimble_training_progress step(const TrainingHandle& training) {
    Error e;
    thimble_training_progress progress = {};
    progress.struct_size = sizeof progress;
    if (thimble_training_step(training.get(), &progress, &e) != THIMBLE_OK)
      throw std::runtime_error(e.message);  // ends the test and its loop
    return progress;
  }
  // Returns the bytes of the written file and removes it.
  std::string taken() const {
    std::ifstream in(output, std::ios::binary);
    const std::string file{std::istreambuf_iterator<char>(in), {}};
    fs::remove(output);
    return file;
  }

  const FileBytes bytes = model_of_bytes().bytes();
  ModelHandle model;
};

// A training that is freed once while it reads and once while it fits gives the same file as an undisturbed
// one.
TEST_F(Whole, StepsSavesGoesOnAndReports) {
  TrainingHandle training = create();
  while (step(training).phase != THIMBLE_TRAINING_DONE) {
  }
  const std::string whole = taken();
  EXPECT_FALSE(whole.empty());
  Error e;
  uint64_t length = 0;
  training.reset();
  training = create();
  while (step(training).done < 2048) {
  }
  EXPECT_EQ(thimble_training_report(training.get(), nullptr, 0, &length, &e), THIMBLE_INVALID_ARGUMENT);
  expect_sentence(e);
  training.reset();
  training = create();
  thimble_training_progress progress = step(training);
  EXPECT_EQ(progress.phase, THIMBLE_TRAINING_READING);
  EXPECT_GT(progress.done, 1024u);  // the first text is not read again
  while (progress.phase != THIMBLE_TRAINING_FITTING || progress.done < 2) progress = step(training);
  EXPECT_GT(progress.loss, 0);
  EXPECT_OK(thimble_training_save(training.get(), &e), e);
  training.reset();
  training = create();
  do progress = step(training);
  while (progress.phase == THIMBLE_TRAINING_READING);
  EXPECT_EQ(progress.phase, THIMBLE_TRAINING_FITTING);
  EXPECT_EQ(progress.done, 2u);
  EXPECT_EQ(progress.total, 4u);
  while (progress.phase != THIMBLE_TRAINING_DONE) progress = step(training);
  EXPECT_FALSE(fs::exists(output + ".partial"));

  EXPECT_EQ(thimble_training_report(training.get(), nullptr, 0, &length, &e), THIMBLE_INVALID_ARGUMENT);
  std::string text(length, ' ');
  EXPECT_OK(thimble_training_report(training.get(), text.data(), text.size(), &length, &e), e);
  const nlohmann::json report = nlohmann::json::parse(text);
  EXPECT_EQ(report.at("target"), "log_prob");
  EXPECT_GT(report.at("questions"), 0);
  EXPECT_EQ(report.at("recall").at(0).at("part"), 8);
  EXPECT_FALSE(report.at("verdict").get<std::string>().empty());
  const HeadsHandle heads = open_heads(model, output);
  EXPECT_EQ(thimble_retention_name(thimble_heads_retention(heads.get())), report.at("retention"));
  EXPECT_EQ(taken(), whole);
}

TEST_F(Training, RefusesNull) {
  Error e;
  uint64_t length = 0;
  thimble_training* training = nullptr;
  EXPECT_EQ(thimble_training_create(nullptr, &options, &training, &e), THIMBLE_INVALID_ARGUMENT);
  EXPECT_EQ(thimble_training_create(small.model.get(), &options, nullptr, &e), THIMBLE_INVALID_ARGUMENT);
  EXPECT_EQ(thimble_training_create(small.model.get(), nullptr, &training, &e), THIMBLE_INVALID_ARGUMENT);
  EXPECT_EQ(thimble_training_step(nullptr, nullptr, &e), THIMBLE_INVALID_ARGUMENT);
  EXPECT_EQ(thimble_training_save(nullptr, &e), THIMBLE_INVALID_ARGUMENT);
  EXPECT_EQ(thimble_training_report(nullptr, nullptr, 0, &length, &e), THIMBLE_INVALID_ARGUMENT);
  thimble_training_free(nullptr);
}

}  // namespace
}  // namespace thimble
