// Splits a model's answer into parts (see answer.h).
#include "apps/serve/answer.h"

#include <algorithm>
#include <utility>

#include "apps/serve/filters.h"
#include "apps/serve/json.h"

namespace app::serve {

namespace {

constexpr std::string_view kBareCall = "{\"name\":";  // ignoring white space
constexpr size_t kLongestBeginning = 64;

struct ThoughtMarks {
  const char *open, *close;
};
constexpr ThoughtMarks kThoughts[] = {{"<think>", "</think>"},
                                      {"[THINK]", "[/THINK]"},
                                      {"<seed:think>", "</seed:think>"},
                                      {"<mm:think>", "</mm:think>"},
                                      {"<|START_THINKING|>", "<|END_THINKING|>"},
                                      {"<|channel>thought", "<channel|>"}};

// The harmony format: <|start|>ROLE<|channel|>CHANNEL<|message|>TEXT<|end|>, with " to=RECIPIENT" before or
// after the channel. The prompt ends with <|start|>assistant.
constexpr std::string_view kStartMark = "<|start|>", kChannelMark = "<|channel|>",
                           kMessageMark = "<|message|>", kFunctions = "functions.";
constexpr std::string_view kMessageEnds[] = {"<|end|>", "<|return|>", "<|call|>", "<|start|>"};
constexpr size_t kLongestHeader = 512;

}  // namespace

Opening opening_of(std::string_view prompt) {
  Opening opening;
  prompt = stripped(prompt);
  if (prompt.ends_with("<|start|>assistant")) opening.kind = Opening::Kind::kHarmony;
  for (const ThoughtMarks& marks : kThoughts) {
    if (!prompt.ends_with(marks.open)) continue;
    opening.kind = Opening::Kind::kThought;
    opening.thought_end = marks.close;
  }
  return opening;
}

std::string begun_answer(const Opening& opening, const Json& message) {
  const std::string* given = text_field(message, "reasoning_content");
  const std::string thoughts = given ? *given : "", &content = *text_field(message, "content");
  if (opening.kind == Opening::Kind::kHarmony)
    return (thoughts.empty() ? ""
                             : "<|channel|>analysis<|message|>" + thoughts + "<|end|><|start|>assistant") +
           "<|channel|>final<|message|>" + content;
  const bool opened = opening.kind == Opening::Kind::kThought;
  if (!opened && thoughts.empty()) return content;
  return (opened ? "" : "<think>\n") + thoughts + "\n" + (opened ? opening.thought_end : "</think>") +
         "\n\n" + content;
}

void set_thoughts(Json& message, const std::string& thoughts) {
  if (thoughts.empty()) return;
  for (const char* name : {"reasoning_content", "reasoning", "thinking"}) message[name] = thoughts;
}

void go_on_with_last(Task& task) {
  Json last = task.messages.back();
  if (last["role"] != "assistant")
    throw Refusal(400, "the last message can be continued only if its role is \"assistant\"");
  if (last.contains("tool_calls"))
    throw Refusal(400, "a last message that calls tools cannot be continued; send the results of the tools");
  task.messages.erase(task.messages.size() - 1);
  if (task.messages.empty()) throw Refusal(400, "a message must come before the answer that is continued");
  const bool says =
      last.contains("reasoning_content") || !last["content"].get_ref<const std::string&>().empty();
  if (says) task.begun = std::move(last);
}

std::string call_id(const Identity& who, size_t index) {
  constexpr char kDigits[] = "0123456789abcdefghijklmnopqrstuvwxyz";
  constexpr size_t kAnswer = 7;
  std::string id = std::string(kAnswer, '0') + who.id;
  return id.substr(id.size() - kAnswer) + kDigits[index / 36 % 36] + kDigits[index % 36];
}

bool is_mark(std::string_view token) {
  const auto is = [&](std::string_view mark) { return token == mark; };
  return is_call_mark(token) || is("<|channel>") ||
         std::any_of(std::begin(kThoughts), std::end(kThoughts),
                     [&](const ThoughtMarks& marks) { return is(marks.open) || is(marks.close); });
}

AnswerFilter::AnswerFilter(const Opening& opening, const Json& tools)
    : finds_calls_(!tools.is_null()),
      types_(tools),
      state_(State::kStart),
      thought_end_(opening.thought_end) {
  const bool harmony = opening.kind == Opening::Kind::kHarmony;
  if (opening.goes_on)
    state_ = harmony ? State::kMessage : State::kText;
  else if (harmony)
    state_ = State::kHeader;
  else if (opening.kind == Opening::Kind::kThought)
    state_ = State::kThought;
}

std::vector<Part> AnswerFilter::push(std::string_view text) {
  held_ += text;
  while (step(false)) {
  }
  return std::exchange(parts_, {});
}

std::vector<Part> AnswerFilter::finish() {
  while ((!held_.empty() || state_ == State::kCall) && step(true)) {
  }
  if (state_ == State::kMessage) message(true);  // a call without arguments may have no text
  if (!beside_ && !space_.empty()) parts_.push_back({Part::Kind::kText, std::exchange(space_, {}), "", ""});
  return std::exchange(parts_, {});
}

bool AnswerFilter::step(bool last) {
  switch (state_) {
    case State::kStart:
      return start(last);
    case State::kThought:
      return thought(last);
    case State::kText:
      return text(last);
    case State::kBare:
      return bare(last);
    case State::kCall:
      return call(last);
    case State::kHeader:
      return header(last);
    case State::kMessage:
      return message(last);
  }
  return false;
}

std::string AnswerFilter::take(size_t count) {
  std::string taken = held_.substr(0, count);
  held_.erase(0, count);
  return taken;
}

bool AnswerFilter::start(bool last) {
  const size_t first = held_.find_first_not_of(kJsonSpaces);
  if (first == std::string::npos && !last) return false;
  const std::string_view words = first == std::string::npos ? "" : std::string_view(held_).substr(first);
  for (const ThoughtMarks& marks : kThoughts) {
    const std::string_view open = marks.open;
    if (words.starts_with(open)) {
      held_.erase(0, first + open.size());
      thought_end_ = marks.close;
      state_ = State::kThought;
      return true;
    }
    if (!last && open.starts_with(words)) return false;
  }
  if (finds_calls_ && words.starts_with('{')) {
    const std::string beginning = compact_json(words.substr(0, kLongestBeginning));
    if (!last && words.size() < kLongestBeginning && kBareCall.starts_with(beginning)) return false;
    state_ = beginning.starts_with(kBareCall) ? State::kBare : State::kText;
    if (state_ == State::kBare) held_.erase(0, first);
    return true;
  }
  state_ = State::kText;
  return true;
}

bool AnswerFilter::bare(bool last) {
  const size_t end = json_value_end(held_, 0);
  if (std::vector<ToolCall> calls;
      held_[end - 1] == '}' && read_json_calls(std::string_view(held_).substr(0, end), true, calls)) {
    add_calls(std::move(calls));
    held_.erase(0, end);
    state_ = State::kStart;  // another call may follow
    return true;
  }
  if (end == held_.size() && !last) return false;
  state_ = State::kText;
  return true;
}

bool AnswerFilter::thought(bool last) {
  const size_t end = held_.find(thought_end_);
  if (end == std::string::npos) {
    add_thought(take(held_.size() - (last ? 0 : begun(held_, thought_end_))));
    return false;
  }
  add_thought(take(end));
  held_.erase(0, thought_end_.size());
  separate();
  beside_ = true;
  state_ = State::kStart;
  return true;
}

bool AnswerFilter::text(bool last) {
  open_ = finds_calls_ ? find_open_mark(held_) : OpenMark();
  if (!open_.format) {
    add_text(take(held_.size() - (last || !finds_calls_ ? 0 : begun_open_mark(held_))));
    return false;
  }
  add_text(take(open_.at));
  held_.erase(0, open_.mark.size());
  state_ = State::kCall;
  return true;
}

bool AnswerFilter::call(bool last) {
  std::vector<ToolCall> calls;
  size_t length = 0;
  const Found found = read_calls(*open_.format, held_, last, types_, calls, length);
  if (found == Found::kMore) return false;
  state_ = State::kText;
  if (found == Found::kCalls) {
    add_calls(std::move(calls));
    held_.erase(0, length);
  } else {
    add_text(open_.mark);  // not a call but a mention of the mark; text and a call may follow it
  }
  return true;
}

bool AnswerFilter::header(bool last) {
  const size_t end = held_.find(kMessageMark);
  const bool plain = !held_.empty() && held_[0] != '<' && held_[0] != ' ';
  if (plain || end == std::string::npos || end > kLongestHeader) {
    if (!plain && !last && held_.size() < kLongestHeader + kMessageMark.size()) return false;
    if (last && held_.starts_with("<|")) held_.clear();  // a header that was cut off
    if (held_.starts_with(kStartMark)) held_.erase(0, kStartMark.size());
    state_ = State::kMessage;  // an answer without channels
    recipient_.clear();
    analysis_ = false;
    return true;
  }
  const std::string head = take(end);
  held_.erase(0, kMessageMark.size());
  const size_t channel = head.find(kChannelMark), to = head.find("to=");
  analysis_ = channel != std::string::npos && head.compare(channel + kChannelMark.size(), 8, "analysis") == 0;
  recipient_ = to == std::string::npos ? "" : head.substr(to + 3, head.find_first_of(" <", to + 3) - to - 3);
  if (!finds_calls_ || recipient_.compare(0, kFunctions.size(), kFunctions) != 0) recipient_.clear();
  if (recipient_.empty() && (analysis_ ? thought_before_ : spoke_)) {
    parts_.push_back({analysis_ ? Part::Kind::kThought : Part::Kind::kText, "\n\n", "", ""});
    if (!analysis_) space_.clear();
  }
  state_ = State::kMessage;
  return true;
}

bool AnswerFilter::message(bool last) {
  size_t end = std::string::npos, held_back = 0;
  for (const std::string_view mark : kMessageEnds) {
    end = std::min(end, held_.find(mark));
    held_back = std::max(held_back, begun(held_, mark));
  }
  const bool ended = end != std::string::npos || last;
  if (recipient_.empty()) {
    const std::string words = take(end != std::string::npos ? end : held_.size() - (last ? 0 : held_back));
    (analysis_ ? thought_before_ : spoke_) |= !stripped(words).empty();
    if (analysis_)
      add_thought(words);
    else
      add_text(words);
  } else if (ended) {
    const std::string body = take(end);
    const std::string name = recipient_.substr(kFunctions.size());
    const std::string arguments = arguments_json(compact_json(body));
    if (!name.empty() && !arguments.empty())
      add_calls({{name, arguments}});
    else
      add_text(body);
  }
  if (!ended) return false;
  if (analysis_) separate();
  for (const std::string_view mark : kMessageEnds) {
    if (mark == kStartMark || !held_.starts_with(mark)) continue;
    held_.erase(0, mark.size());
    break;
  }
  recipient_.clear();
  state_ = State::kHeader;
  return true;
}

// Ends a thought.
void AnswerFilter::separate() {
  thought_space_.clear();
  thinks_ = false;
}

void AnswerFilter::add_thought(std::string_view text) {
  const size_t first = text.find_first_not_of(kJsonSpaces);
  if (first == std::string::npos) {
    if (thinks_) thought_space_ += text;
    return;
  }
  const size_t end = text.find_last_not_of(kJsonSpaces) + 1;
  std::string shown;
  if (thinks_) shown.append(std::exchange(thought_space_, {})).append(text.substr(0, first));
  shown.append(text.substr(first, end - first));
  parts_.push_back({Part::Kind::kThought, shown, "", ""});
  thought_space_ = text.substr(end);
  thinks_ = true;
}

void AnswerFilter::add_text(std::string_view text) {
  if (!finds_calls_ && !beside_) {  // white space is not held back for a call
    if (const std::string shown = std::exchange(space_, {}).append(text); !shown.empty())
      parts_.push_back({Part::Kind::kText, shown, "", ""});
    return;
  }
  const size_t first = text.find_first_not_of(kJsonSpaces);
  if (first == std::string::npos) {
    space_ += text;
    return;
  }
  const size_t end = text.find_last_not_of(kJsonSpaces) + 1;
  std::string shown;
  if (!beside_) shown.append(space_).append(text.substr(0, first));
  shown.append(text.substr(first, end - first));
  parts_.push_back({Part::Kind::kText, shown, "", ""});
  space_ = text.substr(end);
  beside_ = false;
}

void AnswerFilter::add_calls(std::vector<ToolCall> calls) {
  space_.clear();
  beside_ = true;
  for (ToolCall& call : calls)
    parts_.push_back({Part::Kind::kCall, "", std::move(call.name), std::move(call.arguments)});
}

}  // namespace app::serve
