// Tests the memory plan: it equals what is allocated, it stays within the budget, and what does not fit is
// refused with a reason.
#include "runtime/plan/planner.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <new>
#include <tuple>

#include "tests/support/data.h"
#include "tests/support/seeded_model.h"
#include "tests/support/sessions.h"
#include "tests/support/spy_device.h"

// Counts every allocation of this program: all forms of new and delete go through these functions.
namespace {
std::atomic<uint64_t> g_allocations = 0;
}
// This is not inlined, because otherwise gcc warns about memory from malloc here that is passed to delete
// there.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++g_allocations;
  if (void* p = std::malloc(bytes ? bytes : 1)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }

namespace thimble::test {
namespace {

const SeededModel& model() {
  static const SeededModel m = seeded_model();
  return m;
}

SessionOptions locret() {
  return {.retainer = model().retainer,
          .retention = Retention::kLocret,
          .pool = 60,
          .chunk = 20,
          .stabilizers = 8,
          .local = 15,
          .max_new = 12};
}

SessionOptions selecting(SessionOptions o, VoteScope vote = VoteScope::kGroup) {
  o.selection = Selection::kTokenSelect;
  o.select_k = 8;
  o.select_init = 2;
  o.select_local = 12;
  o.vote = vote;
  return o;
}

std::vector<SessionOptions> policies() {
  SessionOptions window = locret(), by_position = selecting(locret(), VoteScope::kLayer), original = locret();
  window.retention = Retention::kWindow;
  window.retainer = nullptr;
  by_position.context = 3000;
  original.positions = Positions::kOriginal;
  const SessionOptions none{.pool = 100, .chunk = 24, .max_new = 10};
  SessionOptions quest = window;
  quest.selection = Selection::kQuest;
  quest.select_k = 32;
  quest.dense_layers = 0;
  const SessionOptions adore{.retainer = model().controller,
                             .retention = Retention::kAdore,
                             .pool = 60,
                             .chunk = 24,
                             .context = 3000};
  SessionOptions rebuilding = adore;
  rebuilding.rebuild = 9;
  std::vector<SessionOptions> all = {none,        window,   locret(), selecting(none), selecting(locret()),
                                     by_position, original, quest,    adore,           rebuilding};
  for (size_t i = 0, plain = all.size(); i < plain; ++i) {
    all.push_back(all[i]);
    all.back().watch = true;
  }
  return all;
}

Result<MemoryPlan> plan(const SessionOptions& o, const Device& device = *cpu()) {
  return make_plan(*model().model, device, o);
}

void expect_refused(const Status& status, Code code, const std::string& part) {
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  EXPECT_EQ(status.message().find('\n'), std::string::npos);
}

// ---- the plan is what is allocated ----

TEST(Planner, CountsWhatTheDeviceAllocates) {
  for (const SessionOptions& o : policies()) {
    const auto device = std::make_shared<SpyDevice>(cpu());
    const MemoryPlan planned = must(plan(o, *device));
    EXPECT_EQ(device->allocations, 0u);  // planning allocates nothing
    const auto session = open_session(model().model, o, device);
    EXPECT_EQ(session->plan().total, planned.total);
    // Sums the memory that the device allocated, the device's own part, the recorded programs, and the host's
    // memory.
    const uint64_t scoring = o.retention == Retention::kAdore
                                 ? planned.capacity * sizeof(int32_t) +
                                       uint64_t(kNotedAtOnce) * model().model->shape.d_model * sizeof(float)
                                 : 0;
    EXPECT_EQ(
        session->allocated(),
        device->live_bytes + planned.fixed - planned.programs + device->program_bytes +
            Sampler::bytes(64, planned.dimensions.reach) +
            (planned.options.chunk + planned.options.local + 1) * sizeof(int32_t) +
            planned.dimensions.runs.size() * (sizeof(HeadState) + sizeof(HeadRun) + 2 * sizeof(uint32_t)) +
            scoring);
    EXPECT_LE(session->allocated(), planned.total);
    EXPECT_EQ(planned.total,
              planned.weights + planned.pool + planned.view + planned.workspace + planned.io + planned.fixed);
    EXPECT_EQ(device->live_bytes + planned.fixed + host_bytes(*model().model, planned), planned.total);
    EXPECT_EQ(device->peak_bytes, device->live_bytes);
  }
}

// The buffer of the feed-forward is as wide as the shared expert if that is wider than two others.
TEST(Planner, CountsAnExpertThatAllTokensShare) {
  const auto open = [](const char* name) {
    const std::string path = project_file(std::string("tests/reference/") + name);
    return must(Model::open(must(MappedFile::open(path)), path));
  };
  const auto routed = open("tiny-granitemoe.gguf"), shared = open("tiny-granitemoe-shared.gguf");
  constexpr uint32_t kChunk = 64;
  const SessionOptions o{.pool = 100, .chunk = kChunk, .max_new = 10};
  const auto device = std::make_shared<SpyDevice>(cpu());
  const MemoryPlan planned = must(make_plan(*shared, *device, o)),
                   without = must(make_plan(*routed, *device, o));
  const auto session = open_session(shared, o, device);
  EXPECT_EQ(device->live_bytes + planned.fixed + host_bytes(*shared, planned), planned.total);
  EXPECT_EQ(planned.workspace - planned.backend_scratch,
            without.workspace - without.backend_scratch + kChunk * (160 - 2 * 64) * sizeof(float));
}

// With the address sanitizer, the system also counts its shadow memory, an eighth of all memory.
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
// The memory of this process, as the system counts it in the page tables: the sums in /proc/self/status may
// lag by some pages per processor.
uint64_t resident() {
  std::ifstream pages("/proc/self/smaps_rollup");
  for (std::string word; pages >> word;)
    if (word == "Anonymous:") {
      uint64_t kib = 0;
      pages >> kib;
      return kib << 10;
    }
  return 0;
}

TEST(Planner, CountsWhatTheSystemSeesAllocated) {
  // Reads a chunk that uses every row of the workspace, and fills the pools.
  for (const Selection selection : {Selection::kDense, Selection::kTokenSelect, Selection::kQuest}) {
    SessionOptions o = locret();
    o.pool = 3000;
    o.chunk = 4000;
    o.stabilizers = 100;
    o.selection = selection;
    o.select_k = 64;
    must(plan(o));
    const uint64_t before = resident();
    ASSERT_GT(before, 0u);
    const auto session = open_session(model().model, o);
    read(*session, seeded_tokens(4020));
    for (int i = 0; i < 3; ++i) must(session->step());
    const uint64_t grown = resident() - before;
    const MemoryPlan& p = session->plan();
    // Pages round up each of three buffers, and the heap grows by 128 KiB at a time. Some planned memory is
    // not touched: scratch memory of the backend for its longest lists, and the reserve for programs.
    EXPECT_LE(grown, p.total - (p.fixed - p.programs) + 256 * 1024) << policy_name(selection);
    EXPECT_GE(grown, (p.pool + p.view + p.workspace + p.io) / 2) << policy_name(selection);
    EXPECT_LE(session->allocated(), p.total);
  }
}
#endif

TEST(Planner, ReleasesEverythingWithTheSession) {
  const auto device = std::make_shared<SpyDevice>(cpu());
  auto session = open_session(model().model, locret(), device);
  auto clone = must(session->clone());
  EXPECT_GT(device->live_bytes, 0u);
  session.reset();
  clone.reset();
  EXPECT_EQ(device->live_bytes, 0u);
}

TEST(Planner, NothingIsAllocatedOnceASessionIsMade) {
  for (const SessionOptions& o : policies()) {
    const auto device = std::make_shared<SpyDevice>(cpu());
    const auto session = open_session(model().model, o, device);
    must(session->set_sampler({.temperature = 1, .repeat_penalty = 1.1f}));
    const std::vector<int32_t> tokens = seeded_tokens(60), scored = seeded_tokens(20);
    std::vector<float> log_probs(scored.size()), kept(95), attended(95);
    const uint64_t on_device = device->allocations, on_host = g_allocations;
    must(session->feed(tokens));
    must(session->flush());
    must(session->score(scored, log_probs));
    for (int i = 0; i < 15; ++i) must(session->step());
    // With adore, each token releases an entry that it attended to.
    const bool releases = o.retention == Retention::kAdore;
    must(session->kept_by_position(kept.data(), o.watch && !releases ? attended.data() : nullptr));
    if (!releases) must(session->rewind(must(session->stats()).position - 1));
    must(session->reset());
    EXPECT_EQ(device->allocations, on_device);
    EXPECT_EQ(g_allocations, on_host);
  }
}

TEST(Planner, ARefusedAllocationLeaksNothing) {
  const auto device = std::make_shared<SpyDevice>(cpu());
  for (uint64_t i = 0;; ++i) {
    device->allocations = 0;
    device->fail_allocation = i;
    const auto session = Session::create(model().model, device, locret());
    if (session.ok()) {
      EXPECT_GE(i, 3u);  // pool, workspace and io
      break;
    }
    EXPECT_EQ(session.status().code(), Code::kOutOfMemory) << session.status().message();
    EXPECT_EQ(device->live_bytes, 0u) << "allocation " << i;
  }
}

// A device may lack ops that few sessions need; such sessions are refused before they allocate anything.
TEST(Planner, NamesTheOpThatADeviceLacks) {
  const auto device = std::make_shared<SpyDevice>(cpu());
  SessionOptions quest{.pool = 100, .chunk = 24, .max_new = 10, .selection = Selection::kQuest};
  quest.dense_layers = 0;
  const auto refused = [&](const SessionOptions& o, const char* op) {
    device->lacks = op;
    expect_refused(Session::create(model().model, device, o).status(), Code::kUnsupported,
                   std::string("cannot compute ") + op + ",");
    EXPECT_EQ(device->live_bytes, 0u);
  };
  for (const char* op :
       {"embed", "rms_norm", "linear", "glu", "activation", "kv_append", "cis_store", "kv_view", "attention",
        "kv_compact", "query_gate", "token_score", "vote", "top_k", "arg_max", "log_prob", "copy"})
    refused(selecting(locret()), op);
  for (const char* op : {"page_bounds", "page_score", "vote", "top_k"}) refused(quest, op);
  for (const char* op : {"page_bounds", "page_score", "token_score", "query_gate", "top_k", "cis_store"}) {
    device->lacks = op;
    must(Session::create(model().model, device, {.pool = 100, .chunk = 24, .max_new = 10}));
  }
}

TEST(Planner, ACardIsAskedForNoMoreThanItHasFree) {
  const auto device = std::make_shared<SpyDevice>(cpu());
  device->discrete = true;
  const MemoryPlan plan = must(make_plan(*model().model, *device, locret()));
  const uint64_t needed = plan.total - (plan.fixed - plan.programs);
  device->free_bytes = needed - 1;
  const Status refused = Session::create(model().model, device, locret()).status();
  EXPECT_EQ(refused.code(), Code::kOutOfMemory);
  EXPECT_NE(refused.message().find("free, but this session needs"), std::string::npos) << refused.message();
  EXPECT_EQ(device->allocations, 0u);
  device->free_bytes = needed;
  must(Session::create(model().model, device, locret()));
  device->discrete = false;  // the processor's memory is allocated when it is used
  device->free_bytes = 0;
  must(Session::create(model().model, device, locret()));
}

TEST(Planner, KnowsTheLargestPositionThatReadingUses) {
  std::vector<SessionOptions> all;
  for (const SessionOptions& o : policies()) {
    if (o.positions == Positions::kOriginal || o.selection != Selection::kDense) continue;
    all.push_back(o);
    if (o.retention == Retention::kNone) continue;
    all.push_back(o);
    all.back().chunk = 80;  // more than the room after the generated tokens
  }
  for (const SessionOptions& o : all) {
    const auto device = std::make_shared<SpyDevice>(cpu());
    const auto session = open_session(model().model, o, device);
    const uint32_t bound = session->plan().largest_position, layers = model().model->shape.layers;
    uint32_t largest = 0;
    device->before_submit = [&](const Program& program, const StepParams& step,
                                std::span<const HeadState> heads) {
      if (program.segments <= layers) return;  // not a chunk
      for (const HeadState& head : heads) largest = std::max(largest, head.n_entries + step.n_rows - 1);
    };
    const int turns = o.retention == Retention::kNone ? 1 : 5;
    for (int turn = 0; turn < turns; ++turn) {
      must(session->feed(seeded_tokens(100)));
      for (int i = 0; i < 10 + 3 * turn; ++i) must(session->step());
    }
    EXPECT_LE(largest, bound);
    EXPECT_GE(largest + 16, bound);  // almost reached, so the bound is tight
  }
}

// ---- budgets ----

TEST(Planner, StaysWithinAnyBudgetWithTheLargestPool) {
  for (SessionOptions o : policies()) {
    o.pool = 0;
    o.budget = 1;
    const uint64_t least = 1 + plan(o).status().bytes_missing();
    uint32_t before = 0;
    for (uint64_t extra = 0; extra < 400'000; extra += 7'919) {
      o.pool = 0;
      o.budget = least + extra;
      const MemoryPlan p = must(plan(o));
      ASSERT_LE(p.total, o.budget);
      ASSERT_EQ(must(largest_pool(*model().model, *cpu(), o)), p.options.pool);
      ASSERT_GE(p.options.pool, before);
      before = o.pool = p.options.pool;
      ASSERT_EQ(must(plan(o)).total, p.total);
      ++o.pool;
      const auto larger = plan(o);
      ASSERT_FALSE(larger.ok()) << o.pool;
      ASSERT_EQ(larger.status().code(), Code::kBudget);
    }
    EXPECT_GT(before, 100u);
  }
}

TEST(Planner, OneByteLessIsRefusedWithWhatIsMissingAndWhatWouldFit) {
  for (SessionOptions o : policies()) {
    const uint64_t total = must(plan(o)).total;
    o.budget = total;
    EXPECT_TRUE(plan(o).ok());
    o.budget = total - 1;
    const Status refused = plan(o).status();
    EXPECT_EQ(refused.bytes_missing(), 1u);
    const uint32_t fits = must(largest_pool(*model().model, *cpu(), o));
    EXPECT_LT(fits, o.pool);
    expect_refused(refused, Code::kBudget, "lacks 1 B");
    expect_refused(refused, Code::kBudget, "a pool of " + std::to_string(fits) + " would fit");
    EXPECT_EQ(Session::create(model().model, cpu(), o).status().code(), Code::kBudget);
    o.pool = fits;
    EXPECT_TRUE(Session::create(model().model, cpu(), o).ok());
  }
}

TEST(Planner, ABudgetTooSmallForAnyPoolSaysSo) {
  SessionOptions o = locret();
  o.budget = 1000;
  const Status refused = plan(o).status();
  expect_refused(refused, Code::kBudget, "no pool fits");
  o.budget = 0;
  EXPECT_EQ(refused.bytes_missing(), must(plan(o)).total - 1000);
}

TEST(Planner, APlanThatIsRefusedAllocatesNothing) {
  const auto device = std::make_shared<SpyDevice>(cpu());
  SessionOptions o = locret();
  o.budget = 1000;
  EXPECT_FALSE(Session::create(model().model, device, o).ok());
  EXPECT_EQ(device->allocations, 0u);
}

TEST(Planner, DenseAttentionTakesNoLargerPoolThanItCanUse) {
  SessionOptions o{.budget = uint64_t{1} << 40, .chunk = 24, .max_new = 100};
  EXPECT_EQ(must(plan(o)).capacity, 4096u);  // the number of trained positions
  o.context = 512;
  EXPECT_EQ(must(plan(o)).capacity, 512u);
}

TEST(Planner, AnEvictingPoolStaysWithinTheTrainedPositions) {
  SessionOptions o = locret();
  o.pool = 0;
  o.budget = uint64_t{1} << 40;
  EXPECT_EQ(must(plan(o)).largest_position, 4095u);
}

TEST(Planner, TheLargestPoolNeedsABudget) {
  expect_refused(largest_pool(*model().model, *cpu(), locret()).status(), Code::kInvalidArgument, "budget");
}

// ---- defaults ----

TEST(Planner, DecidesWhatIsLeftOpen) {
  const SessionOptions window = must(resolve(*model().model, {.retention = Retention::kWindow}));
  EXPECT_EQ(window.protect_init, 4u);
  EXPECT_EQ(window.stabilizers, 0u);
  EXPECT_EQ(window.local, 100u);
  EXPECT_EQ(window.max_new, 256u);
  // Evictions are at least 64 tokens apart.
  for (const auto& [local, max_new, raised] : {std::tuple{0u, 8u, 64u}, {40u, 8u, 24u}, {60u, 8u, 8u}})
    EXPECT_EQ(must(resolve(*model().model,
                           {.retention = Retention::kWindow, .pool = 80, .local = local, .max_new = max_new}))
                  .max_new,
              raised);
  EXPECT_EQ(window.chunk, 1024u);

  SessionOptions o{.retainer = model().retainer, .retention = Retention::kLocret, .pool = 400};
  const SessionOptions heads = must(resolve(*model().model, o));
  EXPECT_EQ(heads.stabilizers, 100u);  // a quarter, if the file does not set it
  for (int32_t retention = 1; policy_name(Retention{retention}); ++retention) {
    SessionOptions asked{.retention = Retention{retention}};
    if (asked.retention == Retention::kLocret || asked.retention == Retention::kMix)
      asked.retainer = model().retainer;  // whose file does not set it
    if (asked.retention == Retention::kAdore) asked.retainer = model().controller;
    EXPECT_EQ(must(resolve(*model().model, asked)).protect_init, 4u) << policy_name(asked.retention);
  }
  o.selection = Selection::kTokenSelect;
  const SessionOptions select = must(resolve(*model().model, o));
  EXPECT_EQ(select.select_k, 2048u);
  EXPECT_EQ(select.select_init, 128u);
  EXPECT_EQ(select.select_local, 512u);
  EXPECT_EQ(select.select_prefill, 0u);  // the pool already bounds the work
  EXPECT_EQ(select.vote, VoteScope::kGroup);
  EXPECT_EQ(select.chunk, 1024u);
  const SessionOptions alone = must(resolve(*model().model, {.selection = Selection::kTokenSelect}));
  EXPECT_EQ(alone.select_prefill, 1u);  // the published method
  EXPECT_EQ(alone.vote, VoteScope::kLayer);
  EXPECT_EQ(alone.chunk, 512u);  // no more than the local window

  const SessionOptions dense = must(resolve(*model().model, {}));
  EXPECT_EQ(dense.local, 0u);
  EXPECT_EQ(dense.pool + dense.max_new, 4096u);
}

TEST(Planner, SaysWhetherSelectingPays) {
  EXPECT_FALSE(must(plan(locret())).selection_pays);
  SessionOptions o = selecting(locret());
  o.select_k = 40;  // 54 entries attended; it pays above 2 * 54 - 14 = 94
  EXPECT_TRUE(must(plan(o)).selection_pays);
  o.pool = 30;
  o.local = 52;
  EXPECT_FALSE(must(plan(o)).selection_pays);  // 94 entries
  o.local = 53;
  EXPECT_TRUE(must(plan(o)).selection_pays);
}

// ---- what contradicts itself ----

TEST(Planner, RefusesCombinationsThatContradictThemselves) {
  const auto refused = [](SessionOptions o, const std::string& part, auto change) {
    change(o);
    expect_refused(plan(o).status(), Code::kInvalidArgument, part);
    EXPECT_EQ(Session::create(model().model, cpu(), o).status().code(), Code::kInvalidArgument);
  };
  refused(locret(), "heads", [](SessionOptions& o) { o.retainer = nullptr; });
  refused(locret(), "stabilizers", [](SessionOptions& o) { o.stabilizers = 60; });
  refused(locret(), "protected first", [](SessionOptions& o) { o.protect_init = 52; });
  refused(locret(), "protected first",
          [](SessionOptions& o) { o.stabilizers = o.protect_init = UINT32_MAX - 1; });
  refused(selecting(locret()), "cosine", [](SessionOptions& o) { o.select_theta = -1.01f; });
  refused(selecting(locret()), "cosine",
          [](SessionOptions& o) { o.select_theta = std::numeric_limits<float>::quiet_NaN(); });
  for (auto field : {&SessionOptions::pool, &SessionOptions::chunk, &SessionOptions::local,
                     &SessionOptions::max_new, &SessionOptions::select_k, &SessionOptions::select_init,
                     &SessionOptions::select_local, &SessionOptions::context, &SessionOptions::vote_window})
    refused(selecting(locret()), "the largest is", [&](SessionOptions& o) { o.*field = UINT32_MAX - 1; });
}

TEST(Planner, LargeCountsDoNotOverflow) {
  SessionOptions o = selecting(locret());
  o.pool = o.max_new = o.local = o.select_k = 1u << 28;
  o.budget = uint64_t{1} << 36;
  EXPECT_EQ(plan(o).status().code(), Code::kBudget) << plan(o).status().message();
  // Two layers and two heads with keys and values of 8 halves take 96 GiB for 3 * 2^28 entries; positions,
  // scores, views and votes add to that.
  o.budget = 0;
  EXPECT_GT(must(plan(o)).total, uint64_t{96} << 30);
}

// 2^27 entries of 32 heads are the most that 32 bits can count. Keys and values of an entry are 8 halves
// each.
TEST(Planner, EntriesOfManyHeadsDoNotOverflow) {
  const SeededModel many = seeded_model({.heads = 32, .kv_heads = 32, .context_length = 1u << 28});
  const SessionOptions o{.budget = uint64_t{16} << 30, .chunk = 32, .max_new = 8};
  const MemoryPlan p = must(make_plan(*many.model, *cpu(), o));
  EXPECT_LT(p.options.pool, o.budget / (2 * 32 * 2 * 8 * sizeof(uint16_t)));
  EXPECT_LE(p.total, o.budget);

  const SeededModel wide = seeded_model({.window = 1u << 30});
  const Status refused = make_plan(*wide.model, *cpu(), {.pool = 60}).status();
  EXPECT_EQ(refused.code(), Code::kUnsupported);
  EXPECT_NE(refused.message().find("the heads of a layer cannot hold more than"), std::string::npos)
      << refused.message();
}

TEST(Planner, AVocabularyAloneHasNoPlan) {
  GgufWriter w;
  w.set("general.architecture", "llama")
      .set("tokenizer.ggml.model", "gpt2")
      .set("tokenizer.ggml.pre", "default");
  w.set("tokenizer.ggml.tokens", std::vector<std::string>{"a", "b"});
  w.set("tokenizer.ggml.token_type", std::vector<int32_t>{1, 1});
  w.set("tokenizer.ggml.merges", std::vector<std::string>{});
  const FileBytes bytes = w.bytes();
  const auto vocabulary = must(Model::open(lend(bytes), "vocabulary.gguf"));
  expect_refused(make_plan(*vocabulary, *cpu(), {}).status(), Code::kUnsupported,
                 "vocabulary.gguf holds a vocabulary");
}

}  // namespace
}  // namespace thimble::test
