// Tests the weights on a device that has its own memory: which are copied there, once, and which stay on the
// host.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_set>

#include "runtime/memory/host_weights.h"
#include "runtime/memory/weight_window.h"
#include "tests/support/data.h"
#include "tests/support/seeded_model.h"
#include "tests/support/sessions.h"
#include "tests/support/spy_device.h"

namespace thimble::test {
namespace {

SessionOptions locret(const SeededModel& m) {
  return {.retainer = m.retainer,
          .retention = Retention::kLocret,
          .pool = 60,
          .chunk = 20,
          .stabilizers = 8,
          .local = 15};
}

std::shared_ptr<SpyDevice> discrete() {
  auto device = std::make_shared<SpyDevice>(cpu());
  device->discrete = true;
  return device;
}

TEST(Placement, GivesTheSameBitsAsReadingTheFile) {
  const SeededModel m = seeded_model();
  const auto tokens = seeded_tokens(200);
  const auto here = open_session(m.model, locret(m)), there = open_session(m.model, locret(m), discrete());
  EXPECT_EQ(read(*here, tokens), read(*there, tokens));
  for (int i = 0; i < 5; ++i) EXPECT_EQ(must(here->step()), must(there->step()));
  EXPECT_EQ(accept(*here, 7), accept(*there, 7));
}

TEST(Placement, TakesSeveralBuffersIfOneWouldBeTooLarge) {
  const SeededModel m = seeded_model();
  const auto tokens = seeded_tokens(200);
  const auto whole = discrete(), pieces = discrete();
  uint64_t largest = 0;
  for (const Tensor& t : m.model->tensors()) largest = std::max<uint64_t>(largest, t.bytes());
  pieces->max_allocation = round_up(largest, 4096);
  const MemoryPlan plan = must(make_plan(*m.model, *pieces, locret(m)));
  const auto here = open_session(m.model, locret(m), whole), there = open_session(m.model, locret(m), pieces);
  EXPECT_GT(pieces->allocations, whole->allocations);
  EXPECT_EQ(pieces->live_bytes, plan.total - plan.fixed - host_bytes(*m.model, plan));
  EXPECT_EQ(read(*here, tokens), read(*there, tokens));
}

TEST(Placement, SamplesFromTheDevicesLogits) {
  const SeededModel m = seeded_model();
  const auto here = open_session(m.model, locret(m)), there = open_session(m.model, locret(m), discrete());
  for (Session* session : {here.get(), there.get()}) {
    must(session->set_sampler({.temperature = 1, .seed = 3}));
    must(session->feed(seeded_tokens(40)));
  }
  for (int i = 0; i < 20; ++i) EXPECT_EQ(must(here->step()), must(there->step()));
}

TEST(Placement, ACloneSamplesAndScoresFromTheDevicesLogits) {
  const SeededModel m = seeded_model();
  const auto device = discrete();
  const auto here = open_session(m.model, locret(m)), there = open_session(m.model, locret(m), device);
  for (Session* session : {here.get(), there.get()}) {
    must(session->set_sampler({.temperature = 1, .seed = 3}));
    read(*session, seeded_tokens(40));
  }
  const auto twin_here = must(here->clone()), twin_there = must(there->clone());
  float expected[3], got[3];
  must(must(here->clone())->score(seeded_tokens(3), expected));
  must(must(there->clone())->score(seeded_tokens(3), got));
  EXPECT_TRUE(std::equal(expected, expected + 3, got));
  EXPECT_EQ(must(twin_here->step()), must(twin_there->step()));
}

TEST(Placement, ServesATiedEmbeddingFromTheDevice) {
  const auto model =
      must(Model::open(must(MappedFile::open(project_file("models/thimble-demo-28m-q8_0.gguf"))), "demo"));
  ASSERT_EQ(model->output.data, model->token_embedding.data) << "the test needs a model that ties them";
  const SessionOptions options{.pool = 300, .chunk = 64};
  const auto tokens = seeded_tokens(100, model->shape.vocab);
  const auto here = open_session(model, options), there = open_session(model, options, discrete());
  EXPECT_EQ(read(*here, tokens), read(*there, tokens));
}

TEST(Placement, IsPlannedToTheByteAndSharedBySessions) {
  const SeededModel m = seeded_model();
  const auto device = discrete();
  const MemoryPlan before = must(make_plan(*m.model, *device, locret(m)));
  EXPECT_GT(before.weights, 0u);
  EXPECT_EQ(before.weights % 4096, 0u);
  EXPECT_EQ(before.shared, 0u);
  const auto first = open_session(m.model, locret(m), device);
  const uint64_t alone = device->live_bytes;
  EXPECT_EQ(alone, before.total - before.fixed - host_bytes(*m.model, before));

  const MemoryPlan second = must(make_plan(*m.model, *device, locret(m)));
  EXPECT_EQ(second.weights, before.weights);
  EXPECT_EQ(second.shared, before.weights);
  EXPECT_EQ(second.total, before.total - before.weights);
  {
    const auto another = open_session(m.model, locret(m), device);
    const uint64_t own = another->allocated() - (second.fixed - second.programs);
    EXPECT_EQ(device->live_bytes - alone, alone - before.weights);
    const auto twin = must(another->clone());
    EXPECT_EQ(device->live_bytes - alone, 2 * (alone - before.weights));
    EXPECT_EQ(another->allocated(), 2 * own + second.fixed - second.programs);
  }
  EXPECT_EQ(device->live_bytes, alone);
}

// A session with a budget in which not even the smallest pool fits next to all weights.
SessionOptions without_room(const SeededModel& m, const Device& device) {
  SessionOptions smallest = locret(m);
  smallest.stabilizers = 0;
  smallest.pool = 4 + 1;  // 4 first entries are protected
  SessionOptions o = locret(m);
  o.budget = must(make_plan(*m.model, device, smallest)).total - 1;
  return o;
}

TEST(Placement, LeavesAsFewWeightsAsPossibleInTheHostsMemory) {
  const SeededModel m = seeded_model();
  const auto device = discrete();
  SessionOptions o = without_room(m, *device);
  const MemoryPlan plan = must(make_plan(*m.model, *device, o));
  EXPECT_GT(plan.host_groups, 0u);
  EXPECT_LE(plan.total, o.budget);
  EXPECT_EQ(plan.options.pool, o.pool);
  Policies policies(plan.options);
  EXPECT_GT(must(count_plan(*m.model, *device, plan.options, policies, false, plan.host_groups - 1)).total,
            o.budget);

  const auto tokens = seeded_tokens(200);
  const auto here = open_session(m.model, locret(m)), there = open_session(m.model, o, device);
  EXPECT_EQ(device->live_bytes, plan.total - plan.fixed - host_bytes(*m.model, plan));
  EXPECT_GE(device->host_weight_bytes, host_weight_bytes(*m.model, plan.host_groups));
  EXPECT_EQ(read(*here, tokens), read(*there, tokens));
  for (int i = 0; i < 5; ++i) EXPECT_EQ(must(here->step()), must(there->step()));

  const MemoryPlan second = must(make_plan(*m.model, *device, locret(m)));
  EXPECT_EQ(second.host_groups, 0u);  // the weights are where the first session placed them
  const uint64_t before = device->host_weight_bytes;
  const auto another = open_session(m.model, locret(m), device);
  EXPECT_EQ(device->host_weight_bytes, before);
  EXPECT_EQ(read(*another, tokens), read(*open_session(m.model, locret(m)), tokens));
}

TEST(Placement, TakesAPoolOfTheDefaultSizeNextToWeightsInTheHostsMemory) {
  const SeededModel m = seeded_model();
  const auto device = discrete();
  SessionOptions o = without_room(m, *device);
  o.pool = 0;
  o.stabilizers = kDefault;
  const MemoryPlan plan = must(make_plan(*m.model, *device, o));
  EXPECT_GT(plan.host_groups, 0u);
  EXPECT_LE(plan.total, o.budget);
  EXPECT_GT(plan.options.pool, 8u);                                        // more than the smallest
  EXPECT_EQ(must(largest_pool(*m.model, *device, o)), plan.options.pool);  // fewer than the default size

  SessionOptions same = o;
  same.budget = 0;
  same.pool = plan.options.pool;
  EXPECT_EQ(plan.options.stabilizers, must(make_plan(*m.model, *device, same)).options.stabilizers);
  EXPECT_GT(plan.options.stabilizers, 0u);
  o.budget = 4096;
  EXPECT_EQ(make_plan(*m.model, *device, o).status().code(), Code::kBudget);
}

// A token reads few experts, so leaving them in the host's memory costs least.
TEST(Placement, LeavesExpertsInTheHostsMemoryFirst) {
  const auto model =
      must(Model::open(must(MappedFile::open(project_file("tests/reference/tiny-granitemoe.gguf"))), "moe"));
  const auto groups = host_groups(*model);
  ASSERT_EQ(groups.size(), 2 * model->layers.size() + 1);
  for (size_t i = 0; i < model->layers.size(); ++i) {
    const auto& experts = std::get<Experts>(model->layers[i].feed_forward);
    EXPECT_TRUE(host_weights(*model, static_cast<uint32_t>(i) + 1).contains(experts.down.data));
    EXPECT_FALSE(host_weights(*model, static_cast<uint32_t>(i)).contains(experts.down.data));
  }
  EXPECT_EQ(groups.back().front().data, model->output.data);
}

// A layer's matrices are complete before the layer runs, and stay until it has run.
TEST(Placement, CopiesALayerToTheWindowBeforeItRuns) {
  const SeededModel m = seeded_model({.layers = 7});
  DeviceInfo info = discrete()->info();
  EXPECT_TRUE(WeightWindow(*m.model, info, 7).empty());
  info.stages_weights = true;
  for (const uint32_t few : {0, 1, 2}) EXPECT_TRUE(WeightWindow(*m.model, info, few).empty());
  for (uint32_t groups = 3; groups <= 8; ++groups) {
    WeightWindow window(*m.model, info, groups);
    Buffer buffer;
    Arena arena(info.alignment, &buffer);
    window.place(arena);
    std::map<uint64_t, const std::byte*> holds;  // what was copied last, by its place in the window
    std::set<const std::byte*> staged;
    const auto copy = [&](uint32_t segment) {
      for (const Tensor& t : window.copied_in(segment)) holds[window.of(t).offset] = t.data;
    };
    copy(0);
    for (uint32_t layer = 0; layer < 7; ++layer) {
      copy(1 + layer);  // may be complete before the layer runs
      for (const Tensor& t : m.model->layers[layer].tensors()) {
        if (!window.of(t)) continue;
        EXPECT_EQ(holds[window.of(t).offset], t.data) << "layer " << layer << " of " << groups;
        EXPECT_LE(window.of(t).offset + window.of(t).bytes, arena.size());
        staged.insert(t.data);
      }
    }
    std::unordered_set<const std::byte*> in_host = host_weights(*m.model, std::min(groups, 7u));
    EXPECT_EQ(staged, std::set(in_host.begin(), in_host.end()));
  }
}

// A session of which most layers pass through a window has the memory that was planned, and computes the same
// bits, in chunks, in steps of a token, and after interrupts.
TEST(Placement, ReadsLayersThatPassThroughAWindow) {
  // A layer takes more than the pool, so that no smaller pool would fit next to all weights.
  const SeededModel m = seeded_model({.layers = 7, .d_model = 128, .d_ff = 512});
  // With 3 groups in the host's memory, the card would hold as much as with 1, which needs no window.
  for (const uint32_t groups : {5u, 7u, 8u}) {
    const auto device = discrete();
    device->stages_weights = true;
    SessionOptions o = locret(m);
    Policies policies(o);
    o.budget = must(count_plan(*m.model, *device, must(resolve(*m.model, o)), policies, false, groups)).total;
    const MemoryPlan plan = must(make_plan(*m.model, *device, o));
    EXPECT_EQ(plan.host_groups, groups);
    EXPECT_LE(plan.total, o.budget);
    const auto here = open_session(m.model, locret(m)), there = open_session(m.model, o, device);
    EXPECT_EQ(device->live_bytes, plan.total - plan.fixed - host_bytes(*m.model, plan));
    EXPECT_GT(device->stages, 0u);

    const auto tokens = seeded_tokens(200);
    int submits = 0, interrupts = 0;
    device->before_submit = [&](const Program&, const StepParams&, std::span<const HeadState>) {
      if (++submits % 4 == 0) there->interrupt();
    };
    must(here->feed(tokens));
    interrupts += insist([&] { return there->feed(tokens); });
    interrupts += insist([&] { return there->flush(); });
    EXPECT_EQ(flush(*here), flush(*there));
    for (int i = 0; i < 5; ++i) {
      must(here->accept(i));
      interrupts += insist([&] { return there->accept(i); });
      EXPECT_EQ(flush(*here), flush(*there));
    }
    EXPECT_GT(interrupts, 10);
    device->before_submit = {};
  }
}

// The weights and the device's own memory count until the last of a session and its clones is freed, in any
// order.
TEST(Placement, IsCountedUntilTheLastCloneGoes) {
  const SeededModel m = seeded_model();
  const auto device = discrete();
  const MemoryPlan plan = must(make_plan(*m.model, *device, locret(m)));
  const uint64_t common = plan.weights + plan.fixed - plan.programs, own = plan.total - common;
  for (const std::vector<size_t>& order : {std::vector<size_t>{0, 1, 2}, {1, 0, 2}, {2, 1, 0}}) {
    SessionOptions options = locret(m);
    options.budget = common + 3 * own;
    std::vector<std::unique_ptr<Session>> sessions;
    sessions.push_back(open_session(m.model, options, device));
    const uint64_t alone = sessions[0]->allocated(),
                   each = alone - plan.weights - (plan.fixed - plan.programs);
    for (int i = 0; i < 2; ++i) sessions.push_back(must(sessions[0]->clone()));
    for (size_t gone = 0; gone < 2; ++gone) {
      Session& last = *sessions[order.back()];
      EXPECT_EQ(last.allocated(), common + (3 - gone) * each);
      EXPECT_EQ(last.clone().ok(), gone > 0) << gone;  // the budget has room for three
      sessions[order[gone]].reset();
    }
    EXPECT_EQ(sessions[order.back()]->allocated(), common + each);
  }
}

TEST(Placement, GoesWithTheLastSession) {
  const SeededModel m = seeded_model();
  const auto device = discrete();
  { const auto session = open_session(m.model, locret(m), device); }
  EXPECT_EQ(device->live_bytes, 0u);
  EXPECT_EQ(must(make_plan(*m.model, *device, locret(m))).shared, 0u);
  const auto again = open_session(m.model, locret(m), device);
  EXPECT_FALSE(read(*again, seeded_tokens(30)).empty());
}

TEST(Placement, ARefusedAllocationLeaksNothing) {
  const SeededModel m = seeded_model();
  const auto device = discrete();
  const uint64_t total = (open_session(m.model, locret(m), device), device->allocations);
  for (uint64_t i = 0; i < total; ++i) {
    device->allocations = 0;
    device->fail_allocation = i;
    EXPECT_EQ(Session::create(m.model, device, locret(m)).status().code(), Code::kOutOfMemory);
    EXPECT_EQ(device->live_bytes, 0u);
  }
}

}  // namespace
}  // namespace thimble::test
