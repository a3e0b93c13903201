// What a model's answer is made of: thoughts, text for the reader, and calls of tools.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "apps/serve/task.h"

namespace app::serve {

// How the answer to a prompt begins, by the prompt's end.
Opening opening_of(std::string_view prompt);
// What is read after a prompt with this opening, so that the answer goes on with a message of the assistant.
std::string begun_answer(const Opening& opening, const Json& message);

// Gives a message of the assistant its thoughts, under each of the names that chat templates know.
void set_thoughts(Json& message, const std::string& thoughts);
// Makes the last message of a conversation, which is the assistant's, the beginning of the answer.
void go_on_with_last(Task& task);
// What an answer's call is named: nine letters and digits, since Mistral's templates take nothing else.
std::string call_id(const Identity& who, size_t index);

// Whether a control token is one that AnswerFilter must see, though control tokens have no text.
bool is_mark(std::string_view token);

struct Part {
  enum class Kind { kThought, kText, kCall };
  Kind kind = Kind::kText;
  std::string text;             // of a thought or a text
  std::string name, arguments;  // of a call; arguments are a JSON object as text
  bool is_call() const { return kind == Kind::kCall; }
};

// Takes an answer apart as it comes. Thoughts are what stands at its beginning between marks such as <think>
// and </think>, and the analysis channel of gpt-oss' format (harmony). Calls are what many models were taught
// to write, <tool_call>{"name": ..., "arguments": {...}}</tool_call>, the same objects alone at an answer's
// beginning (Llama, small Qwens), and harmony's messages to functions; a call in a thought is a thought. What
// does not parse stays text. White space next to thoughts and calls goes.
class AnswerFilter {
 public:
  // `finds_calls`: there are tools, else calls are text.
  AnswerFilter(const Opening& opening, bool finds_calls);
  std::vector<Part> push(std::string_view text);
  std::vector<Part> finish();

 private:
  enum class State {
    kStart,    // nothing but white space and thoughts so far
    kThought,  // up to thought_end_
    kText,
    kBare,    // in an object that may be a call without its marks
    kCall,    // after <tool_call>
    kHeader,  // of a message in harmony, up to <|message|>
    kMessage  // up to the mark that ends it
  };
  // Each takes what is decided from held_, and says whether it could. `last`: nothing follows.
  bool step(bool last);
  bool start(bool last);
  bool thought(bool last);
  bool text(bool last);
  bool bare(bool last);
  bool call(bool last);
  bool header(bool last);
  bool message(bool last);

  std::string take(size_t count);
  void add_thought(std::string_view text);
  void add_text(std::string_view text);
  bool add_call(const std::string& body, bool bare);
  void separate();

  const bool finds_calls_;
  State state_;
  std::string thought_end_;
  std::string held_;           // not decided yet
  std::string space_;          // white space that is shown if text follows
  std::string thought_space_;  // the same of a thought
  bool beside_ = false;        // a call or a thought came last
  bool thinks_ = false;        // this thought has words
  // Of harmony.
  std::string recipient_;                        // whom the message is to; "": the reader
  bool analysis_ = false;                        // the message is a thought
  bool spoke_ = false, thought_before_ = false;  // an earlier message was text, or a thought
  std::vector<Part> parts_;                      // since the last push
};

}  // namespace app::serve
