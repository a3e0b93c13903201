// Training through the C API: what it refuses. tests/training/ has what it computes.
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/capi/handles.h"

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
  expect_refusal(THIMBLE_UNSUPPORTED, "context");  // of 512 positions
  options.kind = "gate";
  expect_refusal(THIMBLE_INVALID_ARGUMENT, "options.kind");
  options.kind = "sink";
  options.target = "max_logit";
  expect_refusal(THIMBLE_UNSUPPORTED, "share of 1");
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
