// Tests sessions in files, through the C API: paths, descriptors, notes, text in the middle of a code point,
// and failing calls.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <functional>

#include "tests/capi/handles.h"
#include "tests/support/counting_allocator.h"

namespace thimble {
namespace {

class Saved : public testing::Test {
 protected:
  ~Saved() override { std::remove(path_.c_str()); }
  SessionHandle session(uint32_t pool = 64) const {
    thimble_session_options o = window_options();
    o.pool = pool;
    return create(small_.model, o);
  }
  SessionHandle reading() const {
    SessionHandle s = session();
    feed(s, any_tokens(150));
    step(s);
    return s;
  }
  void save(const SessionHandle& s, const std::string& note = "") const {
    Error e;
    EXPECT_OK(thimble_session_save(s.get(), path_.c_str(), note.data(), note.size(), &e), e);
  }
  std::string contents() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  SmallModel small_;
  const std::string path_ = testing::TempDir() + "saved_" + std::to_string(getpid());
};

TEST_F(Saved, GoesOnInAnotherSession) {
  const SessionHandle one = reading(), other = session();
  save(one, "first");
  save(one, std::string("a note\0 of any bytes", 20));  // replaces the first note
  Error e;
  EXPECT_OK(thimble_session_restore(other.get(), path_.c_str(), &e), e);
  EXPECT_EQ(stats(other).position, 151u);
  EXPECT_EQ(steps(other, 40), steps(one, 40));
  EXPECT_EQ(kept(other, 1, 0), kept(one, 1, 0));
  EXPECT_EQ(logits(other), logits(one));

  uint64_t length = 0;
  EXPECT_EQ(thimble_session_file_note(path_.c_str(), nullptr, 0, &length, &e), THIMBLE_INVALID_ARGUMENT);
  ASSERT_EQ(length, 20u);
  std::string note(length, '?');
  EXPECT_OK(thimble_session_file_note(path_.c_str(), note.data(), length, &length, &e), e);
  EXPECT_EQ(note, std::string("a note\0 of any bytes", 20));
  EXPECT_EQ(thimble_session_file_info(path_.c_str(), nullptr, 0, &length, &e), THIMBLE_INVALID_ARGUMENT);
  std::string info(length, '?');
  EXPECT_OK(thimble_session_file_info(path_.c_str(), info.data(), length, &length, &e), e);
  EXPECT_NE(info.find("\"position\": 151"), info.npos) << info;
  EXPECT_NE(info.find("\"retention\": \"window\""), info.npos) << info;
}

TEST_F(Saved, GoesThroughDescriptors) {
  const SessionHandle one = reading(), other = session();
  const int out = open(path_.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
  Error e;
  EXPECT_OK(thimble_session_save_fd(one.get(), out, "note", 4, &e), e);
  close(out);
  const std::string by_descriptor = contents();
  save(one, "note");
  EXPECT_EQ(contents(), by_descriptor);
  uint64_t bytes = 0;
  EXPECT_OK(thimble_session_file_bytes(one.get(), 4, &bytes, &e), e);
  EXPECT_EQ(bytes, by_descriptor.size());
  const int in = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  EXPECT_OK(thimble_session_restore_fd(other.get(), in, &e), e);
  EXPECT_OK(thimble_session_restore_fd(other.get(), in, &e), e);  // from the beginning of the file
  close(in);
  EXPECT_EQ(steps(other, 10), steps(one, 10));
  EXPECT_EQ(thimble_session_restore_fd(other.get(), in, &e), THIMBLE_IO);
  expect_sentence(e);
  EXPECT_EQ(thimble_session_save_fd(other.get(), in, nullptr, 0, &e), THIMBLE_IO);
  expect_sentence(e);
  const int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
  EXPECT_EQ(thimble_session_save_fd(other.get(), full, nullptr, 0, &e), THIMBLE_IO);
  EXPECT_NE(std::string(e.message).find("No space left on device"), std::string::npos) << e.message;
  close(full);
}

// The next token of the answer completes a code point whose first byte the saved session had held back.
TEST_F(Saved, FinishesACodePointOfAnAnswer) {
  const SessionHandle one = reading(), other = session();
  const auto text = [](const SessionHandle& s, int32_t token) {
    Error e;
    char buffer[16];
    uint64_t length = 0;
    EXPECT_OK(thimble_session_text(s.get(), token, buffer, sizeof buffer, &length, &e), e);
    return std::string(buffer, length);
  };
  EXPECT_EQ(text(one, 0xc3), "");
  save(one);
  Error e;
  EXPECT_EQ(text(other, 0xe2), "");  // restoring discards this byte
  EXPECT_OK(thimble_session_restore(other.get(), path_.c_str(), &e), e);
  EXPECT_EQ(text(other, 0xa9), "\xc3\xa9");
}

TEST_F(Saved, RefusesWhatDoesNotFitOrIsNotThere) {
  const SessionHandle one = reading(), other = session(65);
  Error e;
  EXPECT_EQ(thimble_session_restore(one.get(), path_.c_str(), &e), THIMBLE_IO);
  expect_sentence(e);
  save(one);
  EXPECT_EQ(thimble_session_restore(other.get(), path_.c_str(), &e), THIMBLE_MISMATCH);
  expect_sentence(e);
  EXPECT_NE(std::string(e.message).find("pool 64, this session has 65"), std::string::npos) << e.message;
  EXPECT_EQ(thimble_session_restore(one.get(), demo_path().c_str(), &e), THIMBLE_FORMAT);
  expect_sentence(e);
  uint64_t length = 0;
  EXPECT_EQ(thimble_session_file_info(demo_path().c_str(), nullptr, 0, &length, &e), THIMBLE_FORMAT);
  EXPECT_EQ(thimble_session_file_note("/no/such/file", nullptr, 0, &length, &e), THIMBLE_IO);
  EXPECT_EQ(thimble_session_save(one.get(), "/no/such/folder/file", nullptr, 0, &e), THIMBLE_IO);
  expect_sentence(e);
}

// Every allocation fails once: the call reports it, the file is unchanged, and the session continues as
// before.
TEST_F(Saved, SurvivesEveryFailingAllocation) {
  const SessionHandle one = reading(), other = session(), expected = reading();
  save(one);
  const std::string old = contents();
  const SessionHandle twin = session();
  feed(other, any_tokens(90));
  feed(twin, any_tokens(90));
  const auto fail_each = [&](const char* name, const std::function<thimble_status(Error&)>& call) {
    int failed = 0;
    for (int n = 1;; ++n) {
      Error e;
      fail_allocation(n);
      const thimble_status status = call(e);
      if (!allocation_failed(n)) {
        EXPECT_OK(status, e);
        break;
      }
      ++failed;
      // Allocations in the system's file functions either make the call fail in the same way, or have no
      // effect.
      ASSERT_TRUE(status == THIMBLE_OUT_OF_MEMORY || status == THIMBLE_IO || status == THIMBLE_OK)
          << name << ", allocation " << n;
      if (status != THIMBLE_OK) expect_sentence(e);
      ASSERT_EQ(contents(), old);
    }
    EXPECT_GT(failed, 5) << name;
  };
  fail_each("save", [&](Error& e) { return thimble_session_save(one.get(), path_.c_str(), nullptr, 0, &e); });
  EXPECT_EQ(contents(), old);
  EXPECT_EQ(access((path_ + ".part").c_str(), F_OK), -1);
  // The last restore succeeds, so the earlier state is compared with a session that did not restore.
  Error e;
  for (int n = 1; n < 10; ++n) {
    fail_allocation(n);
    EXPECT_NE(thimble_session_restore(other.get(), path_.c_str(), &e), THIMBLE_OK);
    ASSERT_TRUE(allocation_failed(n));
  }
  EXPECT_EQ(steps(other, 5), steps(twin, 5));
  fail_each("restore", [&](Error& f) { return thimble_session_restore(other.get(), path_.c_str(), &f); });
  EXPECT_EQ(steps(other, 20), steps(expected, 20));
}

TEST_F(Saved, GivesMemoryBack) {
  const SessionHandle one = session(60'000);
  feed(one, any_tokens(300));
  const thimble_memory before = memory(one);
  uint64_t freed = 0;
  Error e;
  EXPECT_OK(thimble_session_shrink(one.get(), 64, &freed, &e), e);
  const thimble_memory after = memory(one);
  EXPECT_GT(freed, before.pool_bytes / 2);
  EXPECT_EQ(after.pool, 64u);
  EXPECT_EQ(after.capacity, 64u + 8 + 24 + 32);  // local and max_new are raised to at least 64
  EXPECT_EQ(after.pool_bytes, before.pool_bytes - freed);
  EXPECT_EQ(after.total, before.total - freed);
  EXPECT_EQ(after.allocated, before.allocated - freed);
  EXPECT_LE(kept(one, 0, 0).size(), 64u);
  save(one);
  const SessionHandle other = session(64);
  EXPECT_OK(thimble_session_restore(other.get(), path_.c_str(), &e), e);
  EXPECT_EQ(steps(other, 30), steps(one, 30));
  EXPECT_EQ(thimble_session_shrink(one.get(), 65, &freed, &e), THIMBLE_INVALID_ARGUMENT);
  expect_sentence(e);
}

}  // namespace
}  // namespace thimble
