// Tests the texts that training uses.
#include "training/texts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "tests/training/small_trainer.h"
#include "training/facts.h"
#include "training/recall.h"

namespace thimble::test {
namespace {

std::string written(const Model& model, const std::vector<int32_t>& tokens) {
  return model.tokenizer.detokenize(tokens.data(), tokens.size(), true);
}

TextMaker maker_of(const SeededModel& small, const std::string& book, uint32_t tokens = 2048,
                   uint64_t seed = 1) {
  return must(TextMaker::open(small.model, {book}, tokens, tokens / 2, seed));
}

TEST(Texts, HaveTheirLengthAndAreTheSameForASeed) {
  const Folder folder;
  const SeededModel small = seeded_model(bytes_model(true));
  const std::string book = folder.written("book", some_book());
  const TextMaker maker = maker_of(small, book), again = maker_of(small, book),
                  other = maker_of(small, book, 2048, 2);
  for (uint64_t i = 0; i < 20; ++i) {
    const TrainingText text = maker.make(i, false);
    EXPECT_EQ(text.tokens.size(), 2048u);
    EXPECT_LE(text.tails[0].tokens.size(), 1024u);
    EXPECT_EQ(text.tails[0].tokens.size(), text.tails[0].marked.size());
    EXPECT_FALSE(text.questions.empty());
    EXPECT_EQ(text.tokens, again.make(i, false).tokens);
    EXPECT_EQ(text.tails[0].tokens, again.make(i, false).tails[0].tokens);
    EXPECT_NE(text.tokens, other.make(i, false).tokens);
    EXPECT_NE(text.tokens, maker.make(i, true).tokens);
  }
}

// The text contains the answer to every question and the sentences that it is about. Nothing is hidden that
// is not asked for: without the book's own sentences, nothing is left.
TEST(Texts, HideWhatTheyAskAndAskWhatTheyHide) {
  const Folder folder;
  const SeededModel small = seeded_model(bytes_model(true));
  const TextMaker maker = maker_of(small, folder.written("book", some_book()));
  for (uint64_t i = 0; i < 20; ++i) {
    const TrainingText text = maker.make(i, false);
    const std::string all = written(*small.model, text.tokens);
    uint32_t capitals = 0;  // the book has no capitals, digits or quotes
    for (const Question& q : text.questions) {
      std::string answer = written(*small.model, q.answer);
      EXPECT_TRUE(answer.ends_with("<|im_end|>")) << answer;
      answer.resize(answer.size() - 10);
      if (answer.ends_with(".")) answer.pop_back();
      const std::string prompt = written(*small.model, q.prompt);
      EXPECT_TRUE(prompt.starts_with("\n\n")) << prompt;
      EXPECT_TRUE(prompt.ends_with("<|im_start|>assistant\n")) << prompt;
      // The text may have "in the cellar" and "silk" for "In the cellar." and "Silk.".
      const auto same = [](char a, char b) { return std::tolower(a) == std::tolower(b); };
      const size_t space = answer.rfind(' ');
      const std::string end = space == std::string::npos ? answer : answer.substr(space + 1);
      EXPECT_NE(std::search(all.begin(), all.end(), end.begin(), end.end(), same), all.end()) << answer;
      capitals += !q.expected.empty();
    }
    EXPECT_GT(capitals, 0u);
    // Every pair is on its own line, and is asked for.
    size_t pairs = 0, asked = 0;
    for (size_t at = 0; (at = all.find("\": \"", at)) != std::string::npos; ++at) ++pairs;
    for (const Question& q : text.questions)
      asked += written(*small.model, q.prompt).find("What is the value of") != std::string::npos;
    EXPECT_EQ(pairs, asked);
  }
}

// The words of a text in lower case.
std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  bool inside = false;
  for (const char c : text) {
    const bool letter = std::isalpha(static_cast<unsigned char>(c)) != 0;
    if (letter && !inside) words.emplace_back();
    if (letter) words.back() += static_cast<char>(std::tolower(c));
    inside = letter;
  }
  return words;
}

// Tests the questions of every kind: a check recognises its questions, and the text contains what they ask
// for. Chains are in order, and lists contain the most frequent item.
TEST(Facts, AreAnsweredByTheirSentences) {
  Random r = random_of(5, 0);
  const auto all = [](const Fact& fact) {
    std::string text;
    for (const std::string& sentence : fact.sentences) text += sentence + " ";
    return text;
  };
  for (uint32_t i = 0; i < 300; ++i) {
    const uint32_t language = i % kLanguages;
    for (const Fact& fact :
         {make_fact(r), make_key(r, i % 2), make_pair(r, i % 2), make_values(r), make_code(r, language)}) {
      EXPECT_FALSE(fact.expected.empty()) << fact.question;
      EXPECT_EQ(share_said(all(fact), fact.expected), 1) << all(fact);
      EXPECT_EQ(share_said(fact.answer, fact.expected), 1) << fact.answer;
    }
    const Fact values = make_values(r);
    EXPECT_GE(values.sentences.size(), 2u);
    EXPECT_EQ(values.sentences.size(), values.expected.size());

    const Fact chain = make_chain(r);
    EXPECT_TRUE(chain.expected.empty());
    ASSERT_GE(chain.sentences.size(), 3u);
    const std::string value = chain.question.substr(chain.question.size() - 6, 5);
    EXPECT_NE(chain.sentences[0].find(value), std::string::npos) << chain.sentences[0];
    for (size_t link = 1; link < chain.sentences.size(); ++link)
      EXPECT_EQ(chain.sentences[link].find(value), std::string::npos) << chain.sentences[link];

    const Fact count = make_count(r, 20 + i);
    EXPECT_TRUE(count.expected.empty());
    std::map<std::string, uint32_t> times;
    for (const std::string& word : words_of(count.sentences[0].substr(count.sentences[0].find(": "))))
      ++times[word];
    uint32_t least = UINT32_MAX, most = 0;
    for (const std::string& word : words_of(count.answer)) {
      if (word == "and") continue;
      EXPECT_LT(times[word], least) << "the first is named most often";
      least = times[word];
      times.erase(word);
    }
    for (const auto& [word, n] : times) most = std::max(most, n);
    EXPECT_GE(least, 3 * most) << count.sentences[0] << count.answer;
  }
}

// The marked rows are the last token of each prompt and the answer's tokens.
TEST(Texts, MarkTheRowsThatAnswer) {
  const Folder folder;
  for (const bool chat : {true, false}) {
    const SeededModel small = seeded_model(bytes_model(chat));
    const TrainingText text = maker_of(small, folder.written("book", some_book())).make(3, false);
    uint64_t expected = 0, marked = 0;
    for (const Question& q : text.questions) expected += 1 + q.answer.size();
    for (const uint32_t m : text.tails[0].marked) marked += m;
    EXPECT_EQ(marked, expected);
    EXPECT_EQ(text.tails[0].marked.front(), 0u);
    // The first question is in the form that it has after the text.
    const Question& first = text.questions.front();
    EXPECT_TRUE(std::equal(first.prompt.begin(), first.prompt.end(), text.tails[0].tokens.begin()));
    EXPECT_TRUE(std::equal(first.answer.begin(), first.answer.end(),
                           text.tails[0].tokens.begin() + static_cast<ptrdiff_t>(first.prompt.size())));
    EXPECT_EQ(text.tails[0].marked[first.prompt.size() - 2], 0u);
    EXPECT_EQ(text.tails[0].marked[first.prompt.size() - 1], 1u);
    const std::string tail = written(*small.model, text.tails[0].tokens);
    EXPECT_NE(tail.find(chat ? "<|im_start|>user\n" : "\nAnswer: "), std::string::npos) << tail;
  }
}

// Held-out texts come from the last fifth of the book.
TEST(Texts, ThatAreHeldOutShareNoSentenceWithTheOthers) {
  const Folder folder;
  const SeededModel small = seeded_model(bytes_model(true));
  std::string book(40000, 'x');
  for (size_t i = 0; i < book.size(); i += 50) book[i] = '.';
  std::replace(book.begin() + 32000, book.end(), 'x', 'y');
  const TextMaker maker = maker_of(small, folder.written("book", book));
  for (uint64_t i = 0; i < 5; ++i) {
    EXPECT_EQ(written(*small.model, maker.make(i, false).tokens).find("yyyyy"), std::string::npos);
    EXPECT_EQ(written(*small.model, maker.make(i, true).tokens).find("xxxxx"), std::string::npos);
  }
}

TEST(Texts, AreRepeated) {
  const Folder folder;
  for (const bool chat : {true, false}) {
    const SeededModel small = seeded_model(bytes_model(chat));
    const TextMaker maker = maker_of(small, folder.written("book", some_book()));
    const TrainingText whole = maker.repeated(3, false);
    EXPECT_EQ(whole.tokens.size(), 2048u);
    EXPECT_EQ(whole.tokens, maker.make(3, false).tokens);  // including the hidden texts, such as digits
    EXPECT_NE(whole.tokens, maker.repeated(4, false).tokens);
    const std::string opening = chat ? "<|im_start|>user\n" : "";
    std::string text = written(*small.model, whole.tokens);
    text.erase(0, text.find(opening) + opening.size());
    if (!chat) text.erase(0, text.find("<s>") == 0 ? 3 : 0);
    ASSERT_EQ(whole.tails.size(), 1u);
    const std::string closing = chat ? "<|im_end|>\n<|im_start|>assistant\n" : "\n\n";
    EXPECT_EQ(written(*small.model, whole.tails[0].tokens),
              "\n\nRepeat the previous context exactly." + closing + text);
    uint64_t marked = 0;
    for (const uint32_t m : whole.tails[0].marked) marked += m;
    EXPECT_EQ(marked, text.size());  // each byte is a token
    EXPECT_EQ(whole.tails[0].end, 2048u);
  }
}

std::string some_lines(uint32_t count, uint32_t bytes) {
  std::string lines;
  const std::string book = some_book();
  for (uint32_t i = 0; i < count; ++i)
    lines += "{\"prompt\": \"P" + std::to_string(i) + " " + book.substr(i * 100, bytes) +
             " What?\", \"answers\": [\"A" + std::to_string(i) + "\", \"B" + std::to_string(i) + "\"]}\n";
  return lines;
}

// Lines 8 and 9 of 10 are held out. The prompt of line 3 is too short to learn from.
TEST(Texts, OfJsonLinesArePromptsWithTheirAnswers) {
  const Folder folder;
  const SeededModel small = seeded_model(bytes_model(true));
  std::string lines = some_lines(10, 900);
  const size_t third = lines.find("{\"prompt\": \"P3");
  lines.replace(third, lines.find('\n', third) - third, R"({"instruction": "Short.", "output": "Yes."})");
  const TextMaker maker = maker_of(small, folder.written("lines", lines));
  EXPECT_FALSE(maker.has_books());
  const std::vector<TrainingText> texts = maker.answered(16);
  ASSERT_EQ(texts.size(), 7u);
  EXPECT_EQ(maker.answered(3).size(), 3u);
  std::set<std::string> seen;
  for (const TrainingText& text : texts) {
    const std::string prompt = written(*small.model, text.tokens);
    ASSERT_NE(prompt.find("<|im_start|>user\nP"), std::string::npos) << prompt;
    EXPECT_TRUE(prompt.ends_with(" What?"));
    const std::string number = prompt.substr(prompt.find("\nP") + 2, 1);
    EXPECT_TRUE(seen.insert(number).second);
    EXPECT_LT(number, "8");
    ASSERT_EQ(text.tails.size(), 2u);
    for (const uint32_t i : {0u, 1u}) {
      const Tail& tail = text.tails[i];
      EXPECT_EQ(written(*small.model, tail.tokens),
                "<|im_end|>\n<|im_start|>assistant\n" + std::string(i ? "B" : "A") + number + "<|im_end|>");
      EXPECT_EQ(tail.end, text.tokens.size());
      // The token before the answer, the answer's two letters, and its end token.
      EXPECT_EQ(std::count(tail.marked.begin(), tail.marked.end(), 1u), 4);
      EXPECT_EQ(tail.marked[tail.marked.size() - 4], 1u);
    }
  }
  // Questions for shares and for the check are hidden in held-out text.
  const std::string held_out = written(*small.model, maker.make(0, true).tokens);
  EXPECT_NE(held_out.find("What?"), std::string::npos);
  EXPECT_EQ(held_out.find("P1 "), std::string::npos);
}

// With turns of 100 bytes each, the text is the first user turn and three pairs of an answer and a question.
TEST(Texts, OfChatsAreTheirFirstTurns) {
  const Folder folder;
  const SeededModel small = seeded_model(bytes_model(true));
  std::string lines;
  for (uint32_t i = 0; i < 10; ++i) {
    lines += "{\"messages\": [";
    for (uint32_t turn = 0; turn < 10; ++turn)
      lines += std::string(turn ? ", " : "") + "{\"role\": \"" + (turn % 2 ? "assistant" : "user") +
               "\", \"content\": \"T" + std::to_string(turn) + std::string(98, 'x') + "\"}";
    lines += "]}\n";
  }
  const TextMaker maker = maker_of(small, folder.written("chats", lines));
  const std::vector<TrainingText> texts = maker.answered(16);
  ASSERT_EQ(texts.size(), 8u);
  for (const TrainingText& text : texts) {
    const std::string read = written(*small.model, text.tokens);
    ASSERT_EQ(text.tails.size(), 1u);
    const std::string said = written(*small.model, text.tails[0].tokens);
    EXPECT_NE(read.find("assistant\nT1xx"), std::string::npos);
    EXPECT_TRUE(read.ends_with("<|im_end|>\n<|im_start|>user\nT2" + std::string(98, 'x'))) << read;
    EXPECT_TRUE(said.starts_with("<|im_end|>\n<|im_start|>assistant\nT3xx")) << said;
    EXPECT_NE(said.find("user\nT8xx"), std::string::npos);
    EXPECT_GE(text.tokens.size(), 256u);
  }
}

TEST(Texts, LoseTheMiddleOfAPromptThatIsTooLong) {
  const Folder folder;
  const SeededModel small = seeded_model(bytes_model(true));
  const TextMaker maker = maker_of(small, folder.written("lines", some_lines(6, 5000)));
  for (const TrainingText& text : maker.answered(5)) {
    EXPECT_EQ(text.tokens.size(), 2048u);
    const std::string prompt = written(*small.model, text.tokens);
    EXPECT_NE(prompt.find("<|im_start|>user\nP"), std::string::npos);
    EXPECT_TRUE(prompt.ends_with(" What?"));
  }
}

TEST(Texts, AreRefusedWithTheReason) {
  const Folder folder;
  const SeededModel small = seeded_model(bytes_model(true));
  const struct {
    std::string path;
    Code code;
    const char* word;
  } cases[] = {
      {folder.file("none"), Code::kIo, "none"},
      {folder.written("empty", ""), Code::kFormat, "empty"},
      {folder.written("binary", std::string("GGUF\0\1\2", 7) + some_book()), Code::kFormat, "zero bytes"},
      {folder.written("latin", some_book() + "caf\xe9."), Code::kFormat, "UTF-8"},
      {folder.written("short", "A sentence. And another one."), Code::kInvalidArgument, "28 tokens"},
      {folder.written("lines", some_lines(7, 900) + "\n{\"prompt\": \n"), Code::kFormat, "line 9"},
      {folder.written("mixed", some_lines(7, 900) + "And a sentence."), Code::kFormat, "line 8"},
      {folder.written("few", some_lines(4, 900)), Code::kInvalidArgument, "4 lines"},
      {folder.written("brief", some_lines(9, 10)), Code::kInvalidArgument, "tokens"},
      {folder.written("array", "[\n {\"instruction\": \"x\"}]"), Code::kFormat, "array"},
  };
  for (const auto& c : cases) {
    const auto refused = TextMaker::open(small.model, {c.path}, 2048, 1024, 1);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.status().code(), c.code) << refused.status().message();
    EXPECT_NE(refused.status().message().find(c.word), std::string::npos) << refused.status().message();
  }
  const SeededModel mute = seeded_model();
  EXPECT_EQ(TextMaker::open(mute.model, {folder.written("book", some_book())}, 2048, 1024, 1).status().code(),
            Code::kUnsupported);
}

}  // namespace
}  // namespace thimble::test
