// Handles Ctrl-C and typed lines (see terminal.h).
#include "apps/terminal.h"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
// These headers come after windows.h, because they use its types.
#include <fcntl.h>
#include <io.h>
#else
#include <unistd.h>
#endif

namespace app {

namespace {

std::atomic<thimble_session*> running{nullptr};
volatile std::sig_atomic_t presses = 0;
static_assert(std::atomic<thimble_session*>::is_always_lock_free, "the signal handler reads it");

extern "C" void on_interrupt(int) {
  presses = presses + 1;
#ifdef _WIN32
  std::signal(SIGINT, on_interrupt);  // Windows removes the handler with each signal
#endif
  thimble_session* session = running.load();
  if (!session) return;
  if (presses > 1) std::_Exit(kExitInterrupted);
  thimble_session_interrupt(session);
}

// SA_RESTART is not set, so that Ctrl-C also ends the wait for a line.
void handle_interrupts(void (*handler)(int)) {
#ifdef _WIN32
  std::signal(SIGINT, handler);
#else
  struct sigaction action = {};
  action.sa_handler = handler;
  sigaction(SIGINT, &action, nullptr);
#endif
}

}  // namespace

bool is_terminal(FILE* stream) {
#ifdef _WIN32
  return _isatty(_fileno(stream)) != 0;
#else
  return isatty(fileno(stream)) != 0;
#endif
}

#ifdef _WIN32
void write_utf8() {
  SetConsoleOutputCP(CP_UTF8);
  _setmode(_fileno(stdin), _O_BINARY);
  _setmode(_fileno(stdout), _O_BINARY);
}
#endif

std::string visible(std::string_view text, std::string_view kept) {
  std::string shown;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = [&](size_t at) {
      return at < text.size() ? static_cast<unsigned char>(text[at]) : uint32_t{0};
    };
    uint32_t code = 0, size = 0;  // of a control character
    if (byte(i) < 0x20 || byte(i) == 0x7f) {
      if (kept.find(text[i]) == kept.npos) code = byte(i), size = 1;
    } else if (byte(i) == 0xc2 && byte(i + 1) >= 0x80 && byte(i + 1) < 0xa0) {  // C1
      code = byte(i + 1), size = 2;
    } else if (byte(i) == 0xe2 && (byte(i + 1) == 0x80 || byte(i + 1) == 0x81)) {
      // Line separators, and characters that change the direction of text.
      code = 0x2000 | (byte(i + 1) & 1) << 6 | (byte(i + 2) & 0x3f);
      const bool obeyed = (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
      size = obeyed && byte(i + 2) >= 0x80 ? 3 : 0;
    }
    if (!size) {
      shown += text[i];
      continue;
    }
    char escape[8];
    std::snprintf(escape, sizeof escape, "\\u%04x", code);
    shown += escape;
    i += size - 1;
  }
  return shown;
}

void write_answer(std::string_view text) {
  static const bool person = is_terminal(stdout);
  const std::string shown = person ? visible(text, "\n\t") : std::string(text);
  std::fwrite(shown.data(), 1, shown.size(), stdout);
  std::fflush(stdout);
}

Interruptible::Interruptible(const Session& session) {
  presses = 0;
  running = session.get();
  handle_interrupts(on_interrupt);
}

Interruptible::~Interruptible() {
  handle_interrupts(SIG_DFL);
  running = nullptr;
}

bool Interruptible::pressed() { return presses > 0; }

std::optional<std::string> read_line(const std::string& prompt) {
  const bool person = is_terminal(stdin);
  presses = 0;
  if (person) handle_interrupts(on_interrupt);
  std::optional<std::string> line;
  while (!line && presses < 2) {
    if (person) {
      std::fprintf(stderr, "%s", prompt.c_str());
      std::fflush(stderr);
    }
    std::string text;
    int c;
    while ((c = std::getchar()) != EOF && c != '\n') text += static_cast<char>(c);
    const bool interrupted = c == EOF && std::ferror(stdin) && errno == EINTR;
    std::clearerr(stdin);
    if (c == EOF && !interrupted && text.empty()) break;
    if (interrupted) {
      std::fprintf(stderr, presses < 2 ? "\n(Ctrl-C again quits)\n" : "\n");
      continue;
    }
    if (!text.empty() && text.back() == '\r') text.pop_back();
    line = text;
  }
  if (person) handle_interrupts(SIG_DFL);
  return line;
}

}  // namespace app
