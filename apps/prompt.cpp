// Prompts as token ids (see prompt.h).
#include "apps/prompt.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace app {

namespace {

constexpr uint64_t kTextEnd = 64 << 10;   // bytes of each end of a long text that are kept in memory
constexpr uint64_t kTextBlock = 1 << 18;  // bytes read at a time

bool seek_file(FILE* file, uint64_t at) {
#ifdef _WIN32
  return _fseeki64(file, static_cast<int64_t>(at), SEEK_SET) == 0;
#else
  return fseeko(file, static_cast<off_t>(at), SEEK_SET) == 0;
#endif
}

uint32_t continued(uint32_t flags) {
  return (flags & ~uint32_t{THIMBLE_TOKENIZE_ADD_BOS}) | THIMBLE_TOKENIZE_CONTINUE;
}

}  // namespace

LongText::LongText(const Model& model, const std::string& path, bool parses)
    : model_(model),
      path_(path),
      file_(nullptr, std::fclose),
      middle_flags_(continued(parses ? THIMBLE_TOKENIZE_PARSE_SPECIAL : 0)) {
  std::error_code failed;
  if (path != "-" && std::filesystem::is_regular_file(native_path(path), failed)) {
    file_.reset(open_file(path));
    size_ = std::filesystem::file_size(native_path(path));
  } else {
    held_ = read_file(path);
    size_ = held_.size();
  }
  const auto cut = [&](std::string_view text) {
    return thimble_tokenize_cut(model_.get(), text.data(), text.size());
  };
  if (size_ > 4 * kTextEnd) {
    begin_ = read(0, kTextEnd);
    end_ = read(size_ - kTextEnd, kTextEnd);
    // Searches only the first half for a cut, so that the second half stays in memory.
    const uint64_t first = cut(begin_), last = cut(std::string_view(end_).substr(0, kTextEnd / 2));
    if (first && last) {
      begin_.resize(first);
      end_.erase(0, last);
      middle_ = first;
      middle_end_ = size_ - end_.size();
      each_of_middle([&](std::span<const int32_t> ids) {
        middle_tokens_ += ids.size();
        return true;
      });
      return;
    }
  }
  begin_ = whole();
  end_.clear();
}

std::string LongText::read(uint64_t at, uint64_t size) const {
  if (!file_) return held_.substr(at, size);
  std::string bytes(size, '\0');
  errno = 0;
  if (!seek_file(file_.get(), at) || std::fread(bytes.data(), 1, size, file_.get()) != size)
    throw Failure(THIMBLE_IO,
                  "cannot read '" + path_ +
                      "': " + (errno ? std::strerror(errno) : "the file became shorter while it was read"));
  return bytes;
}

bool LongText::each_of_middle(const TakeIds& take) const {
  std::string part;  // bytes that were read and not tokenised yet
  for (uint64_t at = middle_; at < middle_end_ || !part.empty();) {
    const uint64_t size = std::min<uint64_t>(std::max<uint64_t>(kTextBlock, part.size()), middle_end_ - at);
    part += read(at, size);
    at += size;
    // If there is no place to cut, as in a text without spaces, more must be read. It reads as much again, so
    // that searching takes time linear in the text.
    const uint64_t cut =
        at < middle_end_ ? thimble_tokenize_cut(model_.get(), part.data(), part.size()) : part.size();
    if (!cut) continue;
    if (!take(token_ids(model_, std::string_view(part).substr(0, cut), middle_flags_))) return false;
    part.erase(0, cut);
  }
  return true;
}

// The prompt is rendered with a mark in place of the text's middle. A template that looks at the ends of a
// text, for example to remove white space, then sees the real ends.
Prompt::Prompt(const Model& model, const LongText& text,
               const std::function<std::string(std::string_view)>& write, uint32_t flags) {
  constexpr std::string_view kMark = "THIMBLEREADSTHEMIDDLEHERE";
  if (text.has_middle()) {
    const std::string written = write(std::string(text.begin()).append(kMark).append(text.end()));
    const size_t mark = written.find(kMark);
    if (mark != std::string::npos && written.find(kMark, mark + 1) == std::string::npos) {
      const std::string_view all = written;
      before_ = token_ids(model, all.substr(0, mark), flags);
      after_ = token_ids(model, all.substr(mark + kMark.size()), continued(flags));
      text_ = &text;
      return;
    }
  }
  before_ = token_ids(model, write(text.whole()), flags);
}

bool Prompt::each(uint64_t first, const TakeIds& take) const {
  uint64_t at = 0;
  const auto give = [&](std::span<const int32_t> ids) {
    const uint64_t passed = std::min<uint64_t>(ids.size(), first - std::min(first, at));
    at += ids.size();
    ids = ids.subspan(passed);
    return ids.empty() || take(ids);
  };
  if (!give(before_)) return false;
  if (first >= after_begin()) {
    at = after_begin();
  } else if (text_ && !text_->each_of_middle(give)) {
    return false;
  }
  return give(after_);
}

uint64_t Prompt::common(const Prompt& other) const {
  const auto same = [](const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
    return static_cast<uint64_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
  };
  const bool both = before_ == other.before_ && text_ == other.text_;
  return both ? after_begin() + same(after_, other.after_) : same(before_, other.before_);
}

}  // namespace app
