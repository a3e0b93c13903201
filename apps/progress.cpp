// The progress bar (see terminal.h).
#include <algorithm>
#include <cstdio>

#include "apps/sizes.h"
#include "apps/terminal.h"

namespace app {

void Progress::attach(thimble_session_options& options) {
  if (!enabled_) return;
  options.progress = [](void* self, const thimble_progress* progress) {
    static_cast<Progress*>(self)->show(*progress);
  };
  options.progress_user = this;
}

void Progress::show(const thimble_progress& p) {
  // Redraws at most ten times a second, because chunks of a small model finish more often.
  const auto now = std::chrono::steady_clock::now();
  const uint64_t total = std::max(p.total, expected_);
  if (now - last_ < std::chrono::milliseconds(100) || total == 0) return;
  last_ = now;
  constexpr int kWidth = 24;
  const double share = std::min(1.0, static_cast<double>(p.done) / static_cast<double>(total));
  char bar[kWidth + 1] = {};
  for (int i = 0; i < kWidth; ++i) bar[i] = i < static_cast<int>(share * kWidth) ? '#' : '.';
  const double rate = p.tokens_per_second;
  const double left = rate > 0 ? static_cast<double>(total - p.done) / rate : 0;
  std::fprintf(stderr, "\r\033[K[%s] %3.0f%%  %s of %s tokens  %.0f/s  %s left  pool %s of %s", bar,
               share * 100, format_count(p.done).c_str(), format_count(total).c_str(), rate,
               format_duration(left).c_str(), format_count(p.pool_entries).c_str(),
               format_count(p.pool_capacity).c_str());
  std::fflush(stderr);
  shown_ = true;
}

void Progress::clear() {
  if (!shown_) return;
  std::fprintf(stderr, "\r\033[K");
  std::fflush(stderr);
  shown_ = false;
}

}  // namespace app
