// Layers that do not fit in memory: which ones are read again in every step, and that this changes no result.
#include "runtime/memory/layer_pager.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/support/seeded_model.h"
#include "tests/support/sessions.h"
#include "tests/support/spy_device.h"

namespace thimble::test {
namespace {

uint64_t bytes_of(const std::vector<Tensor>& tensors) {
  uint64_t bytes = 0;
  for (const Tensor& t : tensors) bytes += t.bytes();
  return bytes;
}

TEST(LayerPager, KeepsAsManyLayersAsFit) {
  const SeededModel m = seeded_model({.layers = 7});
  const uint64_t layer = bytes_of(m.model->layers[0].tensors()), output = m.model->output.bytes();
  for (const Layer& l : m.model->layers) ASSERT_EQ(bytes_of(l.tensors()), layer);
  EXPECT_TRUE(paged_layers(*m.model, output + 7 * layer).empty());
  // One layer that is read again takes its own memory; from the second one on there is one ahead of it, too.
  EXPECT_EQ(paged_layers(*m.model, output + 7 * layer - 1).size(), 3u);
  EXPECT_EQ(paged_layers(*m.model, output + 6 * layer).size(), 3u);
  EXPECT_EQ(paged_layers(*m.model, output + 6 * layer - 1).size(), 4u);
  EXPECT_EQ(paged_layers(*m.model, output + 3 * layer).size(), 6u);
  EXPECT_EQ(paged_layers(*m.model, output + 2 * layer).size(), 7u);
  EXPECT_EQ(paged_layers(*m.model, 0).size(), 7u) << "nothing fits";
  EXPECT_EQ(paged_bytes(*m.model, paged_layers(*m.model, output + 6 * layer)), 3 * layer);
  EXPECT_EQ(paged_layers(*m.model, output + 6 * layer), (std::vector<uint32_t>{2, 4, 6})) << "spread evenly";
}

TEST(LayerPager, ChangesNoBits) {
  const SeededModel m = seeded_model({.layers = 5});
  const uint64_t layer = bytes_of(m.model->layers[0].tensors());
  std::vector<int32_t> tokens(200);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * 7 % 64);
  for (const Retention retention : {Retention::kNone, Retention::kLocret}) {
    SessionOptions o{.retention = retention, .pool = 240, .chunk = 20};
    if (retention == Retention::kLocret)
      o.retainer = m.retainer, o.pool = 60, o.stabilizers = 8, o.local = 15;
    const auto device = std::make_shared<SpyDevice>(cpu());
    const MemoryPlan whole = must(make_plan(*m.model, *device, o));
    EXPECT_TRUE(whole.paged_layers.empty());
    // A sixteenth of the free memory is left to others.
    device->free_bytes = (whole.total + m.model->output.bytes() + 4 * layer) * 16 / 15 + 16;
    ASSERT_EQ(must(make_plan(*m.model, *device, o)).paged_layers, (std::vector<uint32_t>{1, 3, 4}));

    const auto here = open_session(m.model, o), there = open_session(m.model, o, device);
    EXPECT_EQ(read(*here, tokens), read(*there, tokens));
    for (int i = 0; i < 5; ++i) EXPECT_EQ(must(here->step()), must(there->step()));
    const uint64_t before = device->submits;
    EXPECT_EQ(accept(*here, 7), accept(*there, 7));
    EXPECT_EQ(device->submits - before, 7u) << "a token runs layer by layer";
    EXPECT_EQ(kept(*here), kept(*there));
  }
}

}  // namespace
}  // namespace thimble::test
