// Tests training on every device of this machine: readings and gradients against the CPU's, and whole
// trainings against a second run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "tests/support/device_test_name.h"
#include "tests/support/random.h"
#include "tests/support/shared_devices.h"
#include "tests/support/vulkan_messages.h"
#include "tests/training/small_trainer.h"
#include "training/fit.h"
#include "training/least_squares.h"
#include "training/reading.h"

namespace thimble::test {
namespace {

std::vector<std::string> usable_devices() {
  std::vector<std::string> names;
  for (const DeviceInfo& info : list_devices())
    if (info.usable) names.push_back(info.name);
  return names;
}

class TrainingOn : public ::testing::TestWithParam<std::string> {
 protected:
  std::shared_ptr<Device> open(uint32_t threads = 2) const {
    return shared_device(GetParam() + " with threads " + std::to_string(threads),
                         [&] { return must(open_device(GetParam(), strictly({.threads = threads}))); });
  }
  // The tolerance of a result, relative to the largest value. Without tensor cores, all values are f32 with a
  // few hundred roundings, but keys and values are cached as halves, which may round to the other side
  // (2^-11). Tensor cores round operands of products to 11 bits, which gives a few times as much through two
  // layers.
  double tolerance(const std::shared_ptr<Device>& device) const {
    return device->info().view_element_bytes == 2 ? 0x1p-6 : 0x1p-8;
  }
};
INSTANTIATE_TEST_SUITE_P(Each, TrainingOn, ::testing::ValuesIn(usable_devices()), device_test_name);

void expect_near(const std::vector<float>& found, const std::vector<float>& expected, double tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  double largest = 0;
  for (const float x : expected) largest = std::max(largest, std::fabs(double{x}));
  for (size_t i = 0; i < found.size(); ++i)
    ASSERT_NEAR(found[i], expected[i], tolerance * largest) << "number " << i;
}

// A text longer than a chunk, with two tails, one of which asks about a part of the text.
TEST_P(TrainingOn, LabelsAreThoseOfTheCpu) {
  TrainingText text;
  text.tokens = seeded_tokens(600);
  text.tails.push_back({seeded_tokens(40, 64, 11), std::vector<uint32_t>(40), 0, 0, 600});
  for (uint32_t i = 2; i < 40; i += 3) text.tails[0].marked[i] = 1;
  text.tails.push_back({seeded_tokens(530, 64, 5), std::vector<uint32_t>(530, 1), 4, 200, 500});
  const auto device = open();
  for (const uint32_t window : {0u, 16u})
    for (const bool weighed : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "window " << window << (weighed ? ", weighed" : ""));
      const SeededModel small = seeded_model({.window = window});
      std::vector<float> states[2], labels[2];
      for (const bool on_device : {false, true}) {
        auto reader = must(Reader::open(small.model, on_device ? device : cpu(), Retainer::Input::kQkv, 600,
                                        530, 0, weighed));
        reader->begin(text);
        while (must(reader->step([&](uint32_t, uint32_t, uint32_t rows, const float* data) {
          states[on_device].insert(states[on_device].end(), data, data + size_t(rows) * reader->state_cols());
        }))) {
        }
        for (uint32_t layer = 0; layer < small.model->shape.layers; ++layer) {
          if (small.model->layers[layer].attention()->window) continue;
          const Reader::Labels of = must(reader->labels(layer));
          for (const auto* list : {&of.max_logit, &of.log_prob})
            labels[on_device].insert(labels[on_device].end(), list->begin(), list->end());
        }
      }
      expect_near(states[1], states[0], tolerance(device));
      // Entries that no tail asks about keep the minimum, -30, which would hide all other differences.
      for (auto& list : labels)
        for (float& label : list) label = label == -30 ? 0 : label;
      expect_near(labels[1], labels[0], tolerance(device));
    }
}

Samples some_samples(uint32_t runs, uint32_t cols) {
  const SampleShape shape{2, 2, cols};
  Samples samples(shape, runs);
  Random random{3};
  for (uint32_t run = 0; run < runs; ++run)
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      for (uint64_t i = 0; i < uint64_t(kRunTokens) * cols; ++i)
        samples.states(run, layer)[i] = f32_to_f16(random.uniform(-2, 2));
      for (uint32_t i = 0; i < shape.heads * kRunTokens; ++i) {
        samples.labels(run, layer)[i] = random.uniform(-8, 0);
        samples.best(run, layer)[i] = samples.labels(run, layer)[i] > -1;
      }
    }
  return samples;
}

