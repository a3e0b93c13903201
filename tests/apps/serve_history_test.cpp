// Tests from where a slot of thimble serve continues.
#include <gtest/gtest.h>

#include "tests/apps/serve_prompt.h"

namespace app::serve {
namespace {

// A slot that has read a first question of `tokens` tokens and answered it with "b" in two tokens.
History answered(int32_t tokens, bool cut = false) {
  History history(kChunk, kLocal);
  const Prompt prompt = prompt_of({message("user", "a")}, tokens);
  history.add_prompt(prompt.ids.data(), prompt.ids.size());
  history.add_generated(1);
  history.add_generated(2);
  history.add_turn(prompt, message("assistant", "b"), cut);
  return history;
}

TEST(ServeHistory, AConversationContinuesAfterItsAnswer) {
  const Prompt next =
      prompt_of({message("user", "a"), message("assistant", " b\n"), message("user", "c")}, 30);
  const Reuse reuse = answered(5, true).find(next);
  EXPECT_EQ(reuse.position, 7u);
  EXPECT_EQ(reuse.messages, 2u);
  EXPECT_TRUE(reuse.cut);
}

TEST(ServeHistory, AnotherConversationDoesNot) {
  const History history = answered(5);
  EXPECT_EQ(
      history.find(prompt_of({message("user", "a"), message("assistant", "x"), message("user", "c")}, 9))
          .position,
      0u);
  EXPECT_EQ(
      history.find(prompt_of({message("user", "x"), message("assistant", "b"), message("user", "c")}, 9))
          .position,
      0u);
  EXPECT_EQ(history.find(prompt_of({message("user", "a")}, 5)).position, 0u);
  Prompt tools = prompt_of({message("user", "a"), message("assistant", "b"), message("user", "c")}, 9);
  tools.variables = "{}";
  EXPECT_EQ(history.find(tools).position, 0u);
}

TEST(ServeHistory, AnAnswerGivenAnewGoesOnFromTheTurnBefore) {
  History history = answered(5);
  const Prompt second =
      prompt_of({message("user", "a"), message("assistant", "b"), message("user", "c")}, 12);
  history.rewind(history.find(second));
  const int32_t more[] = {8, 9};
  history.add_prompt(more, 2);
  history.add_generated(3);
  history.add_turn(second, message("assistant", "d"), false);
  EXPECT_EQ(history.find(second).position, 7u);
  const Prompt third = prompt_of({message("user", "a"), message("assistant", "b"), message("user", "c"),
                                  message("assistant", "d"), message("user", "e")},
                                 20);
  EXPECT_EQ(history.find(third).position, 10u);
  EXPECT_EQ(history.find(third).messages, 4u);
  history.evicted_at(9);
  EXPECT_EQ(history.find(second).position, 0u);  // gone
  EXPECT_EQ(history.find(third).position, 10u);
}

TEST(ServeHistory, ACallIsTheSameWithItsArgumentsInAnotherOrder) {
  const auto call = [](const char* arguments) {
    Json answer = message("assistant", "");
    answer["tool_calls"] =
        Json::array({{{"function", {{"name", "f"}, {"arguments", Json::parse(arguments)}}}}});
    return answer;
  };
  const auto second = [&](const char* arguments) {
    return prompt_of({message("user", "a"), call(arguments), message("user", "c")}, 9);
  };
  History history(kChunk, kLocal);
  const Prompt first = prompt_of({message("user", "a")}, 5);
  history.add_prompt(first.ids.data(), first.ids.size());
  history.begin_answer();
  history.add_generated(1);
  history.add_turn(first, call(R"({"a":{"x":1,"y":[2,3]},"b":4})"), false);
  const uint64_t key = history.keys(7).back().hash;
  for (const char* same : {R"({"a":{"x":1,"y":[2,3]},"b":4})", R"({"b":4,"a":{"y":[2,3],"x":1}})"}) {
    EXPECT_EQ(history.find(second(same)).messages, 2u) << same;
    EXPECT_EQ(history.hashes(second(same), 7).back(), key) << same;
  }
  for (const char* other : {R"({"a":{"x":1,"y":[3,2]},"b":4})", R"({"a":{"x":1},"b":4})"}) {
    EXPECT_EQ(history.find(second(other)).messages, 0u) << other;
    EXPECT_NE(history.hashes(second(other), 7).back(), key) << other;
  }
}

TEST(ServeHistory, ATextContinuesAtTheEndOfAChunkOfBothReadings) {
  // A prompt is read in whole chunks while more than chunk + local tokens wait: three chunks for 34 tokens.
  History history(kChunk, kLocal);
  const Prompt first = prompt_of({message("user", "a")}, 34);
  history.add_prompt(first.ids.data(), first.ids.size());
  const struct {
    int32_t tokens, position;
  } kCases[] = {{60, 30}, {34, 30}, {33, 20}, {24, 20}, {23, 10}, {14, 10}, {13, 0}, {3, 0}};
  for (const auto& c : kCases) {
    const Reuse reuse = history.find(prompt_of({message("user", "x")}, c.tokens));
    EXPECT_EQ(reuse.position, static_cast<uint64_t>(c.position)) << c.tokens;
    EXPECT_EQ(reuse.messages, 0u);
  }
  Prompt other = prompt_of({message("user", "x")}, 60);
  other.ids[25] = 99;
  EXPECT_EQ(history.find(other).position, 20u);
  history.evicted_at(21);
  EXPECT_EQ(history.find(other).position, 0u);
}

TEST(ServeHistory, AnAnswerIsNotPartOfTheTextThatIsContinued) {
  History history(kChunk, kLocal);
  const Prompt first = prompt_of({message("user", "a")}, 12);
  history.add_prompt(first.ids.data(), first.ids.size());
  for (int32_t id = 12; id < 40; ++id) history.add_generated(id);  // as if more was read, but it was not
  EXPECT_EQ(history.find(prompt_of({message("user", "x")}, 60)).position, 0u);
}

TEST(ServeHistory, ReadingThatWasStoppedIsTakenUpAtItsLastChunk) {
  History history(kChunk, kLocal);
  const Prompt first = prompt_of({message("user", "a")}, 60);
  history.add_prompt(first.ids.data(), 34);
  history.stopped_reading();
  EXPECT_EQ(history.find(first).position, 30u);
  // The entries before 20 may be gone.
  EXPECT_EQ(history.find(prompt_of({message("user", "x")}, 33)).position, 0u);
  history.rewind({});
  EXPECT_TRUE(history.empty());
}

// A later question must not look for its subject in answers.
TEST(ServeHistory, KnowsWhereItsAnswersAre) {
  History history(kChunk, kLocal);
  const Prompt first = prompt_of({message("user", "a")}, 5);
  history.add_prompt(first.ids.data(), first.ids.size());
  EXPECT_TRUE(history.answers().empty());
  history.begin_answer();
  history.add_generated(1);
  history.add_turn(first, message("assistant", "b"), false);
  using Ranges = std::vector<std::pair<uint64_t, uint64_t>>;
  EXPECT_EQ(history.answers(), (Ranges{{5, 6}}));
  const Prompt second = prompt_of({message("user", "a"), message("assistant", "b"), message("user", "c")}, 9);
  history.rewind(history.find(second));
  history.add_prompt(second.ids.data(), 2);
  EXPECT_EQ(history.answers(), (Ranges{{5, 6}}));
  history.begin_answer();
  history.add_generated(2);
  EXPECT_EQ(history.answers(), (Ranges{{5, 6}, {8, 9}}));
  history.rewind({});
  EXPECT_TRUE(history.answers().empty());
}

}  // namespace
}  // namespace app::serve
