// Tests how texts are cut into sentences, and which sentence a question asks about.
#include "apps/sentences.h"

#include <gtest/gtest.h>

#include "apps/held.h"

namespace app {
namespace {

// Sentences of a text whose tokens are cut at "|".
std::vector<std::string> sentences(const std::string& text) {
  std::vector<std::string> tokens(1), out;
  for (const char c : text) {
    if (c == '|')
      tokens.emplace_back();
    else
      tokens.back() += c;
  }
  uint64_t next = 0;
  for (const Sentence& s : cut_sentences(tokens.size(), [&](uint64_t i) { return tokens[i]; })) {
    EXPECT_EQ(s.first, next);
    next += s.count;
    out.push_back(s.text);
  }
  EXPECT_EQ(next, tokens.size());
  return out;
}

TEST(Sentences, EndBeforeTheNextBegins) {
  using Texts = std::vector<std::string>;
  EXPECT_EQ(sentences("It| cost| 3|.|5|.| Who|?|\n\n|I|.|\"| Yes"),
            (Texts{"It cost 3.5.", " Who?\n\n", "I.\"", " Yes"}));
  EXPECT_EQ(sentences("a line|\n|another|...|\n"), (Texts{"a line\n", "another...\n"}));
  EXPECT_EQ(sentences("雨|。|雪|。|」|花"), (Texts{"雨。", "雪。」", "花"}));
  EXPECT_EQ(sentences(" |\n|a"), (Texts{" \na"}));
}

TEST(Sentences, LongOnesAreCutBetweenWordsOrAtLeastCharacters) {
  std::string words = "a", bytes = "\xe9";
  for (int i = 1; i < 100; ++i) words += i % 5 ? "|a" : "| a";
  const auto cut = sentences(words);
  ASSERT_EQ(cut.size(), 2u);
  EXPECT_EQ(cut[0].size(), 50u + 9u);  // 48 tokens, and the rest of the word; 9 spaces
  for (int i = 1; i < 120; ++i) bytes += i == 98 ? "|\xe9" : "|\x9b";
  const auto characters = sentences(bytes);
  ASSERT_EQ(characters.size(), 2u);
  EXPECT_EQ(characters[0].size(), 98u);
}

// ---- what a question asks about ----

// A stream of sentences of ten tokens each.
std::vector<Sentence> stream(const std::vector<std::string>& texts) {
  std::vector<Sentence> all;
  for (const std::string& text : texts) all.push_back({text + " ", 10 * all.size(), 10});
  return all;
}

std::vector<int32_t> positions(int32_t first, int32_t count) {
  std::vector<int32_t> all;
  for (int32_t i = 0; i < count; ++i) all.push_back(first + i);
  return all;
}

const char* kQuestion = "What is the door code of the Lisbon warehouse?";
const std::vector<std::string> kText = {"What a day it is.",
                                        "The door of the house is green.",
                                        "The door code of the Lisbon warehouse is 40917.",
                                        "The owner of the Oslo warehouse is away.",
                                        "It is the day of the fair.",
                                        kQuestion,
                                        "40917"};

TEST(Held, IsAskedOfTheSentenceWithTheRareWords) {
  const auto subject = find_subject(stream(kText), kQuestion, {{}});
  ASSERT_TRUE(subject);
  EXPECT_EQ(subject->sentence, 2u);
  EXPECT_EQ(subject->held, 0);
  EXPECT_TRUE(subject->gone);
}

// Without the third sentence, four sentences are left before the question. One has "what", one "door", one
// "warehouse", three "the", three "of", four "is". Weights are ln(5 / n) squared: 2.59 three times, 0.26
// twice, 0.05, which is 8.34 in all. The owner's sentence has the most of them, 2.59 + 0.26 + 0.26 + 0.05 =
// 3.16, which is less than 0.4 of the sum.
TEST(Held, IsNotAskedIfNoSentenceStandsOut) {
  std::vector<std::string> text = kText;
  text.erase(text.begin() + 2);
  EXPECT_FALSE(find_subject(stream(text), kQuestion, {{}}));
  EXPECT_FALSE(find_subject(stream(kText), "", {{}}));
  EXPECT_FALSE(find_subject({}, kQuestion, {{}}));
  EXPECT_FALSE(find_subject(stream({"Nothing."}), "Wo ist er?", {{}}));
  EXPECT_FALSE(find_subject(stream(kText), std::string(2000, 'x') + kQuestion, {{}}));
}

TEST(Held, CountsTheTokensOfASentenceThatAHeadHolds) {
  const auto held = [](const std::vector<std::vector<int32_t>>& heads) {
    return find_subject(stream(kText), kQuestion, heads).value();
  };
  const auto less = held({positions(20, 4), positions(24, 4)});  // more in all, but no head holds half of it
  EXPECT_EQ(less.held, 0.4);
  EXPECT_TRUE(less.gone);
  const auto half = held({{}, positions(18, 7), positions(29, 30)});
  EXPECT_EQ(half.held, 0.5);
  EXPECT_FALSE(half.gone);
}

// Half of it in the store is enough, because it can be recalled from there.
TEST(Held, IsNotGoneIfItIsInTheStore) {
  for (const float share : {0.4f, 0.5f}) {
    const auto subject = find_subject(stream(kText), kQuestion, {positions(20, 4)}, std::vector(40, share));
    ASSERT_TRUE(subject);
    EXPECT_EQ(subject->held, 0.4);
    EXPECT_NEAR(subject->stored, static_cast<double>(share), 1e-6);  // ten roundings of 2^-24
    EXPECT_EQ(subject->gone, share < 0.5f);
  }
  EXPECT_EQ(find_subject(stream(kText), kQuestion, {{}}, std::vector(25, 1.0f))->stored, 0.5);  // of 20 to 29
}

TEST(Held, WhatAColonAnnouncesBelongsToTheSentence) {
  std::vector<std::string> text = kText;
  text[2] = "The door code of the Lisbon warehouse is:";
  text.insert(text.begin() + 3, "40917.");
  const auto subject = find_subject(stream(text), kQuestion, {positions(20, 9)});  // 9 of twenty
  ASSERT_TRUE(subject);
  EXPECT_EQ(subject->held, 0.45);
  EXPECT_TRUE(subject->gone);
  EXPECT_FALSE(find_subject(stream(text), kQuestion, {positions(26, 10)})->gone);
}

TEST(Held, OfSentencesAlikeTheBestHeldCounts) {
  std::vector<std::string> text = kText;
  text.insert(text.begin() + 4, kText[2]);
  const auto subject = find_subject(stream(text), kQuestion, {positions(20, 10), positions(40, 3)});
  ASSERT_TRUE(subject);
  EXPECT_EQ(subject->sentence, 2u);
  EXPECT_FALSE(subject->gone);
}

TEST(Held, QuestionsAndWhatFollowsTheLastAreNotAskedAbout) {
  std::vector<std::string> text = kText;
  text.insert(text.begin(), kQuestion);                           // an earlier question
  text.push_back("The door code of the Lisbon warehouse is 1.");  // the answer
  const auto subject = find_subject(stream(text), kQuestion, {{}});
  ASSERT_TRUE(subject);
  EXPECT_EQ(subject->sentence, 3u);
}

}  // namespace
}  // namespace app