TEST_P(TrainingOn, GradientsAreThoseOfTheCpu) {
  const Samples samples = some_samples(6, 72);
  const auto device = open();
  for (const Retainer::Kind kind : {Retainer::Kind::kLocret, Retainer::Kind::kMlp, Retainer::Kind::kSink}) {
    const bool sink = kind == Retainer::Kind::kSink;
    const FitOptions options{.kind = kind,
                             .act = kActGeluErf,
                             .hidden = sink ? 6 * 16u : 40u,
                             .group = sink ? 2u : 1u,
                             .steps = 5,
                             .runs = 4};
    std::vector<float> gradients[2];
    double losses[2];
    for (const bool on_device : {false, true}) {
      auto fit = must(Fit::start(on_device ? device : cpu(), samples, options));
      must(fit->gradients(1, gradients[on_device], losses[on_device]));
    }
    EXPECT_NEAR(losses[1], losses[0], losses[0] * tolerance(device));
    expect_near(gradients[1], gradients[0], tolerance(device));
  }
}

// A text of two blocks; the second is not full.
TEST_P(TrainingOn, LeastSquaresAreThoseOfTheCpu) {
  const SampleShape shape{2, 2, 72};
  constexpr uint32_t kTokens = 4400;
  const auto device = open();
  std::vector<float> weights[2];
  for (const bool on_device : {false, true}) {
    auto made = must(LeastSquares::make(on_device ? device : cpu(), shape, kTokens, 2));
    Random random{3};
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      for (uint32_t i = 0; i < kTokens * shape.cols; ++i)
        made->states(layer)[i] = f32_to_f16(random.uniform(-2, 2));
      must(made->add(layer, kTokens, random.floats(shape.heads * kTokens, -8, 0).data()));
    }
    made->end_text(kTokens);
    while (must(made->step()))
      weights[on_device].insert(weights[on_device].end(), made->layer(made->steps_done() - 1).second.begin(),
                                made->layer(made->steps_done() - 1).second.end());
  }
  // Products are of unrounded halves, so only the order of sums in f32 differs.
  expect_near(weights[1], weights[0], 0x1p-14);
}

// The second training is stopped once while it reads and once while it fits, and has another number of
// threads.
TEST_P(TrainingOn, GivesOneFileForASeed) {
  const Folder folder;
  const SeededModel small = seeded_model(bytes_model(true));
  const std::string book = folder.written("book", some_book());
  for (const Retainer::Kind kind : {Retainer::Kind::kLocret, Retainer::Kind::kLinear}) {
    const auto options = [&](const char* name, uint32_t threads) {
      TrainingOptions o;
      o.data = {book};
      o.output = folder.file(name + std::to_string(static_cast<int>(kind)));
      o.kind = kind;
      o.texts = 2;
      o.steps = 3;
      o.equal_shares = true;
      o.text_tokens = 1024;
      o.threads = threads;
      return o;
    };
    const auto opened = [&](const TrainingOptions& o) {
      return must(Trainer::create(small.model, open(o.threads), o));
    };
    const TrainingOptions whole = options("whole", 2), broken = options("broken", 1);
    // The file is written before the check.
    const auto write = [](Trainer& trainer) {
      while (trainer.progress().phase != TrainingProgress::Phase::kChecking) must(trainer.step());
    };
    const auto unbroken = opened(whole);
    write(*unbroken);
    {
      const auto trainer = opened(broken);
      while (trainer->progress().done < 2048) ASSERT_TRUE(must(trainer->step()));
      must(trainer->save());
    }
    {
      const auto trainer = opened(broken);
      EXPECT_TRUE(trainer->resumed());
      while (trainer->progress().phase != TrainingProgress::Phase::kFitting || trainer->progress().done < 1)
        ASSERT_TRUE(must(trainer->step()));
      must(trainer->save());
    }
    write(*opened(broken));
    EXPECT_EQ(contents_of(broken.output), contents_of(whole.output));
    if (kind != Retainer::Kind::kLocret) continue;  // the check takes long
    while (must(unbroken->step())) {
    }
    EXPECT_GT(unbroken->dense().asked, 0u);
    const TrainingSeconds& seconds = unbroken->seconds();
    for (const double part : {seconds.reading, seconds.labels, seconds.fitting, seconds.checking})
      EXPECT_GT(part, 0);
  }
}

}  // namespace
}  // namespace thimble::test
