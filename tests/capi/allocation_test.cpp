// Tests memory: nothing is allocated after creation, every allocation may fail, and the plan equals the
// memory that is held.
#include <fstream>
#include <functional>

#include "tests/capi/handles.h"
#include "tests/support/counting_allocator.h"

namespace thimble {
namespace {

uint64_t calls() { return g_allocations.calls; }
int64_t live_bytes() { return g_allocations.live_bytes; }

TEST(CountingAllocator, SeesTheLibraryAndFailsIt) {
  const FileBytes bytes = small_model().bytes();
  ModelHandle model;
  Error e;
  const uint64_t before = calls();
  ASSERT_EQ(try_open(bytes, model, e), THIMBLE_OK) << e.message;
  EXPECT_GT(calls() - before, kSmallVocab);
  fail_allocation(1);
  EXPECT_EQ(try_open(bytes, model, e), THIMBLE_OUT_OF_MEMORY);
  EXPECT_TRUE(allocation_failed(1));
  expect_sentence(e);
}

// ---- nothing allocates after creation ----

struct Policy {
  const char* name;
  int32_t retention, selection, retain_scope, vote, positions;
  bool uneven = false;  // heads that keep different numbers of entries
};
const Policy kPolicies[] = {
    {"None", THIMBLE_RETENTION_NONE, THIMBLE_SELECTION_DENSE, 0, 0, 0},
    {"Window", THIMBLE_RETENTION_WINDOW, THIMBLE_SELECTION_DENSE, 0, 0, 0},
    {"WindowAtOriginalPositions", THIMBLE_RETENTION_WINDOW, THIMBLE_SELECTION_DENSE, 0, 0,
     THIMBLE_POSITIONS_ORIGINAL},
    {"Random", THIMBLE_RETENTION_RANDOM, THIMBLE_SELECTION_DENSE, THIMBLE_RETAIN_LAYER, 0, 0},
    {"Locret", THIMBLE_RETENTION_LOCRET, THIMBLE_SELECTION_DENSE, 0, 0, 0},
    {"LocretWithSelection", THIMBLE_RETENTION_LOCRET, THIMBLE_SELECTION_TOKENSELECT, 0, THIMBLE_VOTE_GROUP,
     0},
    {"SelectionByLayer", THIMBLE_RETENTION_NONE, THIMBLE_SELECTION_TOKENSELECT, 0, THIMBLE_VOTE_LAYER, 0},
    {"Quest", THIMBLE_RETENTION_NONE, THIMBLE_SELECTION_QUEST, 0, 0, 0},
    {"WindowWithQuest", THIMBLE_RETENTION_WINDOW, THIMBLE_SELECTION_QUEST, 0, 0, 0},
    {"UnevenHeads", THIMBLE_RETENTION_LOCRET, THIMBLE_SELECTION_DENSE, 0, 0, 0, true},
    {"UnevenHeadsWithSelection", THIMBLE_RETENTION_LOCRET, THIMBLE_SELECTION_TOKENSELECT, 0, 0, 0, true},
};

class Policies : public testing::TestWithParam<Policy> {
 protected:
  thimble_session_options options() const {
    const Policy& policy = GetParam();
    thimble_session_options o = window_options();
    o.heads = policy.uneven ? uneven_.get() : small_.heads.get();
    if (policy.uneven) o.pool = 128;  // a head keeps at least 64
    o.retention = policy.retention;
    o.retain_scope = policy.retain_scope;
    o.selection = policy.selection;
    o.vote = policy.vote;
    o.positions = policy.positions;
    o.select_init = 4;
    o.select_k = 16;
    o.select_local = 16;
    o.select_page = 4;
    o.dense_layers = 1;
    o.select_prefill = policy.selection == THIMBLE_SELECTION_TOKENSELECT;
    o.select_theta = 0.5f;
    o.watch = 1;
    if (policy.retention == THIMBLE_RETENTION_NONE) o.pool = 400;
    return o;
  }
  SmallModel small_;
  FileBytes uneven_bytes_ = uneven_heads().bytes();
  HeadsHandle uneven_ = open_heads(small_.model, uneven_bytes_);
};

// Calls every function that a session offers for reading and answering.
void use(thimble_session* s, const Tokens& prompt, std::vector<float>& log_probs, Tokens& positions) {
  Error e;
  int32_t token = 0;
  char text[16];
  uint64_t count = 0;
  uint32_t vocab = 0;
  const float* values = nullptr;
  thimble_stats now = {};
  now.struct_size = sizeof now;
  thimble_memory held = {};
  held.struct_size = sizeof held;
  EXPECT_OK(thimble_session_feed(s, prompt.data(), 150, &e), e);
  EXPECT_OK(thimble_session_feed(s, prompt.data() + 150, prompt.size() - 150, &e), e);
  EXPECT_OK(thimble_session_flush(s, &e), e);
  EXPECT_OK(thimble_session_logits(s, &values, &vocab, &e), e);
  for (int i = 0; i < 80; ++i) {  // more than the ring of tokens to be scored, and than max_new
    EXPECT_OK(thimble_session_step(s, &token, &e), e);
    EXPECT_OK(thimble_session_text(s, token, text, sizeof text, &count, &e), e);
  }
  EXPECT_OK(thimble_session_accept(s, 5, &e), e);
  EXPECT_OK(thimble_session_score(s, prompt.data(), log_probs.size(), log_probs.data(), &e), e);
  EXPECT_OK(thimble_session_kept(s, 0, 0, positions.data(), positions.size(), &count, &e), e);
  static float shares[2048], attention[2048];
  EXPECT_OK(thimble_session_kept_by_position(s, shares, attention, 2048, &count, &e), e);
  EXPECT_OK(thimble_session_stats(s, &now, &e), e);
  EXPECT_OK(thimble_session_memory(s, &held, &e), e);
  EXPECT_OK(thimble_session_feed(s, prompt.data(), 3, &e), e);
  EXPECT_OK(thimble_session_rewind(s, now.position, &e), e);
  EXPECT_OK(thimble_session_reset(s, &e), e);
}

TEST_P(Policies, AllocateNothingAfterCreation) {
  const SessionHandle session = create(small_.model, options());
  const Tokens prompt = any_tokens(250);
  std::vector<float> log_probs(40);
  Tokens positions(512);
  thimble_sampler_options sampler;
  thimble_sampler_options_init(&sampler, sizeof sampler);
  for (const float temperature : {0.0f, 1.0f}) {
    sampler.temperature = temperature;
    sampler.repeat_penalty = 1.1f;
    const uint64_t before = calls();
    Error e;
    EXPECT_OK(thimble_session_set_sampler(session.get(), &sampler, &e), e);
    use(session.get(), prompt, log_probs, positions);
    EXPECT_EQ(calls(), before);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Policies, testing::ValuesIn(kPolicies),
                         [](const auto& test) { return std::string(test.param.name); });

// ---- every allocation fails once ----

// Makes every allocation of `call` fail in turn. `call` makes something, frees it, and returns the status.
void fail_each(const char* what, uint64_t at_least, const std::function<thimble_status(Error&)>& call) {
  Error e;
  EXPECT_OK(call(e), e);
  const uint64_t first = calls();
  EXPECT_OK(call(e), e);
  const int64_t total = static_cast<int64_t>(calls() - first);
  EXPECT_GE(total, static_cast<int64_t>(at_least)) << what;
  int64_t refused = 0;
  for (int64_t n = 1; n <= total; ++n) {
    EXPECT_OK(call(e), e);
    const int64_t before = live_bytes();
    e = Error();
    fail_allocation(n);
    const thimble_status status = call(e);
    const bool failed = allocation_failed(n);
    Error none;
    // Works again, and allocates the memory that the library keeps between calls.
    EXPECT_OK(call(none), none);
    const int64_t leaked = live_bytes() - before;
    EXPECT_LE(leaked, 0) << what << ", allocation " << n << " of " << total << ": " << e.message;
    if (status == THIMBLE_OK) continue;
    ++refused;
    EXPECT_EQ(status, THIMBLE_OUT_OF_MEMORY) << what << ", allocation " << n << ": " << e.message;
    EXPECT_EQ(e.code, THIMBLE_OUT_OF_MEMORY) << what << ", allocation " << n;
    EXPECT_TRUE(failed) << what << ", allocation " << n << ": " << e.message;
    expect_sentence(e);
  }
  // Some calls may succeed without the failed allocation (a name, a thread), but most must not.
  EXPECT_GT(refused, total / 2) << what;
  testing::Test::RecordProperty(what, std::to_string(refused) + " of " + std::to_string(total));
}

TEST(FailingAllocations, OpenNoModelAndLeakNothing) {
  const FileBytes bytes = small_model().bytes();
  fail_each("open from memory", kSmallVocab, [&](Error& e) {
    ModelHandle model;
    return try_open(bytes, model, e);
  });
  const std::string path = testing::TempDir() + "thimble-allocation-small.gguf";
  small_model().write(path);
  fail_each("open from a file", kSmallVocab, [&](Error& e) {
    thimble_model* model = nullptr;
    const thimble_status status = thimble_model_open(path.c_str(), nullptr, &model, &e);
    thimble_model_free(model);
    return status;
  });
  std::remove(path.c_str());
}

TEST(FailingAllocations, OpenNoHeadsAndLeakNothing) {
  const SmallModel small;
  fail_each("open heads", 10, [&](Error& e) {
    thimble_heads* heads = nullptr;
    const thimble_status status = thimble_heads_open_buffer(small.model.get(), small.heads_bytes.data(),
                                                            small.heads_bytes.size(), &heads, &e);
    thimble_heads_free(heads);
    return status;
  });
}

thimble_session_options busy_options(const SmallModel& small) {
  thimble_session_options options = window_options();
  options.heads = small.heads.get();
  options.retention = THIMBLE_RETENTION_LOCRET;
  options.selection = THIMBLE_SELECTION_TOKENSELECT;
  options.progress = [](void*, const thimble_progress*) {};
  return options;
}

TEST(FailingAllocations, PlanAndCreateNoSessionAndLeakNothing) {
  const SmallModel small;
  const thimble_session_options options = busy_options(small);
  fail_each("plan", 5, [&](Error& e) {
    thimble_memory memory = {};
    memory.struct_size = sizeof memory;
    return thimble_session_plan(small.model.get(), &options, &memory, &e);
  });
  const Tokens prompt = any_tokens(40);
  fail_each("create", 50, [&](Error& e) {
    thimble_session* session = nullptr;
    const thimble_status status = thimble_session_create(small.model.get(), &options, &session, &e);
    if (status != THIMBLE_OK) return status;
    const SessionHandle made(session);
    return thimble_session_feed(session, prompt.data(), prompt.size(), &e);  // the result works
  });
}

TEST(FailingAllocations, CloneNothingAndLeaveTheSessionAsItWas) {
  const SmallModel small;
  const SessionHandle session = create(small.model, busy_options(small)),
                      check = create(small.model, busy_options(small));
  feed(session, any_tokens(200));
  feed(check, any_tokens(200));
  const uint64_t allocated = memory(session).allocated;
  fail_each("clone", 50, [&](Error& e) {
    thimble_session* clone = nullptr;
    const thimble_status status = thimble_session_clone(session.get(), &clone, &e);
    thimble_session_free(clone);
    return status;
  });
  EXPECT_EQ(memory(session).allocated, allocated);
  EXPECT_EQ(steps(session, 20), steps(check, 20));
}

TEST(FailingAllocations, OfTextLeakNothing) {
  const SmallModel small;
  const std::string text = "the text that is cut into tokens, then put together again";
  fail_each("text", 4, [&](Error& e) {
    int32_t ids[100];
    uint64_t count = 0, length = 0;
    const thimble_status status =
        thimble_tokenize(small.model.get(), text.data(), text.size(), 0, ids, nullptr, 100, &count, &e);
    if (status != THIMBLE_OK) return status;
    char back[100];
    return thimble_detokenize(small.model.get(), ids, count, 0, back, sizeof back, &length, &e);
  });
}

// ---- the plan is what is held ----

#if THIMBLE_COUNTS_MALLOC

// The bytes of this process's anonymous pages, as counted by the system.
int64_t resident_anonymous() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word)
    if (word == "RssAnon:") {
      int64_t kilobytes = 0;
      status >> kilobytes;
      return kilobytes * 1024;
    }
  return 0;
}

TEST_P(Policies, HoldWhatTheySayAndNoMoreThanPlanned) {
  const thimble_session_options o = options();
  const SessionHandle other = create(small_.model, o);  // the device and its threads already exist
  const int64_t before = live_bytes();
  const SessionHandle session = create(small_.model, o);
  const int64_t grown = live_bytes() - before;
  const thimble_memory held = memory(session);
  const int64_t planned = static_cast<int64_t>(held.total - held.fixed);
  const int64_t allocated = static_cast<int64_t>(held.allocated - held.fixed);
  EXPECT_LE(allocated, planned);
  EXPECT_GE(allocated, planned - static_cast<int64_t>(kProgramRoom));
  // This counts all memory from the allocators of this process, including the session's own objects, which no
  // plan counts: 16.2 KiB of them are for no policy in particular.
  EXPECT_LE(grown, planned);
  EXPECT_GE(grown, allocated);
  EXPECT_LE(grown, allocated + (20 << 10));
}

TEST(Memory, OfTheLongestProgramsIsInThePlan) {
  const ModelHandle model = open_model(demo_path());
  const HeadsHandle heads = open_heads(model, demo_heads_path());
  thimble_session_options options = default_options();
  options.threads = 2;
  options.heads = heads.get();
  options.pool = 512;
  options.chunk = options.select_local = 1024;  // one program for each possible number of rows
  options.selection = THIMBLE_SELECTION_TOKENSELECT;
  options.select_prefill = 1;
  const SessionHandle other = create(model, options);
  const int64_t before = live_bytes();
  const SessionHandle session = create(model, options);
  const int64_t grown = live_bytes() - before;
  const thimble_memory held = memory(session);
  EXPECT_LE(held.allocated, held.total);
  EXPECT_LE(grown, static_cast<int64_t>(held.total - held.fixed));
}

TEST(Memory, OfTheProcessGrowsByNoMoreThanThePlan) {
  const ModelHandle model = open_model(demo_path());
  const HeadsHandle heads = open_heads(model, demo_heads_path());
  thimble_session_options options = default_options();
  options.threads = 2;
  options.heads = heads.get();
  options.pool = 512;
  options.chunk = 256;
  options.selection = THIMBLE_SELECTION_TOKENSELECT;
  options.select_k = 128;
  options.select_init = 16;
  options.select_local = 64;
  options.watch = 1;
  const Tokens prompt = any_tokens(1500, 8192);
  std::vector<float> log_probs(50);
  Tokens positions(2048);
  const int64_t before = resident_anonymous();
  const SessionHandle session = create(model, options);
  use(session.get(), prompt, log_probs, positions);
  const int64_t grown = resident_anonymous() - before;
  const int64_t allocated = static_cast<int64_t>(memory(session).allocated),
                total = static_cast<int64_t>(memory(session).total);
  EXPECT_LE(allocated, total);
  // Room for the session's own objects, and for pages that the program itself touches meanwhile.
  const int64_t beside = 512 << 10;
  EXPECT_LE(grown, allocated + beside);
  EXPECT_GE(grown, total / 2);  // a plan that is far too large would be useless
  RecordProperty("grown", std::to_string(grown));
  RecordProperty("total", std::to_string(total));
}

#endif

}  // namespace
}  // namespace thimble
