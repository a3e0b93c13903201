// Splits a model's answer into parts (see answer.h).
#include "apps/serve/answer.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <utility>

#include "apps/serve/call_format.h"
#include "apps/serve/filters.h"
#include "apps/serve/json.h"

namespace app::serve {

namespace {

constexpr std::string_view kBareCall = "{\"name\":";  // ignoring white space
constexpr size_t kLongestBeginning = 64;
constexpr std::string_view kFence = "```";

// Whether JSON begins with `call`, apart from white space. kUnknown: more text is needed to decide.
enum class Begins { kCall, kOther, kUnknown };
Begins begins(std::string_view json, std::string_view call, bool last) {
  const std::string beginning = compact_json(json.substr(0, kLongestBeginning));
  if (beginning.starts_with(call)) return Begins::kCall;
  return !last && json.size() < kLongestBeginning && call.starts_with(beginning) ? Begins::kUnknown
                                                                                 : Begins::kOther;
}

struct ThoughtMarks {
  const char *open, *close;
  const char *inside = "", *after = "";  // what is written between a thought and its marks, and after them
};
constexpr ThoughtMarks kThoughts[] = {{"[THINK]", "[/THINK]"},
                                      {"<seed:think>", "</seed:think>", "", "\n"},
                                      {"<mm:think>", "</mm:think>"},
                                      {"<|START_THINKING|>", "<|END_THINKING|>"},
                                      {"<think:opensource>", "</think:opensource>"},
                                      {"<|inner_prefix|>", "<|inner_suffix|>"},
                                      {"<|channel>thought", "<channel|>", "\n"},
                                      {"<think>", "</think>", "\n", "\n\n"}};  // of most models
// Apertus calls tools in the middle of a thought, which goes on after their results.
constexpr std::string_view kInnerCalls = "<|tools_prefix|>", kInnerEnd = "<|inner_suffix|>";

// The harmony format: <|start|>ROLE<|channel|>CHANNEL<|message|>TEXT<|end|>, with " to=RECIPIENT" before or
// after the channel. The prompt ends with <|start|>assistant.
constexpr std::string_view kStartMark = "<|start|>", kChannelMark = "<|channel|>",
                           kMessageMark = "<|message|>", kFunctions = "functions.";
constexpr std::string_view kMessageEnds[] = {"<|end|>", "<|return|>", "<|call|>", kStartMark};
constexpr size_t kLongestHeader = 512;

// Solar Open: <|begin|>assistant<|think|>TEXT<|end|>, or <|content|> for <|think|>, or a mark of calls. The
// prompt ends with <|begin|>assistant.
constexpr std::string_view kTurnBegin = "<|begin|>", kTurn = "<|begin|>assistant", kTurnThought = "<|think|>",
                           kTurnText = "<|content|>";
constexpr std::string_view kTurnEnds[] = {"<|end|>", kTurnBegin};

// The recipient of texts in Functionary 3.2's format.
constexpr std::string_view kReader = "all";

// Reads a fenced block, with which the text begins. It is a call if there is nothing else in it than calls of
// known tools. Their names come first, so that other blocks need not be held back.
Found read_fenced_calls(std::string_view text, bool last, const ToolTypes& types,
                        std::vector<ToolCall>& calls, size_t& length) {
  const Found more = last ? Found::kNone : Found::kMore;
  std::string_view rest = text.substr(kFence.size());
  const std::string_view language = rest.substr(0, rest.find('\n'));
  const auto names = [&](std::string_view known) {
    return stripped(language) == known || (language.size() == rest.size() && known.starts_with(language));
  };
  if (!names("") && !names("json") && !names("tool_call")) return Found::kNone;
  if (language.size() == rest.size()) return more;
  rest.remove_prefix(language.size());
  rest.remove_prefix(std::min(rest.find_first_not_of(kJsonSpaces), rest.size()));
  if (rest.empty()) return more;
  const Begins what = begins(rest, rest[0] == '[' ? "[{\"name\":" : kBareCall, last);
  if (what != Begins::kCall) return what == Begins::kUnknown ? more : Found::kNone;
  const size_t end = json_value_end(rest, 0);
  const std::string_view json = rest.substr(0, end);
  rest.remove_prefix(end);
  rest.remove_prefix(std::min(rest.find_first_not_of(kJsonSpaces), rest.size()));
  const bool closed = rest.starts_with(kFence);
  if (!closed && kFence.starts_with(rest) && !last) return more;
  if ((!closed && !rest.empty()) || !read_json_calls(json, true, calls)) return Found::kNone;
  if (!std::all_of(calls.begin(), calls.end(), [&](const ToolCall& call) { return types.has(call.name); }))
    return Found::kNone;
  length = text.size() - rest.size() + (closed ? kFence.size() : 0);
  return Found::kCalls;
}

}  // namespace

Opening opening_of(std::string_view prompt) {
  Opening opening;
  prompt = stripped(prompt);
  if (prompt.ends_with("<|start|>assistant")) opening.kind = Opening::Kind::kHarmony;
  if (prompt.ends_with(kTurn)) opening.kind = Opening::Kind::kSolar;
  if (prompt.ends_with(kRecipientMark)) opening.kind = Opening::Kind::kRecipient;
  for (const ThoughtMarks& marks : kThoughts) {
    if (!prompt.ends_with(marks.open)) continue;
    opening.kind = Opening::Kind::kThought;
    opening.thought_end = marks.close;
  }
  return opening;
}

std::string begun_answer(const Opening& opening, const Json& message, std::string_view thought_mark) {
  const std::string* given = text_field(message, "reasoning_content");
  const std::string thoughts = given ? *given : "", &content = *text_field(message, "content");
  if (opening.kind == Opening::Kind::kHarmony)
    return (thoughts.empty() ? ""
                             : "<|channel|>analysis<|message|>" + thoughts + "<|end|><|start|>assistant") +
           "<|channel|>final<|message|>" + content;
  if (opening.kind == Opening::Kind::kSolar)
    return (thoughts.empty() ? "" : "<|think|>" + thoughts + "<|end|><|begin|>assistant") + "<|content|>" +
           content;
  if (opening.kind == Opening::Kind::kRecipient) return std::string(kReader) + "\n" + content;
  const bool opened = opening.kind == Opening::Kind::kThought;
  if (!opened && thoughts.empty()) return content;
  const ThoughtMarks& marks =
      *std::find_if(std::begin(kThoughts), std::prev(std::end(kThoughts)), [&](const ThoughtMarks& m) {
        return opened ? opening.thought_end == m.close : thought_mark == m.open;
      });
  return (opened ? "" : std::string(marks.open) + marks.inside) + thoughts + marks.inside + marks.close +
         marks.after + content;
}

std::vector<std::string_view> thought_marks() {
  std::vector<std::string_view> marks;
  for (const ThoughtMarks& m : kThoughts) marks.emplace_back(m.open);
  return marks;
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

bool opens_thought(std::string_view token) {
  return token == kTurnThought || std::any_of(std::begin(kThoughts), std::end(kThoughts),
                                              [&](const ThoughtMarks& marks) { return token == marks.open; });
}

bool opens_text(const Opening& opening, std::string_view token) {
  return token == kTurnText || (opening.kind == Opening::Kind::kRecipient && stripped(token) == kReader);
}

bool is_mark(std::string_view token) {
  const auto is = [&](std::string_view mark) { return token == mark; };
  return is_call_mark(token) || is("<|channel>") || is(kTurnBegin) || is(kTurnThought) || is(kTurnText) ||
         std::any_of(std::begin(kThoughts), std::end(kThoughts),
                     [&](const ThoughtMarks& marks) { return is(marks.open) || is(marks.close); });
}

AnswerFilter::AnswerFilter(const Opening& opening, const Json& tools)
    : finds_calls_(!tools.is_null()),
      types_(tools),
      state_(State::kStart),
      thought_end_(opening.thought_end),
      kind_(opening.kind),
      has_role_(kind_ == Opening::Kind::kSolar || kind_ == Opening::Kind::kRecipient) {
  const bool in_messages = kind_ == Opening::Kind::kSolar || kind_ == Opening::Kind::kHarmony;
  if (opening.goes_on)
    state_ = in_messages ? State::kMessage : State::kText;
  else if (in_messages || kind_ == Opening::Kind::kRecipient)
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

AnswerFilter::Place AnswerFilter::place() const {
  const bool blank = stripped(held_).empty();
  if (state_ == State::kHeader && has_role_ && blank) return Place::kStart;
  if (thinks() || state_ == State::kHeader) return Place::kBefore;
  if (blank && (state_ == State::kStart || (state_ == State::kMessage && recipient_.empty() && !spoke_)))
    return Place::kStart;
  const bool call = state_ == State::kMessage ? !recipient_.empty() : state_ == State::kCall;
  return blank && call ? Place::kCall : Place::kInside;
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
    case State::kFence:
      return fence(last);
    case State::kHeader:
      return kind_ == Opening::Kind::kSolar       ? solar_header(last)
             : kind_ == Opening::Kind::kRecipient ? recipient_header(last)
                                                  : header(last);
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
    const Begins what = begins(words, kBareCall, last);
    if (what == Begins::kUnknown) return false;
    state_ = what == Begins::kCall ? State::kBare : State::kText;
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
  const std::string_view calls = finds_calls_ && thought_end_ == kInnerEnd ? kInnerCalls : thought_end_;
  const size_t end = std::min(held_.find(thought_end_), held_.find(calls));
  if (end == std::string::npos) {
    const size_t held_back = std::max(begun(held_, thought_end_), begun(held_, calls));
    add_thought(take(held_.size() - (last ? 0 : held_back)));
    return false;
  }
  add_thought(take(end));
  if (!held_.starts_with(thought_end_)) {
    open_ = find_open_mark(held_);
    held_.erase(0, calls.size());
    interrupted_ = true;
    state_ = State::kCall;
    return true;
  }
  held_.erase(0, thought_end_.size());
  separate();
  beside_ = true;
  interrupted_ = false;
  state_ = State::kStart;
  return true;
}

bool AnswerFilter::text(bool last) {
  open_ = finds_calls_ ? find_open_mark(held_) : OpenMark();
  const size_t fence = finds_calls_ ? held_.find(kFence) : std::string::npos;
  if (fence < open_.at) {
    add_text(take(fence));
    state_ = State::kFence;
    return true;
  }
  if (!open_.format) {
    const bool all = last || !finds_calls_;
    add_text(take(held_.size() - (all ? 0 : std::max(begun_open_mark(held_), begun(held_, kFence)))));
    return false;
  }
  add_text(take(open_.at));
  held_.erase(0, open_.mark.size());
  state_ = State::kCall;
  return true;
}

bool AnswerFilter::fence(bool last) {
  std::vector<ToolCall> calls;
  size_t length = 0;
  const Found found = fenced_ ? Found::kNone : read_fenced_calls(held_, last, types_, calls, length);
  if (found == Found::kMore) return false;
  state_ = State::kText;
  if (found == Found::kCalls) {
    add_calls(std::move(calls));
    held_.erase(0, length);
  } else {
    add_text(take(kFence.size()));
    fenced_ = !fenced_;
  }
  return true;
}

bool AnswerFilter::call(bool last) {
  std::vector<ToolCall> calls;
  size_t length = 0;
  const Found found = read_calls(*open_.format, held_, last, types_, calls, length);
  if (found == Found::kMore) return false;
  state_ = interrupted_ ? State::kThought : State::kText;
  if (found == Found::kCalls) {
    add_calls(std::move(calls));
    held_.erase(0, length);
  } else if (interrupted_) {
    add_thought(open_.mark);
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
  begin_message();
  return true;
}

bool AnswerFilter::solar_header(bool last) {
  const std::string_view text = held_;
  const auto may_begin = [&](std::string_view mark) {
    return text.size() < mark.size() && mark.starts_with(text);
  };
  if (last && may_begin(kTurn)) {  // a header that was cut off
    held_.clear();
    return false;
  }
  if (!last && (may_begin(kTurn) || may_begin(kTurnThought) || may_begin(kTurnText) ||
                begun_open_mark(text) == text.size()))
    return false;
  if (text.starts_with(kTurnBegin)) {
    has_role_ = text.starts_with(kTurn);
    held_.erase(0, has_role_ ? kTurn.size() : kTurnBegin.size());
    return true;
  }
  if (finds_calls_ && find_open_mark(held_).at == 0) {
    state_ = State::kText;
    return true;
  }
  analysis_ = held_.starts_with(kTurnThought);
  for (const std::string_view mark : {kTurnThought, kTurnText})
    if (held_.starts_with(mark)) {
      held_.erase(0, mark.size());
      break;
    }
  begin_message();
  return true;
}

// Functionary: the prompt ends with the mark of a call, so the name of a function may come, or kReader.
bool AnswerFilter::recipient_header(bool last) {
  const size_t end = held_.find_first_of(kJsonSpaces);
  if (end == std::string::npos && !last) return false;
  const std::string name = held_.substr(0, end);
  const bool calls = finds_calls_ && types_.has(name);
  if (name == kReader) held_.erase(0, end == std::string::npos ? end : end + 1);
  if (calls) open_ = find_open_mark(kRecipientMark);
  has_role_ = false;
  state_ = calls ? State::kCall : State::kStart;
  return true;
}

// Begins a message whose header was read.
void AnswerFilter::begin_message() {
  if (recipient_.empty() && (analysis_ ? thought_before_ : spoke_)) {
    parts_.push_back({analysis_ ? Part::Kind::kThought : Part::Kind::kText, "\n\n", "", ""});
    if (!analysis_) space_.clear();
  }
  has_role_ = false;
  state_ = State::kMessage;
}

bool AnswerFilter::message(bool last) {
  const std::span<const std::string_view> marks =
      kind_ == Opening::Kind::kSolar ? std::span<const std::string_view>(kTurnEnds) : kMessageEnds;
  size_t end = std::string::npos, held_back = 0;
  for (const std::string_view mark : marks) {
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
  for (const std::string_view mark : marks) {
    if (mark == kStartMark || mark == kTurnBegin || !held_.starts_with(mark)) continue;
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
  thought_says_ = false;
}

void AnswerFilter::add_thought(std::string_view text) {
  const size_t first = text.find_first_not_of(kJsonSpaces);
  if (first == std::string::npos) {
    if (thought_says_) thought_space_ += text;
    return;
  }
  const size_t end = text.find_last_not_of(kJsonSpaces) + 1;
  std::string shown;
  if (thought_says_) shown.append(std::exchange(thought_space_, {})).append(text.substr(0, first));
  shown.append(text.substr(first, end - first));
  parts_.push_back({Part::Kind::kThought, shown, "", ""});
  thought_space_ = text.substr(end);
  thought_says_ = true;
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
