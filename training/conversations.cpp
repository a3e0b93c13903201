#include "training/conversations.h"

#include <algorithm>

#include "text/json.h"

namespace thimble {
namespace {

struct Turn {
  std::string from, value;
};

// The members of a line, before its format is known.
struct Members {
  std::string prompt, instruction, input;
  std::vector<std::string> answers;
  std::vector<Turn> turns;
  bool has_prompt = false, has_answer = false, has_turns = false;
};

bool one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

Status read_text(JsonReader& json, std::string& to) {
  THIMBLE_LET(text, json.string());
  to = std::move(text);
  return {};
}

// Reads a string, or an array of parts of which some have text. Anything else, such as the null of a tool
// call, is read as an empty string.
Status read_content(JsonReader& json, std::string& to) {
  if (json.peek() == '"') return read_text(json, to);
  if (json.peek() != '[') return json.skip();
  return json.array([&] {
    return json.object([&](const std::string& name) -> Status {
      if (name != "text") return json.skip();
      THIMBLE_LET(text, json.string());
      to += text;
      return {};
    });
  });
}

Status read_turn(JsonReader& json, std::vector<Turn>& turns) {
  Turn turn;
  THIMBLE_TRY(json.object([&](const std::string& name) -> Status {
    if (one_of(name, {"from", "role"})) return read_text(json, turn.from);
    if (name == "value") return read_text(json, turn.value);
    if (name == "content") return read_content(json, turn.value);
    return json.skip();
  }));
  turns.push_back(std::move(turn));
  return {};
}

Status read_member(JsonReader& json, const std::string& name, Members& m) {
  const auto read_answer = [&] { return read_text(json, m.answers.emplace_back()); };
  m.has_prompt |= one_of(name, {"prompt", "instruction"});
  m.has_answer |= one_of(name, {"answer", "answers", "output"});
  const bool turns = one_of(name, {"conversations", "messages"});
  m.has_turns |= turns;
  if (name == "prompt") return read_text(json, m.prompt);
  if (name == "instruction") return read_text(json, m.instruction);
  if (name == "input") return read_text(json, m.input);
  if (one_of(name, {"answer", "output"})) return read_answer();
  if (name == "answers") return json.array(read_answer);
  if (turns) return json.array([&] { return read_turn(json, m.turns); });
  return json.skip();
}

// Keeps the turns from the first human turn on, without empty ones. Consecutive turns of one side are joined.
AnsweredPrompt of_turns(const std::vector<Turn>& turns) {
  std::vector<std::string> said;  // human, model, human, ...
  for (const Turn& turn : turns) {
    if (turn.value.empty()) continue;
    const bool human = one_of(turn.from, {"human", "user"});
    if (!human &&
        (said.empty() || !one_of(turn.from, {"gpt", "assistant", "model", "chatgpt", "bing", "bard"})))
      continue;
    if (human == (said.size() % 2 == 0))
      said.push_back(turn.value);
    else
      said.back() += "\n\n" + turn.value;
  }
  if (said.size() < 2) return {};
  said.resize(said.size() / 2 * 2);  // it must end with an answer
  return {said[0], {{said.begin() + 1, said.end()}}};
}

AnsweredPrompt of_members(Members& m) {
  if (m.has_turns) return of_turns(m.turns);
  AnsweredPrompt c;
  c.prompt = m.prompt.empty() ? m.instruction : m.prompt;
  if (!m.input.empty()) c.prompt += (c.prompt.empty() ? "" : "\n\n") + m.input;
  for (std::string& answer : m.answers)
    if (!answer.empty()) c.replies.push_back({std::move(answer)});
  return c;
}

}  // namespace

bool is_json_lines(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  return first != std::string_view::npos && text[first] == '{';
}

std::vector<NumberedLine> lines_of(std::string_view text) {
  std::vector<NumberedLine> lines;
  for (uint32_t number = 1; !text.empty(); ++number) {
    const size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    if (line.find_first_not_of(" \t\r") != std::string_view::npos) lines.push_back({line, number});
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return lines;
}

Result<AnsweredPrompt> read_conversation(std::string_view line, const std::string& where) {
  JsonReader json(line, where);
  Members members;
  THIMBLE_TRY(json.object([&](const std::string& name) { return read_member(json, name, members); }));
  THIMBLE_TRY(json.end());
  if (!members.has_turns && !(members.has_prompt && members.has_answer))
    return error(Code::kFormat,
                 "%s has no prompt and answer: give 'prompt' and 'answer' or 'answers', 'instruction' and "
                 "'output', 'conversations' or 'messages'",
                 where.c_str());
  AnsweredPrompt c = of_members(members);
  if (c.prompt.empty() || c.replies.empty()) return AnsweredPrompt();
  return c;
}

}  // namespace thimble
