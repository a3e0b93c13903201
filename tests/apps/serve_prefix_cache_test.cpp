// Tests the folder of saved states of thimble serve.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>

#include "apps/serve/history.h"
#include "apps/serve/prefix_cache.h"
#include "tests/apps/serve_prompt.h"

namespace app::serve {
namespace {

namespace fs = std::filesystem;

std::string contents(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error(path + " is gone");
  return {std::istreambuf_iterator<char>(in), {}};
}

// A note alone stands for a saved session.
class ServePrefixCache : public testing::Test {
 protected:
  ServePrefixCache() : folder_(testing::TempDir() + "cache" + std::to_string(getpid())) {
    fs::remove_all(folder_);
  }
  ~ServePrefixCache() override { fs::remove_all(folder_); }

  std::unique_ptr<PrefixCache> open(uint64_t most = 1 << 20) {
    return std::make_unique<PrefixCache>(folder_, most, contents,
                                         [this](const std::string& line) { log_.push_back(line); });
  }
  static StateNote note(std::vector<StateKey> keys, size_t bytes) {
    StateNote all{7, std::move(keys), ""};
    all.rest.resize(bytes - all.write().size());
    return all;
  }
  static void write_all(int file, const std::string& bytes) {
    ASSERT_EQ(::write(file, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }
  // Saves a state of 1000 bytes.
  static bool save(PrefixCache& cache, std::vector<StateKey> keys) {
    const StateNote all = note(std::move(keys), 1000);
    return cache.save(all, 1000, [&](int file) { write_all(file, all.write()); });
  }
  // The most tokens that a state with this key holds; 0: there is none.
  static uint64_t found(PrefixCache& cache, uint64_t hash) {
    const auto found = cache.find({&hash, 1});
    return found.matches.empty() ? 0 : found.matches.front().position;
  }
  // Makes the last uses of files differ, as times may be coarse.
  void age(uint64_t hash, int seconds) const {
    char name[32];
    std::snprintf(name, sizeof name, "/%016llx.session", static_cast<unsigned long long>(hash));
    fs::last_write_time(folder_ + name, fs::file_time_type::clock::now() - std::chrono::seconds(seconds));
  }
  size_t files() const {
    size_t count = 0;
    for (const auto& file : fs::directory_iterator(folder_)) count += file.path().filename() != "lock";
    return count;
  }

  const std::string folder_;
  std::vector<std::string> log_;
};

TEST_F(ServePrefixCache, FindsTheStateThatHoldsMost) {
  const auto cache = open();
  EXPECT_TRUE(save(*cache, {{1, 10}, {2, 20}}));
  EXPECT_TRUE(save(*cache, {{1, 10}, {3, 30}}));
  const uint64_t hashes[] = {1, 2, 9};
  const auto found = cache->find(hashes);
  ASSERT_EQ(found.matches.size(), 3u);  // the first place in two files
  EXPECT_EQ(found.matches[0].position, 20u);
  EXPECT_EQ(found.matches[2].position, 10u);
  const uint64_t other = 9;
  EXPECT_TRUE(cache->find({&other, 1}).matches.empty());
}

TEST_F(ServePrefixCache, SaysWhatWasEvicted) {
  const auto cache = open();
  EXPECT_TRUE(save(*cache, {{1, 10, 0}, {2, 20, 0}, {3, 30}}));
  const uint64_t hashes[] = {1, 2};
  const auto found = cache->find(hashes);
  EXPECT_TRUE(found.matches.empty());
  EXPECT_EQ(found.evicted, 20u);
}

TEST_F(ServePrefixCache, IsFoundAgainAfterARestartAndByAnotherServer) {
  const auto first = open(), second = open();
  EXPECT_TRUE(save(*first, {{1, 10}}));
  ASSERT_EQ(found(*second, 1), 10u);
  EXPECT_EQ(found(*open(), 1), 10u);
  EXPECT_EQ(second->count(7), 1u);
  EXPECT_EQ(second->count(8), 0u);
  const uint64_t one = 1;
  fs::remove(second->find({&one, 1}).matches.front().path);  // deleted by another server
  EXPECT_EQ(found(*second, 1), 0u);
  EXPECT_EQ(found(*first, 1), 0u);
  EXPECT_TRUE(log_.empty());
}

TEST_F(ServePrefixCache, DeletesWhatWasNotUsedForLongest) {
  const auto cache = open(3500);
  for (uint64_t hash : {1, 2, 3}) EXPECT_TRUE(save(*cache, {{hash, 10}}));
  age(1, 30), age(2, 20), age(3, 10);
  const uint64_t one = 1;
  cache->note_use(cache->find({&one, 1}).matches.front().path);
  EXPECT_TRUE(save(*cache, {{4, 10}}));
  EXPECT_EQ(found(*cache, 1), 10u);
  EXPECT_EQ(found(*cache, 2), 0u);
  EXPECT_EQ(found(*cache, 3), 10u);
  EXPECT_EQ(files(), 3u);
  // A smaller limit after a restart.
  age(1, 40), age(3, 30), age(4, 20);
  EXPECT_EQ(found(*open(1500), 4), 10u);
  EXPECT_EQ(files(), 1u);
}

TEST_F(ServePrefixCache, IsNeverLargerThanItsLimitAlsoWhileItWrites) {
  const auto cache = open(2500), other = open(2500);
  EXPECT_TRUE(save(*cache, {{1, 10}}));
  EXPECT_TRUE(save(*cache, {{2, 10}}));
  const StateNote third = note({{3, 10}}, 1000), fourth = note({{4, 10}}, 1000),
                  fifth = note({{5, 10}}, 1000);
  uint64_t most = 0;
  const auto measure = [&] {
    uint64_t bytes = 0;
    for (const auto& file : fs::directory_iterator(folder_)) bytes += file.file_size();
    most = std::max(most, bytes);
  };
  EXPECT_TRUE(cache->save(third, 1000, [&](int file) {
    measure();  // the new file already has its size
    EXPECT_TRUE(other->save(fourth, 1000, [&](int file2) {
      measure();
      // A third one has no room, because two are being written.
      EXPECT_FALSE(open(2500)->save(fifth, 1000, [](int) { FAIL(); }));
      write_all(file2, fourth.write());
    }));
    write_all(file, third.write());
    measure();
  }));
  EXPECT_LE(most, 2500u);
  EXPECT_GT(most, 1500u);
  EXPECT_EQ(found(*cache, 3), 10u);
  EXPECT_EQ(found(*cache, 4), 10u);
  EXPECT_FALSE(cache->save(note({{6, 10}}, 3000), 3000, [](int) { FAIL(); }));
  ASSERT_FALSE(log_.empty());
  EXPECT_NE(log_.back().find("does not fit"), std::string::npos);
}

TEST_F(ServePrefixCache, AStateReplacesThoseThatItHolds) {
  const auto cache = open();
  EXPECT_TRUE(save(*cache, {{1, 10}}));
  EXPECT_TRUE(save(*cache, {{5, 10}}));
  EXPECT_TRUE(save(*cache, {{1, 10}, {2, 20}}));
  EXPECT_EQ(files(), 2u);
  EXPECT_TRUE(save(*cache, {{1, 10, 0}, {2, 20, 0}, {3, 30}}));  // it cannot return to 20
  EXPECT_EQ(files(), 3u);
  EXPECT_EQ(found(*cache, 1), 10u);
  EXPECT_TRUE(cache->holds({{1, 10}, {2, 20}, {9, 40, 0}}));
  EXPECT_FALSE(cache->holds({{1, 10}, {9, 40}}));
}

TEST_F(ServePrefixCache, IgnoresDamagedAndForeignFiles) {
  open();
  int number = 0;
  for (const char* text :
       {"", "no state", "thimbleP", "thimbleP\1\1\1\1\1\1\1\1\377\377\377\377\377\377\377\377"})
    std::ofstream(folder_ + "/" + std::to_string(number++) + ".session") << text;
  std::ofstream(folder_ + "/other.txt") << "not ours";
  const auto cache = open();
  ASSERT_EQ(log_.size(), 1u);
  EXPECT_NE(log_[0].find("4 files"), std::string::npos) << log_[0];
  EXPECT_EQ(files(), 5u);
  EXPECT_TRUE(save(*cache, {{1, 10}}));
  const uint64_t one = 1;
  cache->drop(cache->find({&one, 1}).matches.front().path, "its checksum differs");
  EXPECT_EQ(found(*cache, 1), 0u);
  EXPECT_EQ(log_.size(), 2u);
}

TEST_F(ServePrefixCache, RemovesTheTemporaryFilesOfServersThatWereKilled) {
  open();
  const std::string dead = folder_ + "/dead.part", live = folder_ + "/live.part";
  std::ofstream(dead) << "half";
  const int file = ::open(live.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  ASSERT_EQ(::flock(file, LOCK_EX), 0);
  open();
  EXPECT_FALSE(fs::exists(dead));
  EXPECT_TRUE(fs::exists(live));
  ::close(file);
  // A server that goes on to run removes them when it saves.
  const auto cache = open();
  std::ofstream(dead) << "half";
  EXPECT_TRUE(save(*cache, {{1, 10}}));
  EXPECT_FALSE(fs::exists(dead));
  EXPECT_EQ(cache->size().bytes, 1000u);
}

TEST_F(ServePrefixCache, AFullDiskIsReportedOnceAndLeavesNoFile) {
  const auto cache = open();
  for (int i = 0; i < 2; ++i)
    EXPECT_FALSE(cache->save(note({{1, 10}}, 1000), 1000,
                             [](int) { throw std::runtime_error("No space left on device"); }));
  ASSERT_EQ(log_.size(), 1u);
  EXPECT_NE(log_[0].find("No space left"), std::string::npos);
  struct Left {};  // not an error: the client left
  EXPECT_THROW(cache->save(note({{1, 10}}, 1000), 1000, [](int) { throw Left(); }), Left);
  EXPECT_EQ(files(), 0u);
  EXPECT_EQ(found(*cache, 1), 0u);
  EXPECT_TRUE(save(*cache, {{1, 10}}));
}

TEST_F(ServePrefixCache, AFolderThatCannotBeUsedIsExplained) {
  std::ofstream(folder_) << "a file";
  try {
    open();
    FAIL();
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find(folder_), std::string::npos);
  }
}

TEST_F(ServePrefixCache, SavesNothingWithoutTheLock) {
  const auto cache = open();
  fs::remove(folder_ + "/lock");
  fs::create_directory(folder_ + "/lock");
  EXPECT_FALSE(save(*cache, {{1, 10}}));
  ASSERT_EQ(log_.size(), 1u);
  EXPECT_NE(log_[0].find("/lock: "), std::string::npos) << log_[0];
  EXPECT_EQ(files(), 0u);
}

TEST_F(ServePrefixCache, OnlyThisUserReadsTheStates) {
  const auto cache = open();
  EXPECT_TRUE(save(*cache, {{1, 10}}));
  struct stat of = {};
  ASSERT_EQ(::stat(folder_.c_str(), &of), 0);
  EXPECT_EQ(of.st_mode & 0777, 0700u);
  const uint64_t one = 1;
  ASSERT_EQ(::stat(cache->find({&one, 1}).matches.front().path.c_str(), &of), 0);
  EXPECT_EQ(of.st_mode & 0777, 0600u);
}

// Two servers save, find and delete in one folder at the same time.
TEST_F(ServePrefixCache, SeveralServersUseOneFolderAtATime) {
  std::vector<std::thread> threads;
  std::atomic<bool> good = true;
  for (uint64_t server = 0; server < 3; ++server)
    threads.emplace_back([&, server] {
      const auto cache = std::make_unique<PrefixCache>(folder_, 10000, contents, [](const std::string&) {});
      for (uint64_t i = 0; i < 40; ++i) {
        const uint64_t hash = 1 + (server * 17 + i) % 25;
        save(*cache, {{hash, 10}});
        for (const auto& match : cache->find({&hash, 1}).matches) {
          StateNote note;
          try {
            if (!note.read(contents(match.path)) || note.keys.front().hash != hash) good = false;
          } catch (const std::runtime_error&) {  // deleted meanwhile
          }
        }
        cache->note_use(folder_ + "/gone.session");
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(good);
  EXPECT_LE(files(), 10u);
  EXPECT_GT(files(), 0u);
}

// ---- keys and histories ----

History answered(int32_t tokens) {
  History history(kChunk, kLocal);
  const Prompt prompt = prompt_of({message("user", "a")}, tokens);
  history.add_prompt(prompt.ids.data(), prompt.ids.size());
  history.begin_answer();
  history.add_generated(1);
  history.add_generated(2);
  history.add_turn(prompt, message("assistant", "b"), true);
  return history;
}

// The positions of the keys that a prompt shares with a history.
std::vector<uint64_t> shared(const History& history, const Prompt& prompt) {
  std::vector<uint64_t> positions;
  const auto hashes = history.hashes(prompt, 7);
  for (const StateKey& key : history.keys(7))
    if (key.usable && std::find(hashes.begin(), hashes.end(), key.hash) != hashes.end())
      positions.push_back(key.position);
  return positions;
}

TEST(ServeHistoryKeys, AreSharedByPromptsThatCanContinue) {
  const History history = answered(45);
  EXPECT_EQ(history.reach(), 47u);
  EXPECT_EQ(shared(history, prompt_of({message("user", "x")}, 45)), (std::vector<uint64_t>{10, 20, 30, 40}));
  Prompt other = prompt_of({message("user", "x")}, 45);
  other.ids[25] = 99;
  EXPECT_EQ(shared(history, other), (std::vector<uint64_t>{10, 20}));
  EXPECT_EQ(shared(history, prompt_of({message("user", "x")}, 33)), (std::vector<uint64_t>{10, 20}));
  // An answer may come back without the white space around it.
  Prompt next = prompt_of({message("user", "a"), message("assistant", " b\n"), message("user", "c")}, 5);
  EXPECT_EQ(shared(history, next), std::vector<uint64_t>{47});
  next.variables = "{}";
  EXPECT_TRUE(shared(history, next).empty());
  EXPECT_NE(history.hashes(other, 7), history.hashes(other, 8));  // of another model
}

TEST(ServeHistoryKeys, ShowWhereEntriesWereEvicted) {
  History history = answered(45);
  history.evicted_at(45);
  EXPECT_TRUE(shared(history, prompt_of({message("user", "x")}, 45)).empty());
  EXPECT_EQ(history.keys(7).size(), 5u);
  History reading(kChunk, kLocal);
  const Prompt prompt = prompt_of({message("user", "a")}, 45);
  reading.add_prompt(prompt.ids.data(), prompt.ids.size());
  reading.stopped_reading();
  EXPECT_EQ(shared(reading, prompt), std::vector<uint64_t>{40});
  EXPECT_EQ(reading.reach(), 40u);
}

TEST(ServeHistoryKeys, AHistoryIsReadAsItWasWritten) {
  const History history = answered(45);
  const std::string bytes = history.write();
  History read(kChunk, kLocal);
  ASSERT_TRUE(read.read(bytes));
  EXPECT_EQ(read.keys(7), history.keys(7));
  EXPECT_EQ(read.ids(), history.ids());
  EXPECT_EQ(read.answers(), history.answers());
  EXPECT_EQ(read.write(), bytes);
  const Prompt next = prompt_of({message("user", "a"), message("assistant", "b"), message("user", "c")}, 60);
  EXPECT_EQ(read.find(next).position, 47u);
  EXPECT_TRUE(read.find(next).cut);
  for (size_t length = 0; length < bytes.size(); ++length) {
    History other(kChunk, kLocal);
    EXPECT_FALSE(other.read(std::string_view(bytes).substr(0, length))) << length;
    EXPECT_TRUE(other.empty());
  }
}

TEST(ServeHistoryKeys, AHistoryWithMadeUpCallsIsNotRead) {
  const auto reads = [](const Json& calls) {
    History history(kChunk, kLocal), read(kChunk, kLocal);
    Json answer = message("assistant", "b");
    answer["tool_calls"] = calls;
    history.begin_answer();
    history.add_turn(prompt_of({message("user", "a")}, 5), answer, false);
    return read.read(history.write());
  };
  EXPECT_TRUE(reads(nullptr));
  EXPECT_TRUE(reads(Json::array({Json::object()})));
  for (const Json& calls : {Json(1), Json("f"), Json::array({1}), Json::array({Json::object(), "f"})})
    EXPECT_FALSE(reads(calls)) << calls;
}

}  // namespace
}  // namespace app::serve
