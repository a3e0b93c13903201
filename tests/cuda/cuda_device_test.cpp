// What only a CUDA device promises: what it holds of the card's memory, and how it fails.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <thread>

#include "tests/support/data.h"
#include "tests/support/device_test_name.h"
#include "tests/support/seeded_model.h"
#include "tests/support/sessions.h"

namespace thimble::test {
namespace {

std::vector<std::string> cards() {
  std::vector<std::string> names;
  for (const DeviceInfo& info : list_devices())
    if (info.name.starts_with("cuda")) names.push_back(info.name);
  return names;
}

TEST(CudaDevice, SaysWhyThereIsNoCard) {
  if (!cards().empty()) GTEST_SKIP() << "there is one: the other tests run";
  const Status status = open_device("cuda", {}).status();
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_NE(status.message().find("no NVIDIA card can be used"), std::string::npos) << status.message();
  EXPECT_EQ(must(open_device("auto", {.threads = 1}))->info().name, "cpu");
}

TEST(CudaDevice, RefusesNamesThatAreNotDevices) {
  for (const char* name : {"cuda:", "cuda:x", "cuda:1x", "cuda1", "cuda:-1", "cuda:99999999999"})
    EXPECT_EQ(open_device(name, {}).status().code(), Code::kUnsupported) << name;
}

class Cuda : public ::testing::TestWithParam<std::string> {
 protected:
  static std::shared_ptr<Device> open() { return must(open_device(GetParam(), {})); }
  static uint64_t free_bytes() {
    size_t free = 0, total = 0;
    EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    return free;
  }
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Cuda);

TEST_P(Cuda, IsWhatAutoOpens) { EXPECT_EQ(must(open_device("auto", {}))->info().name, cards().front()); }

TEST_P(Cuda, RefusesACardThatIsNotThere) {
  EXPECT_EQ(open_device("cuda:" + std::to_string(cards().size()), {}).status().code(),
            Code::kInvalidArgument);
}

// A session and its clone take no more of the card than planned, without the context. Running takes no more.
TEST_P(Cuda, HoldsNoMoreThanPlannedAndAllocatesNothingLater) {
  const SeededModel deep = seeded_model({.layers = 40});
  const auto demo =
      must(Model::open(must(MappedFile::open(project_file("models/thimble-demo-28m-q8_0.gguf"))), "demo"));
  const auto demo_heads = must(demo->open_retainer(
      must(MappedFile::open(project_file("models/thimble-demo-28m.locret.gguf"))), "heads"));
  const auto device = open();
  for (const SeededModel& m : {SeededModel{demo, demo_heads}, deep}) {
    const SessionOptions options{.retainer = m.retainer,
                                 .retention = Retention::kLocret,
                                 .pool = 2048,
                                 .chunk = 1024,
                                 .selection = Selection::kTokenSelect,
                                 .select_k = 256,
                                 .select_init = 16,
                                 .select_local = 64};
    const uint64_t before = free_bytes();
    const auto session = open_session(m.model, options, device);
    const MemoryPlan& plan = session->plan();
    const uint64_t arenas = plan.weights + plan.pool + plan.view + plan.workspace,
                   held = before - free_bytes();
    std::printf("%u layers: %.1f MiB in addition to the arenas, planned %.1f\n", m.model->shape.layers,
                (double(held) - double(arenas)) / (1 << 20), double(plan.programs) / (1 << 20));
    EXPECT_LE(held, arenas + plan.programs);
    // What the session counts of the card: all but its part of the context and the host's, of which the plan
    // has some room too much, 40 KiB a layer for what a program keeps there. The driver gives 2 MiB at a
    // time.
    const uint64_t counted = session->allocated() - (plan.fixed - plan.programs) - plan.io,
                   room = (m.model->shape.layers + 1) * (40ull << 10);
    EXPECT_LE(counted, held);
    EXPECT_GE(counted + room, held);
    const auto twin = must(session->clone());
    EXPECT_LE(before - free_bytes(), 2 * (arenas + plan.programs) - plan.weights);

    const uint64_t made = free_bytes();
    must(session->feed(seeded_tokens(5000, m.model->shape.vocab)));
    for (int i = 0; i < 200; ++i) must(session->step());
    float log_prob[20];
    must(session->score(seeded_tokens(20, m.model->shape.vocab), log_prob));
    EXPECT_EQ(free_bytes(), made);
  }
}

TEST_P(Cuda, SessionsOnSeveralThreadsShareACard) {
  const SeededModel m = seeded_model();
  const SessionOptions options{.retainer = m.retainer,
                               .retention = Retention::kLocret,
                               .pool = 60,
                               .chunk = 20,
                               .stabilizers = 8,
                               .local = 15};
  const auto answer = [&](const std::shared_ptr<Device>& device) {
    const auto session = open_session(m.model, options, device);
    std::vector<float> logits = read(*session, seeded_tokens(300));
    for (int i = 0; i < 20; ++i) must(session->step());
    return logits;
  };
  const auto device = open();
  EXPECT_EQ(device, open()) << "who opens an open card shares it";
  const std::vector<float> expected = answer(device);
  std::vector<std::vector<float>> got(4);
  std::vector<std::thread> threads;
  for (auto& g : got)
    threads.emplace_back([&] {
      for (int i = 0; i < 5; ++i) g = answer(device);
    });
  for (std::thread& t : threads) t.join();
  for (const auto& g : got) EXPECT_EQ(g, expected);
}

TEST_P(Cuda, ACardThatIsFullSaysSoAndGoesOn) {
  const SeededModel m = seeded_model({.layers = 8});
  const auto device = open();
  // 8 layers * 2 heads * 2^29 entries * 36 bytes are 309 GB, more than any card has.
  const auto refused = Session::create(m.model, device, {.pool = 1u << 28, .max_new = 1u << 28});
  EXPECT_EQ(refused.status().code(), Code::kOutOfMemory) << refused.status().message();
  const auto session = open_session(m.model, {.pool = 100, .chunk = 32}, device);
  EXPECT_FALSE(read(*session, seeded_tokens(50)).empty());
}

TEST_P(Cuda, MeasuresWhatItCanDo) {
  const Rates rates = must(open()->measure());
  EXPECT_GT(rates.bytes_per_second, 50e9);  // the slowest card of capability 8.0 has 100 GB/s
  EXPECT_LT(rates.bytes_per_second, 20e12);
  EXPECT_GT(rates.flop_per_second, 5e12);
}

// The last test: the process may not see the card again.
TEST_P(Cuda, ALostCardIsAStatusAndANewSessionWorks) {
  const SeededModel m = seeded_model();
  {
    const auto device = open();
    const auto session = open_session(m.model, {.pool = 100, .chunk = 32}, device);
    must(session->feed(seeded_tokens(40)));
    // An embedding's row far outside of all memory: what a defective kernel would do.
    const auto stream = must(device->open_stream({}, 0));
    const auto buffer = must(device->alloc(MemKind::kWorkspace, 4096));
    const int32_t far = INT32_MAX;
    must(device->write({buffer.get(), 0, 4}, &far));
    Weight table;
    static_cast<View&>(table) = {buffer.get(), 0, 4096};
    table.rows = 1;
    table.cols = 1024;
    auto recorder = stream->record(1);
    recorder->record(Embed{.tokens = View{buffer.get(), 0, 4},
                           .table = table,
                           .x = View{buffer.get(), 0, 4096},
                           .p = {.cols = 1024}});
    const auto program = must(stream->finish(std::move(recorder)));
    must(stream->submit(*program, 0, 1, {.n_rows = 1}, {}));
    EXPECT_EQ(stream->wait().code(), Code::kDeviceLost);
    const Status status = session->flush();
    EXPECT_EQ(status.code(), Code::kDeviceLost);
    EXPECT_NE(status.message().find("start the program again"), std::string::npos) << status.message();
    EXPECT_EQ(Session::create(m.model, device, {.pool = 100, .chunk = 32}).status().code(),
              Code::kDeviceLost);
  }
  // Driver 580 gives no second context to a process whose first one failed; then it is the CPU that goes on.
  const auto again = open_device(GetParam(), {});
  if (!again.ok()) {
    EXPECT_EQ(again.status().code(), Code::kDeviceLost) << again.status().message();
  }
  const auto session =
      open_session(m.model, {.pool = 100, .chunk = 32}, must(open_device("auto", {.threads = 1})));
  EXPECT_FALSE(read(*session, seeded_tokens(50)).empty());
}

INSTANTIATE_TEST_SUITE_P(On, Cuda, ::testing::ValuesIn(cards()), device_test_name);

}  // namespace
}  // namespace thimble::test
