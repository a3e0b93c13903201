// Terminal input and output: Ctrl-C, lines that the user types, and a progress bar.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

#include "apps/library.h"

namespace app {

bool is_terminal(FILE* stream);

#ifdef _WIN32
// Sets up the output for UTF-8 whose bytes are written unchanged, without added carriage returns.
void write_utf8();
#endif

// Makes text from a file or a model safe for a terminal: control characters become escapes such as "\u001b",
// except those in `kept`.
std::string visible(std::string_view text, std::string_view kept = "");
// Writes generated text to standard output. Control characters are escaped if it is a terminal.
void write_answer(std::string_view text);

// While an object of this class exists, Ctrl-C interrupts its session instead of ending the process. A second
// Ctrl-C ends the process at once.
class Interruptible {
 public:
  explicit Interruptible(const Session& session);
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  // Whether Ctrl-C was pressed.
  static bool pressed();
};

// Reads a line from standard input, without its line end. Prints `prompt` first if a person types. Returns
// nothing at the end of the input, or after Ctrl-C was pressed twice.
std::optional<std::string> read_line(const std::string& prompt);

// Shows reading progress on standard error if it is a terminal: bar, tokens, rate, time left, fill of the
// pool.
class Progress {
 public:
  // Sets the progress function in a session's options. This object must outlive the session.
  void attach(thimble_session_options& options);
  // Sets the number of tokens that the stream will have. It must exceed the number that the session was given
  // so far.
  void expect(uint64_t tokens) { expected_ = tokens; }
  // Removes the bar from the screen. Call this before writing anything else.
  void clear();

 private:
  void show(const thimble_progress& progress);
  bool enabled_ = is_terminal(stderr);
  bool shown_ = false;
  uint64_t expected_ = 0;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace app
