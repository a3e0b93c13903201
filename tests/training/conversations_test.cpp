// Tests prompts and answers from JSON lines.
#include "training/conversations.h"

#include <gtest/gtest.h>

namespace thimble::test {
namespace {

AnsweredPrompt read(const std::string& line) {
  auto conversation = read_conversation(line, "data.jsonl, line 7");
  EXPECT_TRUE(conversation.ok()) << conversation.status().message();
  return conversation.ok() ? *conversation : AnsweredPrompt();
}
using Replies = std::vector<std::vector<std::string>>;

TEST(Conversations, AreReadInTheShapesInWhichTheyArePublished) {
  AnsweredPrompt c = read(R"({"id": 3, "prompt": "a\nb", "answer": "c"})");
  EXPECT_EQ(c.prompt, "a\nb");
  EXPECT_EQ(c.replies, (Replies{{"c"}}));
  c = read(R"({"answers": ["c", "d"], "prompt": "a", "more": {"x": [1, null]}})");
  EXPECT_EQ(c.replies, (Replies{{"c"}, {"d"}}));
  c = read(R"({"instruction": "Sum up.", "input": "A long text.", "output": "Short.", "file": "x"})");
  EXPECT_EQ(c.prompt, "Sum up.\n\nA long text.");
  EXPECT_EQ(c.replies, (Replies{{"Short."}}));
  EXPECT_EQ(read(R"({"instruction": "Sum up.", "input": "", "output": "Short."})").prompt, "Sum up.");
  c = read(R"({"conversations": [{"from": "system", "value": "s"}, {"from": "gpt", "value": "first"},
      {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}, {"from": "human", "value": "q2"},
      {"from": "gpt", "value": "a2"}, {"from": "gpt", "value": "more"}, {"from": "human", "value": "unanswered"}]})");
  EXPECT_EQ(c.prompt, "q");
  EXPECT_EQ(c.replies, (Replies{{"a", "q2", "a2\n\nmore"}}));
  c = read(
      R"({"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"},
      {"role": "assistant", "content": null, "tool_calls": [{"id": 1}]}, {"role": "tool", "content": "t"},
      {"role": "assistant", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "q2"},
      {"type": "image_url", "image_url": {"url": "x"}}]}, {"role": "assistant", "content": "a2"}]})");
  EXPECT_EQ(c.prompt, "q");
  EXPECT_EQ(c.replies, (Replies{{"a", "q2", "a2"}}));
}

TEST(Conversations, DecodeWhatIsEscaped) {
  EXPECT_EQ(read(R"({"prompt": "\u00e9\u20ac\ud83d\ude00\u0041 \"\t", "answer": "x"})").prompt, "é€😀A \"\t");
  EXPECT_EQ(read(R"({"prompt": "\ud83d!\ude00\ud83d\u0041", "answer": "x"})").prompt, "\uFFFD!\uFFFD\uFFFDA");
}

TEST(Conversations, WithoutPromptOrAnswerAreEmpty) {
  for (const char* line : {R"({"prompt": "", "answer": "x"})", R"({"prompt": "x", "answer": ""})",
                           R"({"prompt": "x", "answers": []})", R"({"conversations": []})",
                           R"({"conversations": [{"from": "human", "value": "x"}]})"})
    EXPECT_TRUE(read(line).prompt.empty()) << line;
}

TEST(Conversations, AreRefusedByTheLinesNumber) {
  for (const char* line :
       {"{", "plain", R"({"prompt": "x"})", R"({"text": "x"})", R"({"prompt": 3, "answer": "x"})",
        R"({"prompt": "x", "answer": "y"} more)", R"({"prompt": "x, "answer": "y"})",
        R"({"prompt": "\u12", "answer": "y"})", R"({"prompt": "\q", "answer": "y"})", R"([{"prompt": "x"}])",
        R"({"conversations": "x"})", R"({"messages": [{"role": "user", "content": ["x"]}]})",
        "{\"prompt\": \"a\1\", \"answer\": \"\"}"}) {
    const auto refused = read_conversation(line, "data.jsonl, line 7");
    ASSERT_FALSE(refused.ok()) << line;
    EXPECT_EQ(refused.status().code(), Code::kFormat);
    EXPECT_NE(refused.status().message().find("data.jsonl, line 7"), std::string::npos);
  }
}

TEST(Conversations, TakeOneLineEach) {
  const auto lines = lines_of("{1}\r\n\n  \n{2}");
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[1].text, "{2}");
  EXPECT_EQ(lines[1].number, 4u);
  EXPECT_TRUE(is_json_lines("\n {"));
  EXPECT_FALSE(is_json_lines("A text {"));
  EXPECT_FALSE(is_json_lines(" \n"));
}

}  // namespace
}  // namespace thimble::test
