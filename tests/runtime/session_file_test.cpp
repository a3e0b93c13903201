// Tests saved sessions: a restored session continues exactly like the saved one, bit for bit. Files that do
// not fit are refused by name, damaged files leave the session as it was, and killing the process leaves a
// complete file.
#include "runtime/session_file.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>

#ifndef _WIN32
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include "base/new_file.h"
#include "tests/support/device_test_name.h"
#include "tests/support/saved_sessions.h"
#include "tests/support/synthetic_model.h"
#include "tests/support/vulkan_messages.h"

namespace thimble::test {
namespace {

// The moments at which sessions are saved: while tokens wait; after a prompt; in an answer whose last tokens
// have no scores yet; in a second turn; and when a pool is full, so that the next thing is an eviction.
const std::function<void(Session&)> kMoments[] = {
    [](Session& s) {
      must(s.set_sampler(kWarm));
      must(s.feed(seeded_tokens(150)));
    },
    [](Session& s) { must(s.flush()); },
    [](Session& s) {
      for (int i = 0; i < 7; ++i) must(s.step());
    },
    [](Session& s) {
      must(s.accept(5));
      must(s.feed(seeded_tokens(9, 64, 12)));
      must(s.feed(seeded_tokens(60, 64, 13)));
    },
    [](Session& s) {
      for (int i = 0; i < 142 && must(s.stats()).entries < s.plan().capacity; ++i) must(s.step());
    },
};

// At every moment, a restored session continues like one that was never saved.
void expect_to_go_on(const SeededModel& m, const SessionOptions& options) {
  const auto saver = open_session(m.model, options);
  for (size_t moment = 0; moment < std::size(kMoments); ++moment) {
    SCOPED_TRACE(moment);
    kMoments[moment](*saver);
    const SessionBytes bytes = save(*saver);
    const auto unbroken = open_session(m.model, options), restored = open_session(m.model, options);
    for (size_t i = 0; i <= moment; ++i) kMoments[i](*unbroken);
    read(*restored, seeded_tokens(77, 64, 14));  // restoring discards this
    restore(*restored, bytes);
    ASSERT_EQ(save(*restored), bytes);
    ASSERT_EQ(kept(*restored), kept(*unbroken));
    const Outcome expected = go_on(*unbroken);
    ASSERT_EQ(go_on(*restored), expected);
  }
  // Saving does not change the session that was saved each time.
  const auto unbroken = open_session(m.model, options);
  for (const auto& moment : kMoments) moment(*unbroken);
  ASSERT_EQ(go_on(*saver), go_on(*unbroken));
}

TEST(SessionFile, GoesOnBitForBitWithEveryPolicy) {
  const SeededModel m = seeded_model();
  for_policies(m, [&](const SessionOptions& o) { expect_to_go_on(m, o); });
}

TEST(SessionFile, GoesOnBitForBitInModelsWithWindows) {
  const SeededModel m = seeded_model({.layers = 4, .covers_windows = false, .window = 20});
  for_policies(m, [&](const SessionOptions& o) { expect_to_go_on(m, o); });
}

TEST(SessionFile, GoesOnBitForBitWithUnequalRuns) {
  for (const char* kind : {"", "linear"}) {
    const SeededModel m = seeded_model({.kind = kind, .shares = {0.3f, 1.7f, 1.2f, 0.8f}});
    for (const Selection selection : {Selection::kDense, Selection::kTokenSelect, Selection::kQuest}) {
      SessionOptions o = selecting(retaining(m, Retention::kLocret), selection, false);
      o.pool = 150;
      expect_to_go_on(m, o);
    }
  }
}

TEST(SessionFile, GoesOnAtOriginalPositionsAndWithALayersVote) {
  const SeededModel m = seeded_model();
  SessionOptions o = selecting(retaining(m, Retention::kWindow), Selection::kTokenSelect, false);
  o.positions = Positions::kOriginal;
  o.vote = VoteScope::kLayer;
  o.context = 3000;
  o.retain_scope = RetainScope::kLayer;
  expect_to_go_on(m, o);
}

// Saving can take long, so an interrupt also ends that.
TEST(SessionFile, StopsSavingWhereItIsInterrupted) {
  const SeededModel m = seeded_model();
  const auto session = open_session(m.model, retaining(m, Retention::kLocret));
  must(session->feed(seeded_tokens(150)));
  const SessionBytes whole = save(*session);
  size_t written = 0;
  const Status status = session->save(
      [&](const void*, size_t size) {
        if (!written) session->interrupt();
        written += size;
        return Status();
      },
      {});
  EXPECT_EQ(status.code(), Code::kInterrupted);
  EXPECT_LT(written, whole.size());
  EXPECT_EQ(save(*session), whole);  // the interrupt is over
}

// An interrupted call is finished before the session is saved, as before any other call. The restored session
// continues in the same way.
TEST(SessionFile, SavesAfterAnInterrupt) {
  const SeededModel m = seeded_model();
  const SessionOptions o = retaining(m, Retention::kLocret);
  const auto session = open_session(m.model, o), restored = open_session(m.model, o);
  session->set_progress([&](const Progress&) { session->interrupt(); });
  EXPECT_EQ(session->feed(seeded_tokens(150)).code(), Code::kInterrupted);
  session->set_progress({});
  SessionBytes bytes;
  for (;;) {  // the interrupt may stop the chunk that is finished first
    bytes.clear();
    const Status status = session->save(
        [&](const void* data, size_t size) {
          const std::byte* from = static_cast<const std::byte*>(data);
          bytes.insert(bytes.end(), from, from + size);
          return Status();
        },
        {});
    if (status.code() != Code::kInterrupted) {
      must(status);
      break;
    }
  }
  restore(*restored, bytes);
  const uint64_t taken = must(restored->stats()).position;
  EXPECT_GT(taken, 32u);
  EXPECT_LT(taken, 150u);
  const auto rest = seeded_tokens(150);
  must(restored->feed(std::span(rest).subspan(taken)));
  const auto unbroken = open_session(m.model, o);
  must(unbroken->feed(rest));
  EXPECT_EQ(go_on(*restored), go_on(*unbroken));
}

TEST(SessionFile, RewindsAsTheSavedOneWould) {
  const SeededModel m = seeded_model();
  const SessionOptions o = retaining(m, Retention::kLocret);
  const auto session = open_session(m.model, o), restored = open_session(m.model, o);
  must(session->set_sampler(kWarm));
  read(*session, seeded_tokens(100));
  for (int i = 0; i < 9; ++i) must(session->step());
  restore(*restored, save(*session));
  for (Session* s : {session.get(), restored.get()}) {
    EXPECT_EQ(s->rewind(20).code(), Code::kCannotRewind);
    must(s->rewind(104));
    accept(*s, 7);
  }
  EXPECT_EQ(go_on(*restored), go_on(*session));
}

TEST(SessionFile, HoldsEntriesThatAreHeldAndNoMore) {
  const SeededModel m = seeded_model();
  const auto session = open_session(m.model, {.pool = 100'000, .chunk = 32, .max_new = 32});
  must(session->feed(seeded_tokens(50)));
  const size_t few = save(*session).size();
  must(session->flush());
  const size_t flushed = save(*session).size();
  must(session->feed(seeded_tokens(1032)));
  const size_t many = save(*session).size();
  // K and V of 8 channels of 2 bytes, and a position, in 2 layers of 2 heads. Nothing is evicted, so no
  // scores are stored.
  constexpr size_t kEntry = (2 * 8 * 2 + 4) * 2 * 2;
  EXPECT_EQ(flushed, few + 18 * kEntry + 64 * sizeof(float) - 18 * sizeof(int32_t));
  EXPECT_LT(many, flushed + 1033 * kEntry + 64 * sizeof(int32_t));
  EXPECT_LT(many, session->plan().pool / 50);
}

TEST(SessionFile, CarriesANoteAndTellsWhatItIs) {
  const SeededModel m = seeded_model();
  const auto session = open_session(m.model, retaining(m, Retention::kLocret));
  must(session->feed(seeded_tokens(150)));
  const std::string note("any bytes\0 \xff of the caller's", 28);
  const SessionBytes bytes = save(*session, note, "\xe2\x82");
  const SessionFile file = must(SessionFile::open(lend(bytes), "saved"));
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(file.note.data()), file.note.size()), note);
  must(file.check_body());
  const nlohmann::json info = nlohmann::json::parse(file.info());
  EXPECT_EQ(info["version"], 1);
  EXPECT_EQ(info["bytes"], bytes.size());
  EXPECT_EQ(info["position"], 150);
  EXPECT_EQ(info["read"], 128);
  EXPECT_EQ(info["waiting"], 22);
  EXPECT_EQ(info["entries"], 70);
  EXPECT_EQ(info["entries_of_all_heads"], 280);
  EXPECT_EQ(info["heads"], 4);
  EXPECT_EQ(info["note_bytes"], note.size());
  EXPECT_EQ(info["settings"]["retention"], "locret");
  EXPECT_EQ(info["settings"]["pool"], "70");
  EXPECT_EQ(must(session->restore(lend(bytes), "saved")), "\xe2\x82");
}

// ---- what does not belong together ----

std::string refusal(Session& session, const SessionBytes& bytes, Code code = Code::kMismatch) {
  const SessionBytes before = save(session);
  const Status status = session.restore(lend(bytes), "saved").status();
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_EQ(save(session), before);
  return status.message();
}

TEST(SessionFile, NamesTheSettingThatDiffers) {
  const SeededModel m = seeded_model({.shares = {0.3f, 1.7f, 1.2f, 0.8f}});
  SessionOptions base = selecting(retaining(m, Retention::kLocret), Selection::kTokenSelect, false);
  base.pool = 150;
  base.retainer = seeded_model().retainer;
  base.vote = VoteScope::kGroup;
  const auto saver = open_session(m.model, base);
  must(saver->feed(seeded_tokens(300)));
  const SessionBytes bytes = save(*saver);
  const struct {
    const char* expected;
    std::function<void(SessionOptions&)> change;
  } kCases[] = {
      {"retention locret, this session has window", [](auto& o) { o.retention = Retention::kWindow; }},
      {"retain_scope head, this session has layer", [](auto& o) { o.retain_scope = RetainScope::kLayer; }},
      {"pool 150, this session has 151", [](auto& o) { o.pool = 151; }},
      {"chunk 32, this session has 33", [](auto& o) { o.chunk = 33; }},
      {"stabilizers 8, this session has 9", [](auto& o) { o.stabilizers = 9; }},
      {"local 12, this session has 13", [](auto& o) { o.local = 13; }},
      {"protect_init 4, this session has 2", [](auto& o) { o.protect_init = 2; }},
      {"max_new 60, this session has 61", [](auto& o) { o.max_new = 61; }},
      {"selection tokenselect, this session has dense", [](auto& o) { o.selection = Selection::kDense; }},
      {"select_k 24, this session has 25", [](auto& o) { o.select_k = 25; }},
      {"select_init 4, this session has 5", [](auto& o) { o.select_init = 5; }},
      {"select_local 32, this session has 33", [](auto& o) { o.select_local = 33; }},
      {"select_theta 0.5, this session has 0.50000006", [](auto& o) { o.select_theta = 0.50000006f; }},
      {"vote group, this session has layer", [](auto& o) { o.vote = VoteScope::kLayer; }},
      {"vote_scale none, this session has sqrt", [](auto& o) { o.vote_scale = VoteScale::kSqrt; }},
      {"vote_window 0, this session has 3", [](auto& o) { o.vote_window = 3; }},
      {"select_prefill 0, this session has 1", [](auto& o) { o.select_prefill = 1; }},
      {"positions list, this session has original", [](auto& o) { o.positions = Positions::kOriginal; }},
      {"context 0, this session has 500", [](auto& o) { o.context = 500; }},
      {"seed 3, this session has 4", [](auto& o) { o.seed = 4; }},
      {"pool of layer 1, KV head 0 150, this session has 149",
       [](auto& o) {
         o.keeps = {150, 150, 149, 151};
       }},
  };
  for (const auto& c : kCases) {
    SessionOptions o = base;
    c.change(o);
    const auto other = open_session(m.model, o);
    EXPECT_NE(refusal(*other, bytes).find(std::string("saved was saved with ") + c.expected),
              std::string::npos)
        << refusal(*other, bytes);
  }
  // Sessions with other heads or other models.
  SessionOptions o = base;
  o.retainer = seeded_model({.seed = 2}).retainer;
  EXPECT_NE(refusal(*open_session(m.model, o), bytes).find("saved with heads "), std::string::npos);
  const SeededModel other = seeded_model({.seed = 2}), longer = seeded_model({.vocab = 65});
  EXPECT_NE(refusal(*open_session(other.model, base), bytes).find("saved with model llama "),
            std::string::npos);
  SessionOptions quest = selecting(retaining(m, Retention::kWindow), Selection::kQuest, false);
  const auto paged = open_session(m.model, quest);
  const SessionBytes pages = save(*paged);
  quest.select_page = 4;
  EXPECT_NE(refusal(*open_session(m.model, quest), pages).find("select_page 8, this session has 4"),
            std::string::npos);
  quest.select_page = 8;
  quest.dense_layers = 0;
  EXPECT_NE(refusal(*open_session(m.model, quest), pages).find("dense_layers 1, this session has 0"),
            std::string::npos);
}

TEST(SessionFile, TakesSessionsOfOtherThreadsAndBudgets) {
  const SeededModel m = seeded_model();
  SessionOptions o = retaining(m, Retention::kLocret);
  const auto session = open_session(m.model, o);
  must(session->feed(seeded_tokens(150)));
  o.budget = 64 << 20;
  const auto other = open_session(m.model, o, must(open_device("cpu", {.threads = 1})));
  restore(*other, save(*session));
  EXPECT_EQ(go_on(*other), go_on(*session));
}

// The arrays that record attention are separate from the pool and are not saved.
TEST(SessionFile, IsTheSameForASessionThatWatches) {
  const SeededModel m = seeded_model();
  for (const Selection selection : {Selection::kDense, Selection::kTokenSelect, Selection::kQuest}) {
    SessionOptions o = selecting(retaining(m, Retention::kWindow), selection, false);
    const auto plain = open_session(m.model, o);
    o.watch = true;
    const auto watching = open_session(m.model, o), restored = open_session(m.model, o);
    for (Session* session : {plain.get(), watching.get()}) {
      read(*session, seeded_tokens(150));
      for (int i = 0; i < 5; ++i) must(session->step());
    }
    const SessionBytes bytes = save(*watching);
    read(*restored, seeded_tokens(90, 64, 3));
    restore(*restored, bytes);
    restore(*plain, bytes);
    std::vector<float> expected(must(watching->positions_read()) + 1), got(expected.size());
    EXPECT_EQ(restored->kept_by_position(nullptr, got.data()).code(), Code::kInvalidArgument);
    for (Session* session : {plain.get(), watching.get(), restored.get()}) must(session->accept(7));
    must(watching->kept_by_position(nullptr, expected.data()));
    must(restored->kept_by_position(nullptr, got.data()));
    EXPECT_EQ(got, expected);
    const Outcome outcome = go_on(*watching);
    EXPECT_EQ(go_on(*restored), outcome);
    EXPECT_EQ(go_on(*plain), outcome);
  }
}

// ---- damage ----

// A session with every kind of state, and a similar session with other contents.
struct Pair {
  SeededModel model = seeded_model();
  std::unique_ptr<Session> session, other;
  SessionBytes bytes;
  explicit Pair(Retention retention = Retention::kLocret, Selection selection = Selection::kTokenSelect) {
    const SessionOptions o = selecting(retaining(model, retention), selection, false);
    session = open_session(model.model, o);
    other = open_session(model.model, o);
    read(*session, seeded_tokens(150));
    must(session->set_sampler(kWarm));
    for (int i = 0; i < 5; ++i) must(session->step());
    bytes = save(*session, "note");
    read(*other, seeded_tokens(90, 64, 3));
    must(other->feed(seeded_tokens(5, 64, 4)));
  }
};

TEST(SessionFile, RefusesAHeadWithAnyByteChanged) {
  const Pair p;
  const SessionBytes before = save(*p.other);
  for (size_t at = 0; at < head_end(p.bytes) + 8; ++at) {
    SessionBytes damaged = p.bytes;
    damaged[at] ^= std::byte{uint8_t(1u << at % 8)};
    const Status status = p.other->restore(lend(damaged), "saved").status();
    ASSERT_EQ(status.code(), Code::kFormat) << "byte " << at << ": " << status.message();
  }
  EXPECT_EQ(save(*p.other), before);
}

TEST(SessionFile, RefusesAnyDamageAndGoesOnAsBefore) {
  const Pair p;
  const SessionBytes before = save(*p.other);
  std::mt19937_64 random(1);
  for (int i = 0; i < 2000; ++i) {
    SessionBytes damaged = p.bytes;
    const size_t at = random() % damaged.size();
    switch (i % 4) {
      case 0:
        damaged[at] ^= std::byte{uint8_t(1 + random() % 255)};
        break;
      case 1:
        damaged.resize(at);
        break;
      case 2:
        damaged.insert(damaged.begin() + static_cast<std::ptrdiff_t>(at), std::byte{uint8_t(random())});
        break;
      default:  // a page that was never written
        std::fill_n(damaged.begin() + static_cast<std::ptrdiff_t>(at),
                    std::min<size_t>(64, damaged.size() - at), std::byte{0xa5});
    }
    const Status status = p.other->restore(lend(damaged), "saved").status();
    ASSERT_EQ(status.code(), Code::kFormat) << i << ": " << status.message();
    if (i % 100 == 0) {
      ASSERT_EQ(save(*p.other), before) << i;
    }
  }
  ASSERT_EQ(save(*p.other), before);
  restore(*p.other, p.bytes);
  EXPECT_EQ(go_on(*p.other), go_on(*p.session));
}

// If the checksums are valid for changed contents, the checks of the contents must find every error: the
// state is refused, or a session can continue from it.
TEST(SessionFile, TrustsNothingThatAChecksumVouchesFor) {
  for (const auto& [retention, selection] : {std::pair(Retention::kLocret, Selection::kTokenSelect),
                                             std::pair(Retention::kReread, Selection::kQuest),
                                             std::pair(Retention::kNone, Selection::kTokenSelect)}) {
    const Pair p(retention, selection);
    const SessionBytes before = save(*p.other);
    std::mt19937_64 random(2);
    const uint32_t kValues[] = {0, 1, 63, 64, 70, 0x7fffffff, 0x80000000, 0xffffffff, 0x7fc00000};
    int taken = 0;
    const auto try_one = [&](const SessionBytes& changed) {
      const Status status = p.other->restore(lend(sign(changed)), "saved").status();
      if (status.ok()) {
        ++taken;
        for (int i = 0; i < 3; ++i) {  // the session reports logits that are not finite
          const Code code = p.other->step().status().code();
          ASSERT_TRUE(code == Code::kOk || code == Code::kNotFinite || code == Code::kInvalidArgument ||
                      code == Code::kContextFull)
              << code_name(code);
        }
        must(p.other->rewind(must(p.other->stats()).position));
        restore(*p.other, before);
      } else {
        ASSERT_TRUE(status.code() == Code::kFormat || status.code() == Code::kMismatch) << status.message();
      }
    };
    for (size_t at = 8; at + 4 <= kFixedHead; at += 4)  // after the name of the format
      for (const uint32_t value : kValues) {
        SessionBytes changed = p.bytes;
        std::memcpy(&changed[at], &value, sizeof value);
        try_one(changed);
      }
    for (int i = 0; i < 1500; ++i) {
      SessionBytes changed = p.bytes;
      const size_t words = changed.size() / 4;
      const uint32_t value = kValues[random() % std::size(kValues)];
      std::memcpy(&changed[random() % words * 4], &value, sizeof value);
      try_one(changed);
    }
    EXPECT_GT(taken, 100);  // keys and values may have any bits
    ASSERT_EQ(save(*p.other), before);
  }
}

// A step that reuses a list rewrites its last `local` entries, so a list must have that many.
TEST(SessionFile, RefusesAListWithoutWhatAStepRenews) {
  const Pair p;
  SessionBytes forged = p.bytes;
  const SessionOptions& o = p.session->plan().options;
  const uint32_t chosen = o.select_init + o.select_k + o.select_local, none = 0;
  // The body ends with the last layer's lists: a count, and room for that many entries, for each head.
  const size_t checksum = sizeof(uint64_t), list = (1 + chosen) * sizeof chosen;
  for (uint32_t head = 1; head <= p.model.model->shape.kv_heads; ++head) {
    std::byte* count = &forged[forged.size() - checksum - head * list];
    ASSERT_EQ(std::memcmp(count, &chosen, sizeof chosen), 0);
    std::memcpy(count, &none, sizeof none);
  }
  EXPECT_EQ(p.other->restore(lend(sign(forged)), "saved").status().code(), Code::kFormat);
}

TEST(SessionFile, SaysWhatIsWrong) {
  const Pair p(Retention::kNone, Selection::kTokenSelect);
  const size_t end = head_end(p.bytes);
  const auto changed = [&](size_t at, auto value) {
    SessionBytes bytes = p.bytes;
    std::memcpy(&bytes[at], &value, sizeof value);
    return refusal(*p.other, sign(bytes), Code::kFormat);
  };
  EXPECT_EQ(refusal(*p.other, {}, Code::kFormat), "saved is not a saved session");
  EXPECT_EQ(refusal(*p.other, SessionBytes(5000), Code::kFormat), "saved is not a saved session");
  EXPECT_EQ(changed(8, uint32_t{5}),
            "saved is a saved session of version 5, and this library reads up to version 4");
  const auto says = [](const std::string& message, const char* part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  constexpr size_t kStream = 64;
  says(changed(kStream, uint64_t{154}), "its heads hold invalid entries");
  says(changed(kStream, uint64_t{1} << 40), "too many tokens");
  says(changed(kStream + 8, uint64_t{200}), "too many tokens");
  says(changed(kStream + 32, uint32_t{1}), "too many tokens without scores");
  says(changed(kStream + 44, int32_t{64}), "its logits are invalid");
  says(changed(kStream + 44, int32_t{-2}), "its logits are invalid");
  says(changed(kStream + 72, -1.0), "its statistics are invalid");
  says(changed(kStream + 136, -1.0f), "its sampler options are out of range");
  // The body has 155 entries of 16 bytes of keys, as many of values, then positions.
  const size_t positions = end + 8 + 155 * 32;
  says(changed(positions + 4 * 7, int32_t{6}), "its positions do not ascend");
  says(changed(positions + 4 * 154, int32_t{155}), "its positions do not ascend");
  says(changed(positions, int32_t{-1}), "its positions do not ascend");
  const size_t logits = end + 8 + 4 * 155 * 36;
  says(changed(logits + 8, NAN), "its logits are not finite");
  // After them come, for each layer, the gate, 32 floats of its query, and the lists.
  const size_t list = logits + 64 * 4 + sizeof(GateState) + 32 * 4;
  uint32_t first = 0;
  std::memcpy(&first, &p.bytes[list], sizeof first);
  ASSERT_EQ(first, 60u);  // a step attends to 4 + 24 + 32 entries
  says(changed(list, uint32_t{61}), "its selection's arrays name entries");
  says(changed(list + 4 * 60, uint32_t{155}), "its selection's arrays name entries");
  says(changed(list + 4 * 10, uint32_t{0}), "its selection's arrays name entries");
  SessionBytes token = p.bytes;
  const int32_t none = 64;
  std::memcpy(&token[end - 4 - 4], &none, sizeof none);  // the last accepted token, before the note
  says(refusal(*p.other, sign(token), Code::kFormat), "not in the vocabulary");
}

#ifndef _WIN32

class Files : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = ::testing::TempDir() + "session_files_" + std::to_string(getpid());
    std::filesystem::create_directory(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  static SessionBytes contents(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    const std::string text(std::istreambuf_iterator<char>(file), {});
    const auto bytes = std::as_bytes(std::span(text));
    return {bytes.begin(), bytes.end()};
  }
  static Status save_to(Session& session, const std::string& path) {
    THIMBLE_LET(file, NewFile::replace(path));
    THIMBLE_TRY(session.save([&](const void* data, size_t n) { return file.write(data, n); }, {}));
    return file.complete();
  }
  std::string folder_;
};

TEST_F(Files, AreOldOrNewAfterAKillAtAnyMoment) {
  const Pair p;
  const std::string file = path("session");
  must(save_to(*p.session, file));
  const SessionBytes one = contents(file), two = save(*p.other);
  ASSERT_NE(one, two);
  std::mt19937_64 random(1);
  int seen_two = 0, cut = 0;
  for (int i = 0; i < 200; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      for (;;)
        for (Session* s : {p.other.get(), p.session.get()})
          if (!save_to(*s, file).ok()) _exit(1);
    }
    usleep(static_cast<useconds_t>(random() % 6000));
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child failed to save";
    const SessionBytes bytes = contents(file);
    ASSERT_TRUE(bytes == one || bytes == two) << "kill " << i;
    seen_two += bytes == two;
    cut += std::filesystem::exists(file + ".part");
    restore(*p.other, bytes);
    restore(*p.other, two);
  }
  EXPECT_GT(seen_two, 5);
  EXPECT_GT(cut, 5) << "no kill met a file that was being written";
}

TEST_F(Files, StayAsTheyAreIfTheDiskIsFull) {
  const Pair p;
  const std::string file = path("session");
  must(save_to(*p.session, file));
  const SessionBytes before = contents(file);
  rlimit old{};
  getrlimit(RLIMIT_FSIZE, &old);
  const auto ignored = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{4000, old.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const Status status = save_to(*p.other, file);
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, ignored);
  EXPECT_EQ(status.code(), Code::kIo);
  EXPECT_NE(status.message().find("cannot be written: File too large"), std::string::npos)
      << status.message();
  EXPECT_EQ(contents(file), before);
  EXPECT_FALSE(std::filesystem::exists(file + ".part"));
  EXPECT_EQ(save_to(*p.other, path("no/such/folder")).code(), Code::kIo);
  EXPECT_EQ(save_to(*p.other, folder_).code(), Code::kIo);
  EXPECT_EQ(save_to(*p.other, "/dev/null").code(), Code::kIo);  // a rename would replace it
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
}

#endif

// ---- other devices ----

std::vector<std::string> device_names() {
  std::vector<std::string> names;
  for (const DeviceInfo& info : list_devices())
    if (info.name != "cpu" && info.usable) names.push_back(info.name);
  return names;
}

class SessionFileOn : public ::testing::TestWithParam<std::string> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SessionFileOn);
INSTANTIATE_TEST_SUITE_P(Device, SessionFileOn, ::testing::ValuesIn(device_names()), device_test_name);

// Products of f16 are off by 2^-11 of each factor. Logits sum the results of some products, so they are off
// by at most 2^-6 of the largest.
void expect_near(const std::vector<float>& got, const std::vector<float>& expected) {
  float largest = 0;
  for (const float logit : expected) largest = std::max(largest, std::abs(logit));
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], largest * 0x1p-6f) << i;
}

