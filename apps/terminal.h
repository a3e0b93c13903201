// What the command does with a terminal: Ctrl-C, lines that a person types, and a progress bar.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

#include "apps/library.h"

namespace app {

bool is_terminal(FILE* stream);

#ifdef _WIN32
// What is printed is UTF-8, and bytes stay as they are: no carriage returns are put in.
void write_utf8();
#endif

// Text that came from a file or a model as a terminal may be given it: control characters are shown as
// "\u001b" and not obeyed, but for those in `kept`.
std::string visible(std::string_view text, std::string_view kept = "");
// Writes generated text to standard output: as it is, and to a terminal without control characters.
void write_answer(std::string_view text);

// While one lives, Ctrl-C interrupts its session instead of ending the process; a second one ends it at once.
class Interruptible {
 public:
  explicit Interruptible(const Session& session);
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  // Ctrl-C was pressed.
  static bool pressed();
};

// A line from standard input without its end, asked for by `prompt` where a person types. Nothing at the end
// of the input, or after Ctrl-C twice.
std::optional<std::string> read_line(const std::string& prompt);

// Reading progress on standard error, where that is a terminal: bar, tokens, rate, time left, fill of the
// pool.
class Progress {
 public:
  // What a session's options need; the object must outlive the session.
  void attach(thimble_session_options& options);
  // The stream will have so many tokens; more of them than were given to the session so far.
  void expect(uint64_t tokens) { expected_ = tokens; }
  // Takes the bar off the screen, before anything else is written.
  void clear();

 private:
  void show(const thimble_progress& progress);
  bool enabled_ = is_terminal(stderr);
  bool shown_ = false;
  uint64_t expected_ = 0;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace app
