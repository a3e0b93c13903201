// Tests interrupts, resuming, callbacks, and several callers: what a session promises besides its results.
#include <atomic>
#include <csignal>
#include <functional>
#include <thread>

#include "tests/capi/handles.h"

namespace thimble {
namespace {

// The logits after a prompt and the tokens that follow.
struct Reading {
  std::vector<float> logits;
  Tokens answer;
  std::vector<float> log_probs;
  bool operator==(const Reading&) const = default;
};

const Tokens kPrompt = any_tokens(300);
const Tokens kScored = any_tokens(40);
constexpr size_t kAnswer = 40;

// Repeats a call after THIMBLE_INTERRUPTED until it is done, and counts the interrupts.
int run(const std::function<thimble_status(thimble_error*)>& call) {
  for (int interrupts = 0;; ++interrupts) {
    Error e;
    const thimble_status status = call(&e);
    if (status == THIMBLE_INTERRUPTED && interrupts < 100000) {
      expect_sentence(e);
      continue;
    }
    EXPECT_OK(status, e);
    return interrupts;
  }
}

// Reads, answers and scores. `before` is called before every call and every repetition of it.
Reading read_all(const SessionHandle& handle, int& interrupts, const std::function<void()>& before) {
  thimble_session* s = handle.get();
  Reading reading;
  const auto call = [&](const std::function<thimble_status(thimble_error*)>& body) {
    interrupts += run([&](thimble_error* e) {
      before();
      return body(e);
    });
  };
  call([&](thimble_error* e) { return thimble_session_feed(s, kPrompt.data(), kPrompt.size(), e); });
  call([&](thimble_error* e) { return thimble_session_flush(s, e); });
  reading.logits = logits(handle);
  for (size_t i = 0; i < kAnswer; ++i) {
    int32_t token = -1;
    call([&](thimble_error* e) { return thimble_session_step(s, &token, e); });
    reading.answer.push_back(token);
    call([&](thimble_error* e) { return thimble_session_accept(s, static_cast<int32_t>(i), e); });
  }
  reading.log_probs.resize(kScored.size());
  call([&](thimble_error* e) {
    return thimble_session_score(s, kScored.data(), kScored.size(), reading.log_probs.data(), e);
  });
  return reading;
}

class Interrupt : public testing::TestWithParam<bool> {
 protected:
  // The test parameter says whether trained heads decide what stays; if not, a window does.
  thimble_session_options options() const {
    thimble_session_options o = window_options();
    if (GetParam()) {
      o.heads = small_.heads.get();
      o.retention = THIMBLE_RETENTION_LOCRET;
    }
    o.selection = THIMBLE_SELECTION_TOKENSELECT;
    o.select_init = 4;
    o.select_k = 16;
    o.select_local = 16;
    return o;
  }
  SessionHandle session() const { return create(small_.model, options()); }
  Reading undisturbed() const {
    int interrupts = 0;
    const Reading reading = read_all(session(), interrupts, [] {});
    EXPECT_EQ(interrupts, 0);
    return reading;
  }
  SmallModel small_;
};

TEST_P(Interrupt, BeforeEveryCallChangesNothing) {
  const SessionHandle handle = session();
  int interrupts = 0, calls = 0;
  const Reading reading = read_all(handle, interrupts, [&] {
    if (++calls % 2) thimble_session_interrupt(handle.get());
  });
  EXPECT_GE(interrupts, 80);  // flush may have nothing to do
  EXPECT_EQ(reading, undisturbed());
}

TEST_P(Interrupt, FromAnotherThreadChangesNothing) {
  const Reading expected = undisturbed();
  const SessionHandle handle = session();
  std::atomic<bool> stop = false;
  std::thread other([&] {
    while (!stop) {
      thimble_session_interrupt(handle.get());
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  // One reading takes only milliseconds, during which a busy machine may not run the other thread.
  int interrupts = 0;
  for (int reading = 0; reading < 1000 && interrupts < 10; ++reading) {
    EXPECT_EQ(read_all(handle, interrupts, [] {}), expected);
    thimble_session_reset(handle.get(), nullptr);
  }
  stop = true;
  other.join();
  EXPECT_GE(interrupts, 10);
}

TEST_P(Interrupt, FromACallbackChangesNothing) {
  thimble_session_options o = options();
  thimble_session* raw = nullptr;
  o.progress = [](void* user, const thimble_progress*) {
    thimble_session_interrupt(*static_cast<thimble_session**>(user));
  };
  o.progress_user = &raw;
  const SessionHandle handle = create(small_.model, o);
  raw = handle.get();
  int interrupts = 0;
  const Reading reading = read_all(handle, interrupts, [] {});
  EXPECT_GT(interrupts, 15);  // one per chunk
  EXPECT_EQ(reading, undisturbed());
}

INSTANTIATE_TEST_SUITE_P(Retention, Interrupt, testing::Bool(),
                         [](const auto& test) { return test.param ? "Locret" : "Window"; });

TEST(InterruptedFeed, IsAbandonedByAnyOtherCall) {
  const SmallModel small;
  const SessionHandle session = create(small.model, window_options());
  Error e;
  thimble_session_interrupt(session.get());
  EXPECT_EQ(thimble_session_feed(session.get(), kPrompt.data(), kPrompt.size(), &e), THIMBLE_INTERRUPTED);
  const uint64_t taken = stats(session).position;
  EXPECT_GT(taken, 0u);
  EXPECT_LT(taken, kPrompt.size());
  EXPECT_OK(thimble_session_flush(session.get(), &e), e);
  EXPECT_EQ(stats(session).position, taken);

  const SessionHandle check = create(small.model, window_options());
  feed(check, Tokens(kPrompt.begin(), kPrompt.begin() + static_cast<ptrdiff_t>(taken)));
  EXPECT_OK(thimble_session_flush(check.get(), &e), e);
  EXPECT_EQ(logits(session), logits(check));
  // The same tokens are now a new call.
  feed(session, kPrompt);
  EXPECT_EQ(stats(session).position, taken + kPrompt.size());
}

// A call with tokens that an interrupt stops. The first argument of each call says where they begin.
using Call = std::function<thimble_status(thimble_session*, const Tokens&, thimble_error*)>;
const std::vector<std::pair<const char*, Call>> kCallsWithTokens = {
    {"feed", [](thimble_session* s, const Tokens& t,
                thimble_error* e) { return thimble_session_feed(s, t.data(), t.size(), e); }},
    {"score",
     [](thimble_session* s, const Tokens& t, thimble_error* e) {
       std::vector<float> log_probs(t.size());
       return thimble_session_score(s, t.data(), t.size(), log_probs.data(), e);
     }},
    {"accept", [](thimble_session* s, const Tokens& t,
                  thimble_error* e) { return thimble_session_accept(s, t[0], e); }},
};

TEST(RepeatedCall, MayNotBringAnIdThatThereIsNot) {
  const SmallModel small;
  for (const auto& [name, call] : kCallsWithTokens)
    for (const int32_t wrong : {-1, int32_t(kSmallVocab), 2000000000})
      for (const size_t at : {size_t(0), kPrompt.size() - 1}) {
        SCOPED_TRACE(std::string(name) + ", " + std::to_string(wrong) + " at " + std::to_string(at));
        const SessionHandle session = create(small.model, window_options()),
                            check = create(small.model, window_options());
        Error e;
        for (const SessionHandle& s : {std::cref(session), std::cref(check)}) {
          feed(s, {1, 2, 3});
          EXPECT_OK(thimble_session_flush(s.get(), &e), e);
        }
        thimble_session_interrupt(session.get());
        ASSERT_EQ(call(session.get(), kPrompt, &e), THIMBLE_INTERRUPTED);
        Tokens tokens = kPrompt;
        if (std::string(name) == "accept") tokens.resize(1);
        tokens[std::min(at, tokens.size() - 1)] = wrong;
        EXPECT_EQ(call(session.get(), tokens, &e), THIMBLE_INVALID_ARGUMENT);
        expect_sentence(e);
        // The other call was refused, so the interrupted call may still be repeated.
        EXPECT_OK(call(session.get(), kPrompt, &e), e);
        EXPECT_OK(call(check.get(), kPrompt, &e), e);
        EXPECT_EQ(stats(session).position, stats(check).position);
        EXPECT_EQ(kept(session, 0, 0), kept(check, 0, 0));
      }
}

// A call that differs only in a token that was not taken yet is also another call.
TEST(RepeatedCall, IsAnotherOneIfAnyTokenDiffers) {
  const SmallModel small;
  const SessionHandle session = create(small.model, window_options());
  Error e;
  thimble_session_interrupt(session.get());
  EXPECT_EQ(thimble_session_feed(session.get(), kPrompt.data(), kPrompt.size(), &e), THIMBLE_INTERRUPTED);
  const uint64_t taken = stats(session).position;
  ASSERT_LT(taken, kPrompt.size());
  Tokens other = kPrompt;
  other.back() ^= 1;
  feed(session, other);
  EXPECT_EQ(stats(session).position, taken + other.size());
}

TEST(InterruptSignal, MayComeFromAHandler) {
  const SmallModel small;
  const SessionHandle session = create(small.model, window_options());
  static thimble_session* target;
  target = session.get();
  const auto previous = std::signal(SIGINT, [](int) { thimble_session_interrupt(target); });
  std::raise(SIGINT);
  std::signal(SIGINT, previous);
  Error e;
  EXPECT_EQ(thimble_session_feed(session.get(), kPrompt.data(), kPrompt.size(), &e), THIMBLE_INTERRUPTED);
  EXPECT_STREQ(thimble_status_name(e.code), "INTERRUPTED");
  EXPECT_OK(thimble_session_feed(session.get(), kPrompt.data(), kPrompt.size(), &e), e);
}

// A token whose step was interrupted is in the stream: functions that read the state finish its step first.
TEST(InterruptedStep, IsFinishedForWhoeverLooks) {
  const SmallModel small;
  const SessionHandle session = create(small.model, window_options()),
                      check = create(small.model, window_options());
  Error e;
  for (const SessionHandle& s : {std::cref(session), std::cref(check)}) {
    feed(s, kPrompt);
    EXPECT_OK(thimble_session_flush(s.get(), &e), e);
  }
  const int32_t next = step(check);
  const auto interrupt_step = [&] {
    int32_t token = -1;
    thimble_session_interrupt(session.get());
    EXPECT_EQ(thimble_session_step(session.get(), &token, &e), THIMBLE_INTERRUPTED);
    EXPECT_EQ(token, -1);
  };
  interrupt_step();
  EXPECT_EQ(stats(session).position, stats(check).position);
  EXPECT_EQ(stats(session).waiting, 1u);
  EXPECT_EQ(kept(session, 0, 0), kept(check, 0, 0));
  EXPECT_EQ(stats(session).waiting, 0u);
  EXPECT_EQ(step(session), next);

  const int32_t second = step(check);
  interrupt_step();
  EXPECT_EQ(logits(session), logits(check));
  EXPECT_EQ(step(session), second);
  EXPECT_EQ(stats(session).position, stats(check).position);
}

TEST(Progress, CountsUpToAllTokens) {
  const SmallModel small;
  std::vector<thimble_progress> seen;
  thimble_session_options options = window_options();
  options.progress = [](void* user, const thimble_progress* now) {
    EXPECT_EQ(now->struct_size, sizeof *now);
    static_cast<std::vector<thimble_progress>*>(user)->push_back(*now);
  };
  options.progress_user = &seen;
  const SessionHandle session = create(small.model, options);
  feed(session, kPrompt);
  Error e;
  EXPECT_OK(thimble_session_flush(session.get(), &e), e);
  ASSERT_GE(seen.size(), kPrompt.size() / 16);
  for (size_t i = 0; i < seen.size(); ++i) {
    EXPECT_GT(seen[i].done, i ? seen[i - 1].done : 0);
    EXPECT_EQ(seen[i].total, kPrompt.size());
    EXPECT_LE(seen[i].pool_entries, seen[i].pool_capacity);
    EXPECT_GT(seen[i].tokens_per_second, 0);
  }
  EXPECT_EQ(seen.back().done, kPrompt.size());
}

TEST(Busy, IsWhatASecondThreadGets) {
  const SmallModel small;
  struct Shared {
    thimble_session* session = nullptr;
    thimble_status from_thread = THIMBLE_OK, from_callback = THIMBLE_OK, clone = THIMBLE_OK;
    uint64_t position_there = 77;
    Error error;
  } shared;
  thimble_session_options options = window_options();
  options.progress_user = &shared;
  options.progress = [](void* user, const thimble_progress*) {
    Shared& s = *static_cast<Shared*>(user);
    std::thread([&] {
      s.from_thread = thimble_session_feed(s.session, kPrompt.data(), 1, &s.error);
      thimble_stats now = {};
      now.struct_size = sizeof now;
      now.position = s.position_there;
      thimble_session_stats(s.session, &now, nullptr);
      s.position_there = now.position;
    }).join();
    s.from_callback = thimble_session_flush(s.session, nullptr);
    thimble_session* clone = nullptr;
    s.clone = thimble_session_clone(s.session, &clone, nullptr);
  };
  const SessionHandle session = create(small.model, options);
  shared.session = session.get();
  feed(session, kPrompt);
  EXPECT_EQ(shared.from_thread, THIMBLE_BUSY);
  expect_sentence(shared.error);
  EXPECT_EQ(shared.from_callback, THIMBLE_BUSY);
  EXPECT_EQ(shared.clone, THIMBLE_BUSY);
  EXPECT_EQ(shared.position_there, 77u);
  EXPECT_EQ(stats(session).position, kPrompt.size());
}

TEST(Busy, ThreadsThatCollideLoseNoToken) {
  const SmallModel small;
  const SessionHandle session = create(small.model, window_options());
  std::atomic<uint64_t> accepted = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      const int32_t token = 1;
      for (int i = 0; i < 500; ++i) {
        const thimble_status status = thimble_session_feed(session.get(), &token, 1, nullptr);
        if (status == THIMBLE_OK)
          ++accepted;
        else
          EXPECT_EQ(status, THIMBLE_BUSY);
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(accepted, 0u);
  EXPECT_EQ(stats(session).position, accepted);
}

TEST(Models, ServeManyThreadsAtOnce) {
  const SmallModel small;
  int none = 0;
  const SessionHandle alone = create(small.model, window_options());
  const Reading expected = read_all(alone, none, [] {});
  std::vector<Reading> readings(3);
  std::vector<std::thread> threads;
  for (Reading& reading : readings)
    threads.emplace_back([&] {
      int interrupts = 0;
      const SessionHandle session = create(small.model, window_options());
      reading = read_all(session, interrupts, [] {});
      EXPECT_EQ(detokenize(small.model, tokenize(small.model, "the same text")), "the same text");
    });
  for (std::thread& thread : threads) thread.join();
  for (const Reading& reading : readings) EXPECT_EQ(reading, expected);
}

}  // namespace
}  // namespace thimble
