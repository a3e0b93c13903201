// Finds the place in an answer from which a grammar holds.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "apps/library.h"
#include "apps/serve/answer.h"

namespace app::serve {

// The grammars of a request. null: none.
struct Grammars {
  Grammar form;                                 // of an answer that is not a call
  Grammar call;                                 // of a call in JSON
  bool bare = false;                            // such a call may have no mark
  std::map<const CallFormat*, Grammar> styles;  // of calls in other notations, after the mark of their format
  // In gpt-oss' format, the name of a function is in the header of a message: the grammars of the functions'
  // arguments, and that of their names with a space after them.
  std::map<std::string, Grammar> arguments;
  Grammar name;
  // The tokens that begin a call which must be made, before its name or its grammar.
  std::vector<int32_t> mark;
};

// Makes the grammars of a task whose prompt is known. Throws a Failure that says what is wrong with them.
Grammars make_grammars(const Model& model, const Task& task);

// An answer may begin with thoughts, and with a call of a tool instead of the text that the request
// describes. Whether it does is decided by the most likely token, which then comes next. The mark of a call
// whose arguments are checked is written for the model.
class Gate {
 public:
  // The objects must outlive the gate.
  Gate(const Model& model, const Task& task, const Grammars& grammars);
  // The logits of the next token.
  using Logits = std::function<std::vector<float>()>;
  // Called before each token. Returns the token that comes next whatever the model would sample, or -1. Sets
  // the session's grammar where it begins.
  int32_t before(const Session& session, const Logits& logits);
  // Adds the text of a token.
  void push(std::string_view text);

 private:
  // The grammar of what follows the mark of a format, or nullptr.
  const Grammar* grammar_after(const CallFormat* format) const;
  int32_t begin(const Session& session, const Grammar& grammar);
  int32_t write_mark(const Session& session);

  const Model& model_;
  const Task& task_;
  const Grammars& grammars_;
  AnswerFilter filter_;
  bool waits_;  // a grammar may still begin
  bool thought_ = false;
  // Where a call begins whose arguments are checked: the tokens of its mark, how many were written, and the
  // grammar after them; null: the name of the function comes first.
  bool marked_ = false;
  std::vector<int32_t> mark_;
  size_t written_ = 0;
  const Grammar* after_mark_;
  bool names_ = false;
  std::string name_;
  int spaces_ = 0;
};

}  // namespace app::serve
