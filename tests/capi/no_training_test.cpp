// A library that was built without training still has its entry points, which report this.
#include <gtest/gtest.h>

#include <string>

#include "thimble/thimble.h"

namespace {

TEST(WithoutTraining, RefusesToTrainInASentence) {
  thimble_training_options options;
  thimble_training_options_init(&options, sizeof options);
  EXPECT_EQ(options.struct_size, sizeof options);
  thimble_error error = {};
  error.struct_size = sizeof error;
  thimble_training* training = nullptr;
  EXPECT_EQ(thimble_training_create(nullptr, &options, &training, &error), THIMBLE_UNSUPPORTED);
  EXPECT_NE(std::string(error.message).find("without training"), std::string::npos) << error.message;
  EXPECT_EQ(training, nullptr);
  thimble_training_free(training);
}

}  // namespace
