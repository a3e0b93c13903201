// Splits a model's answer into thoughts, text for the reader, and tool calls.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "apps/serve/calls.h"
#include "apps/serve/task.h"

namespace app::serve {

// How the answer to a prompt begins, which follows from the end of the prompt.
Opening opening_of(std::string_view prompt);
// The text that is read after a prompt with this opening, so that the answer continues an assistant message.
// `thought_mark`: the mark with which the model opens a thought.
std::string begun_answer(const Opening& opening, const Json& message, std::string_view thought_mark);
// The marks that open thoughts; that of most models is the last.
std::vector<std::string_view> thought_marks();

// Stores the thoughts in an assistant message, under each of the names that chat templates use.
void set_thoughts(Json& message, const std::string& thoughts);
// Turns the last message of a conversation, which is the assistant's, into the beginning of the answer.
void go_on_with_last(Task& task);
// The id of an answer's call: nine letters and digits, because Mistral's templates accept nothing else.
std::string call_id(const Identity& who, size_t index);

// Whether a token is a mark that opens a thought.
bool opens_thought(std::string_view token);
// Whether a token at the beginning of an answer says that text for the reader follows.
bool opens_text(const Opening& opening, std::string_view token);
// Whether AnswerFilter must see a control token, although control tokens have no text.
bool is_mark(std::string_view token);

struct Part {
  enum class Kind { kThought, kText, kCall };
  Kind kind = Kind::kText;
  std::string text;             // of a thought or a text
  std::string name, arguments;  // of a call; arguments are a JSON object as text
  bool is_call() const { return kind == Kind::kCall; }
};

// Splits an answer into parts while it is generated.
//
// Thoughts are the text at the beginning of the answer between marks such as <think> and </think>, the
// analysis channel of gpt-oss' format (harmony), and the messages of Solar Open that begin with <|think|>.
//
// Calls have marks around them (calls.h), or are JSON objects without marks at the beginning of an answer
// (Llama, small Qwens), or harmony's messages to functions. A fenced block of JSON that consists of calls of
// the request's tools counts, too, because models that were not trained with tools write that. A call inside
// a thought belongs to the thought, except Apertus', which calls tools in the middle of a thought.
//
// Text that does not parse as a call stays text. White space next to thoughts and calls is removed.
class AnswerFilter {
 public:
  // `tools`: those of the request, an array in OpenAI's form. null: calls are text.
  AnswerFilter(const Opening& opening, const Json& tools);
  std::vector<Part> push(std::string_view text);
  std::vector<Part> finish();
  // Where in the answer the next text will be.
  enum class Place {
    kBefore,  // the answer has not begun; a thought or a header may come first
    kStart,   // at the beginning of the answer, or after white space
    kCall,    // after a mark that opens calls, or at the beginning of a harmony call
    kInside   // inside the answer
  };
  Place place() const;
  // The function that a harmony message calls.
  std::string function() const {
    return recipient_.empty() ? "" : recipient_.substr(sizeof "functions." - 1);
  }
  // Whether the name of the recipient comes next.
  bool names() const { return state_ == State::kHeader && has_role_; }
  // The format of the call that is read.
  const CallFormat* format() const { return open_.format; }
  // Whether the text that comes now belongs to a thought.
  bool thinks() const { return state_ == State::kThought || (state_ == State::kMessage && analysis_); }

 private:
  enum class State {
    kStart,    // only white space and thoughts so far
    kThought,  // in a thought, up to thought_end_
    kText,
    kBare,    // in an object that may be a call without marks
    kCall,    // after a mark that opens calls
    kFence,   // at the beginning of a fenced block, which may be a call
    kHeader,  // in the header of a message of harmony, Solar Open or Functionary
    kMessage  // in such a message, up to the mark that ends it
  };
  // Each function removes from held_ the text whose meaning is decided, and returns whether it removed any.
  // `last`: no text follows.
  bool step(bool last);
  bool start(bool last);
  bool thought(bool last);
  bool text(bool last);
  bool bare(bool last);
  bool call(bool last);
  bool fence(bool last);
  bool header(bool last);
  bool solar_header(bool last);
  bool recipient_header(bool last);
  void begin_message();
  bool message(bool last);

  std::string take(size_t count);
  void add_thought(std::string_view text);
  void add_text(std::string_view text);
  void add_calls(std::vector<ToolCall> calls);
  void separate();

  const bool finds_calls_;
  const ToolTypes types_;
  State state_;
  std::string thought_end_;
  OpenMark open_;              // of the call that is read
  std::string held_;           // text whose meaning is not decided yet
  std::string space_;          // white space that is shown if text follows
  std::string thought_space_;  // the same for a thought
  bool fenced_ = false;        // in a fenced block that is text
  bool beside_ = false;        // the last part is a call or a thought
  bool thought_says_ = false;  // the current thought has words
  bool interrupted_ = false;   // the call that is read is in the middle of a thought
  // State of the formats of messages.
  const Opening::Kind kind_;
  bool has_role_;                                // what the next message is may come; in harmony, never
  std::string recipient_;                        // recipient of the message; "": the reader
  bool analysis_ = false;                        // the message is a thought
  bool spoke_ = false, thought_before_ = false;  // an earlier message was text; an earlier one was a thought
  std::vector<Part> parts_;                      // parts since the last push
};

}  // namespace app::serve
