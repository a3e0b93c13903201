// Tests prompts with long texts: the ids of text that is read in blocks equal those of the whole text.
#include "apps/prompt.h"

#include <gtest/gtest.h>

#include <fstream>

#include "tests/support/data.h"
#include "tests/support/model_of_bytes.h"

namespace app {
namespace {

using thimble::project_file;

constexpr uint32_t kFlags = THIMBLE_TOKENIZE_ADD_BOS | THIMBLE_TOKENIZE_PARSE_SPECIAL;

std::string temporary_file(const std::string& content) {
  std::string name = (std::filesystem::temp_directory_path() / "thimble-test-XXXXXX").string();
  close(mkstemp(name.data()));
  std::ofstream(name, std::ios::binary) << content;
  return name;
}

std::vector<int32_t> ids_from(const Prompt& prompt, uint64_t first) {
  std::vector<int32_t> ids;
  prompt.each(first, [&](std::span<const int32_t> some) {
    ids.insert(ids.end(), some.begin(), some.end());
    return true;
  });
  return ids;
}

// The test parameter chooses a vocabulary of words or one of bytes.
class Prompts : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    std::string path = project_file("models/thimble-demo-28m-q8_0.gguf");
    if (GetParam()) {
      path = temporary_file("");
      thimble::model_of_bytes().write(path);
    } else {
      THIMBLE_NEEDS(path);
    }
    model_ = open_model(path);
    if (GetParam()) std::filesystem::remove(path);
  }

  // A text long enough to be read in blocks: words, text that spells a control token, and two blocks without
  // a place to cut, with white space at both ends.
  std::string text() const {
    const std::string end = detokenize(model_, {model_info(model_).eos}, THIMBLE_DETOKENIZE_SPECIAL);
    std::string text = " \n " + end + " said the\r\n\r\ncrab";
    for (int i = 0; i < 9000; ++i)
      text += " It was No. " + std::to_string(i * i) + (i % 7 ? "," : " (" + end + ").\n\n") + "  said" +
              (i % 5 ? "" : "\n\n");
    for (int i = 0; i < 100000; ++i) text += "\xE9\x9B\xA8\xE3\x80\x82";
    for (int i = 0; i < 6000; ++i) text += i % 5 ? " and a snail" : " naïve\tcafé\n\nÉtoile\n";
    return text + " " + end + " \n";
  }

  // Expects that the ids equal those of the whole text, from every start index.
  void expect_the_whole(const std::string& text, const std::function<std::string(std::string_view)>& write,
                        bool parses = false) {
    const std::string path = temporary_file(text);
    const LongText document(model_, path, parses);
    EXPECT_TRUE(document.has_middle());
    const Prompt prompt(model_, document, write, kFlags);
    const std::vector<int32_t> whole = tokenize(model_, write(text), kFlags).ids;
    EXPECT_EQ(prompt.size(), whole.size());
    for (const uint64_t first : {uint64_t{0}, uint64_t{1}, uint64_t{whole.size() / 2},
                                 uint64_t{whole.size() - 3}, uint64_t{whole.size()}})
      EXPECT_TRUE(ids_from(prompt, first) ==
                  std::vector<int32_t>(whole.begin() + static_cast<std::ptrdiff_t>(first), whole.end()))
          << first;
    std::filesystem::remove(path);
  }

  std::function<std::string(std::string_view)> chat(const ChatStyle& style) const {
    return [this, style](std::string_view content) {
      return chat_text(model_, style, {message("user", std::string(content) + "\n\nWho was it?")},
                       THIMBLE_CHAT_ADD_ASSISTANT);
    };
  }

  Model model_;
};

TEST_P(Prompts, OfLongTextsHaveTheIdsOfTheWhole) {
  expect_the_whole(text(), chat({.format = "chatml"}));
  expect_the_whole(
      text(), [](std::string_view content) { return std::string(content); }, true);
}

TEST_P(Prompts, ParseControlTokensInTextsIfAsked) {
  expect_the_whole(text(), chat({.format = "chatml", .parses_content = true}), true);
}

TEST_P(Prompts, AreWrittenByTemplatesThatLookAtTheEndsOfATextOrWriteItTwice) {
  expect_the_whole(text(), chat({.source = "A: {{ messages[0].content | trim }} B:"}));
  expect_the_whole(text(), chat({.source = "{% set t = messages[0].content %}"
                                           "{% if t.startswith(' \n ') %}space{% endif %}{{ t }}"}));
  expect_the_whole(text(), chat({.source = "{{ messages[0].content }} {{ messages[0].content }}"}));
}

TEST_P(Prompts, HaveTheTextAndTheSameWordsBeforeAndAfterItInCommon) {
  const std::string path = temporary_file(text());
  const LongText document(model_, path, false);
  const auto ask = [&](const std::string& begin, const std::string& end) {
    return Prompt(
        model_, document,
        [&](std::string_view content) { return begin + std::string(content) + "\n\n" + end; }, kFlags);
  };
  const Prompt one = ask("Read", "Who came?"), two = ask("Read", "Who left?"),
               three = ask("See", "Who came?");
  const auto common = [](const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
    return static_cast<uint64_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
  };
  EXPECT_EQ(one.common(one), one.size());
  EXPECT_EQ(one.common(two), common(ids_from(one, 0), ids_from(two, 0)));
  EXPECT_EQ(one.common(three), common(ids_from(one, 0), ids_from(three, 0)));
  std::filesystem::remove(path);
}

TEST_P(Prompts, OfTextsWithoutAPlaceToCutAreKeptWhole) {
  const std::string path = temporary_file(std::string(400000, '!'));
  const LongText document(model_, path, false);
  EXPECT_FALSE(document.has_middle());
  const Prompt prompt(
      model_, document, [](std::string_view text) { return std::string(text); }, kFlags);
  EXPECT_TRUE(ids_from(prompt, 0) == tokenize(model_, std::string(400000, '!'), kFlags).ids);
  std::filesystem::remove(path);
}

INSTANTIATE_TEST_SUITE_P(, Prompts, testing::Bool(), [](const auto& which) {
  return which.param ? "OfAModelOfBytes" : "OfAModelOfWords";
});

}  // namespace
}  // namespace app
