// What an answer's text goes through on its way out (see filters.h).
#include "apps/serve/filters.h"

#include <algorithm>

#include "apps/serve/json.h"

namespace app::serve {

namespace {

constexpr std::string_view kOpen = "<tool_call>", kClose = "</tool_call>";
constexpr const char* kSpaces = " \n\r\t";

// How many bytes at the end of a text may be the beginning of `word`.
size_t begun(std::string_view text, std::string_view word) {
  for (size_t n = std::min(text.size(), word.size() - 1); n > 0; --n) {
    if (text.substr(text.size() - n) == word.substr(0, n)) return n;
  }
  return 0;
}

}  // namespace

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

void ToolCallFilter::add_text(std::vector<Part>& parts, std::string_view text) {
  const size_t first = text.find_first_not_of(kSpaces);
  if (first == std::string_view::npos) {
    space_ += text;
    return;
  }
  const size_t end = text.find_last_not_of(kSpaces) + 1;
  std::string shown;
  if (!called_) shown.append(space_).append(text.substr(0, first));
  shown.append(text.substr(first, end - first));
  parts.push_back({shown, "", ""});
  space_ = text.substr(end);
  called_ = false;
}

void ToolCallFilter::add_call(std::vector<Part>& parts, const std::string& body, const std::string& written) {
  Json call;
  try {
    call = parse_bounded(body);
  } catch (const Refusal&) {  // it stays text
  }
  const bool named = call.is_object() && call.contains("name") && call["name"].is_string() &&
                     !call["name"].get_ref<const std::string&>().empty();
  const Json arguments = named && call.contains("arguments") ? call["arguments"] : Json::object();
  if (!named || !arguments.is_object()) {
    add_text(parts, written);
    return;
  }
  space_.clear();
  called_ = true;
  parts.push_back({"", call["name"], write_json(arguments)});
}

void ToolCallFilter::outside(std::vector<Part>& parts, bool last) {
  const size_t at = held_.find(kOpen);
  inside_ = at != std::string::npos;
  const size_t shown = inside_ ? at : held_.size() - (last ? 0 : begun(held_, kOpen));
  if (shown) add_text(parts, std::string_view(held_).substr(0, shown));
  held_.erase(0, inside_ ? at + kOpen.size() : shown);
}

std::vector<Part> ToolCallFilter::push(std::string_view text) {
  std::vector<Part> parts;
  held_ += text;
  for (;;) {
    if (!inside_) outside(parts, false);
    const size_t end = inside_ ? held_.find(kClose) : std::string::npos;
    if (end == std::string::npos) return parts;
    const std::string body = held_.substr(0, end);
    held_.erase(0, end + kClose.size());
    inside_ = false;
    add_call(parts, body, std::string(kOpen) + body + std::string(kClose));
  }
}

std::vector<Part> ToolCallFilter::finish() {
  std::vector<Part> parts;
  const std::string rest = std::exchange(held_, {});
  if (inside_)  // a model may end its turn instead of closing the call
    add_call(parts, rest, std::string(kOpen) + rest);
  else if (!rest.empty())
    add_text(parts, rest);
  inside_ = false;
  if (!called_ && !space_.empty()) parts.push_back({std::exchange(space_, {}), "", ""});
  return parts;
}

}  // namespace app::serve
