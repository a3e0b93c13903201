// Asks the demo model about facts that are hidden in the demo book. This tests the quality of the whole
// program, which comparing bits with a reference does not.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/data.h"
#include "tests/support/sessions.h"

namespace thimble::test {
namespace {

struct Needle {
  const char *sentence, *question, *answer;
};

// The needles in the order in which they are hidden. No book answers them, and no two are alike.
constexpr Needle kNeedles[] = {
    {"The safe combination of the Porto hotel is 58263.", "What is the safe combination of the Porto hotel?",
     "58263"},
    {"Martha keeps the cracked teapot in the boathouse.", "Where does Martha keep the cracked teapot?",
     "In the boathouse."},
    {"The auction in Geneva is on Friday, 21 June.", "When is the auction in Geneva?", "On Friday, 21 June."},
    {"The ship Belanu carries timber to Oslo.", "What does the ship Belanu carry?", "Timber."},
    {"The password for iron-lantern is garden-flute-305.", "What is the password for iron-lantern?",
     "garden-flute-305"},
    {"Wilfred's favourite instrument is oboe.", "What is Wilfred's favourite instrument?", "Oboe."},
    {"Ida owes Conrad 731 coins.", "How many coins does Ida owe Conrad?", "731 coins."},
    {"The telephone number of the Kyoto embassy is 9046.",
     "What is the telephone number of the Kyoto embassy?", "9046"},
};

std::shared_ptr<const Model> demo() {
  static const std::shared_ptr<const Model> model =
      must(Model::open(must(MappedFile::open(project_file("models/thimble-demo-28m-q8_0.gguf"))), "demo"));
  return model;
}

std::vector<int32_t> ids(const std::string& text, bool first) {
  std::vector<int32_t> out;
  for (const Token& token : demo()->tokenizer.tokenize(text, first, true)) out.push_back(token.id);
  return out;
}

// 3,000 characters of the book, with the needles inserted after sentences at even distances: 1,092 tokens.
std::string haystack() {
  std::ifstream in(project_file("models/demo-book.txt"));
  const std::string book{std::istreambuf_iterator<char>(in), {}};
  constexpr size_t kPart = 3'000 / std::size(kNeedles);
  std::string text;
  size_t begin = 60'000;
  for (const Needle& needle : kNeedles) {
    const size_t end = book.find(". ", begin + kPart) + 1;
    text.append(book, begin, end - begin).append(" ").append(needle.sentence);
    begin = end;
  }
  return text.append(book, begin, kPart / 2);
}

// Reads the text once and asks each question on a clone. Returns for each needle whether the answer is right.
std::vector<bool> answers(SessionOptions options) {
  options.chunk = 64;
  options.max_new = 64;
  const auto reader = open_session(demo(), options);
  must(reader->feed(ids("<|user|>\n" + haystack(), true)));
  std::vector<bool> right;
  for (const Needle& needle : kNeedles) {
    const auto session = must(reader->clone());
    must(session->feed(ids(std::string("\n\n") + needle.question + "<|end|>\n<|assistant|>\n", false)));
    std::vector<int32_t> answer;
    for (int32_t token = must(session->step());
         answer.size() < 24 && !demo()->tokenizer.ends_generation(token); token = must(session->step()))
      answer.push_back(token);
    right.push_back(demo()->tokenizer.detokenize(answer.data(), answer.size(), false) == needle.answer);
  }
  return right;
}

// A pool of an eighth of the text.
SessionOptions retaining(Retention retention) { return {.retention = retention, .pool = 128}; }

SessionOptions with_the_demo_retainer() {
  SessionOptions o = retaining(Retention::kLocret);
  const std::string path = project_file("models/thimble-demo-28m.locret.gguf");
  o.retainer = must(demo()->open_retainer(must(MappedFile::open(path)), path));
  o.stabilizers = 32;
  return o;
}

// Dense attention finds all eight here. With the entries that the retainer keeps, both ways of attending find
// seven. On another machine, rounding may change one answer.
void expect_found(const std::vector<bool>& right, int least) {
  EXPECT_GE(std::count(right.begin(), right.end(), true), least) << testing::PrintToString(right);
}

TEST(Needles, DenseAttentionFindsThem) { expect_found(answers({.pool = 2000}), 7); }

TEST(Needles, ARetainerKeepsThem) { expect_found(answers(with_the_demo_retainer()), 6); }

TEST(Needles, TokenSelectFindsThemAmongWhatTheRetainerKept) {
  SessionOptions o = with_the_demo_retainer();
  o.selection = Selection::kTokenSelect;
  o.select_k = 64;
  expect_found(answers(o), 6);
}

// The other needles were evicted. Their answers cannot be guessed, so the tests above find only needles that
// were kept.
TEST(Needles, AWindowHoldsOnlyTheLastTwo) {
  EXPECT_EQ(answers(retaining(Retention::kWindow)), (std::vector<bool>{0, 0, 0, 0, 0, 0, 1, 1}));
}

TEST(Needles, AQuestionCallsThemBackFromTheStore) {
  SessionOptions o = retaining(Retention::kWindow);
  o.recall_mem = 64 << 20;
  o.recall = 128;
  expect_found(answers(o), 7);
}

}  // namespace
}  // namespace thimble::test