TEST_P(SessionFileOn, GoesOnOnTheCpuAndBack) {
  const SeededModel m = seeded_model(
      {.layers = 3, .d_model = 256, .head_dim = 64, .d_ff = 256, .vocab = 256, .d_retain = 32, .window = 40});
  const auto device = must(open_device(GetParam(), strictly({.threads = 1})));
  for (const auto& [retention, selection] : {std::pair(Retention::kLocret, Selection::kTokenSelect),
                                             std::pair(Retention::kTova, Selection::kQuest)}) {
    SCOPED_TRACE(policy_name(retention));
    const SessionOptions o = selecting(retaining(m, retention), selection, false);
    const auto here = open_session(m.model, o), there = open_session(m.model, o, device);
    for (const auto& [from, to] : {std::pair(here.get(), there.get()), std::pair(there.get(), here.get())}) {
      must(from->reset());
      read(*from, seeded_tokens(200, 256));
      for (int32_t i = 0; i < 3; ++i) accept(*from, i);
      const SessionBytes bytes = save(*from, "note");
      restore(*to, bytes);
      EXPECT_EQ(save(*to, "note"), bytes);  // every array is at its place
      EXPECT_EQ(kept(*to), kept(*from));
      const auto from_logits = must(from->logits()), to_logits = must(to->logits());
      EXPECT_TRUE(std::equal(from_logits.begin(), from_logits.end(), to_logits.begin(), to_logits.end()));
      if (selection == Selection::kQuest) continue;  // a page at the threshold of selection may be exchanged
      expect_near(accept(*to, 9), accept(*from, 9));
    }
  }
}

