// Ctrl-C and typed lines (see terminal.h).
#include "apps/terminal.h"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
// After windows.h, whose types they use.
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
  std::signal(SIGINT, on_interrupt);  // Windows takes the handler away with each signal
#endif
  thimble_session* session = running.load();
  if (!session) return;
  if (presses > 1) std::_Exit(kExitInterrupted);
  thimble_session_interrupt(session);
}

// Without SA_RESTART, so that Ctrl-C also ends the wait for a line.
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
