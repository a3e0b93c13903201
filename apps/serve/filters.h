// What an answer's text goes through on its way out: stops, and calls of tools.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace app::serve {

// Ends a text at the first of some texts, which is no part of it. What might be the beginning of one is held
// back.
class StopFilter {
 public:
  explicit StopFilter(std::vector<std::string> stops) : stops_(std::move(stops)) {}
  // The text that may be shown now.
  std::string push(std::string_view text);
  // What is held back, once nothing follows.
  std::string finish() { return std::exchange(held_, {}); }
  // The stop that was met; nullptr: none so far.
  const std::string* met() const { return met_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  const std::string* met_ = nullptr;
};

// Text, or a call of a tool.
struct Part {
  std::string text;
  std::string name, arguments;  // of a call; arguments are a JSON object as text
  bool is_call() const { return !name.empty(); }
};

// Finds calls in an answer as many models were taught to write them:
// <tool_call>{"name": ..., "arguments": {...}}</tool_call>. What does not parse stays text; white space
// beside calls goes.
class ToolCallFilter {
 public:
  std::vector<Part> push(std::string_view text);
  std::vector<Part> finish();

 private:
  void outside(std::vector<Part>& parts, bool last);
  void add_text(std::vector<Part>& parts, std::string_view text);
  void add_call(std::vector<Part>& parts, const std::string& body, const std::string& written);

  std::string held_;   // not decided yet
  std::string space_;  // white space that is shown if text follows
  bool inside_ = false, called_ = false;
};

}  // namespace app::serve