// States go with their snapshots. The entries of deepseek2 have no values of their own.
TEST_P(SessionFileOn, TakesStatesToTheCpuAndBack) {
  THIMBLE_NEEDS(shared_file("tools/synth_gguf.py"));
  const auto device = must(open_device(GetParam(), strictly({.threads = 1})));
  for (const std::string family : {"qwen35", "lfm2", "falconh1", "deepseek2"}) {
    if (family == "falconh1" && GetParam().starts_with("cuda")) continue;
    SCOPED_TRACE(family);
    const auto model = family_model(family, "files");
    const uint32_t vocab = model->shape.vocab;
    const SessionOptions o{
        .retention = Retention::kWindow, .pool = 60, .chunk = 32, .local = 12, .max_new = 32};
    const auto here = open_session(model, o), there = open_session(model, o, device);
    for (const auto& [from, to] : {std::pair(here.get(), there.get()), std::pair(there.get(), here.get())}) {
      must(from->reset());
      read(*from, seeded_tokens(100, vocab));
      read(*from, seeded_tokens(5, vocab, 8));
      for (int32_t i = 0; i < 3; ++i) accept(*from, i);
      const SessionBytes bytes = save(*from);
      restore(*to, bytes);
      EXPECT_EQ(save(*to), bytes);
      EXPECT_EQ(kept(*to), kept(*from));
      expect_near(accept(*to, 9), accept(*from, 9));
      for (Session* one : {from, to}) must(one->rewind(105));
      expect_near(accept(*to, 10), accept(*from, 10));
    }
  }
}

}  // namespace
}  // namespace thimble::test
