// Stop texts, which end an answer (see filters.h).
#include "apps/serve/filters.h"

#include <algorithm>

namespace app::serve {

size_t begun(std::string_view text, std::string_view word) {
  for (size_t n = std::min(text.size(), word.size() - 1); n > 0; --n) {
    if (text.substr(text.size() - n) == word.substr(0, n)) return n;
  }
  return 0;
}

std::string StopFilter::push(std::string_view text) {
  if (met_) return {};
  held_ += text;
  size_t first = std::string::npos, held_back = 0;
  for (const std::string& stop : stops_) {
    if (const size_t at = held_.find(stop); at < first) {
      first = at;
      met_ = &stop;
    }
    held_back = std::max(held_back, begun(held_, stop));
  }
  std::string shown = held_.substr(0, met_ ? first : held_.size() - held_back);
  held_.erase(0, met_ ? held_.size() : shown.size());
  return shown;
}

}  // namespace app::serve
