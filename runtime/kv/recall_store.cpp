#include "runtime/kv/recall_store.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <limits>

#include "base/bits.h"
#include "base/checksum.h"

namespace thimble {
namespace {

constexpr uint32_t kNoSlot = UINT32_MAX;

Status changed_file() { return error(Code::kIo, "the temporary file of evicted entries was changed"); }

}  // namespace

// Places the arrays of each run, or only counts their bytes.
RecallStore::Sizes RecallStore::place(const Shape& shape, std::vector<Run>* runs) {
  constexpr uint64_t kAlignment = 64;
  Sizes next;
  const auto take = [&](uint64_t& at, uint64_t bytes) {
    const uint64_t first = at;
    at = round_up(at + bytes, kAlignment);
    return first;
  };
  for (const Rows& rows : shape.runs) {
    const uint64_t pages = rows.head_dim ? shape.pages : 0;
    Run run;
    run.key_bytes = kv_bytes(rows.k, rows.head_dim);
    run.value_bytes = kv_bytes(rows.v, rows.head_dim);
    run.first = take(next.memory, pages * sizeof(Page));
    run.order = take(next.memory, pages * sizeof(uint32_t));
    run.summaries = take(next.memory, pages * 2 * rows.head_dim * sizeof(float));
    run.rows = take(shape.in_file ? next.file : next.memory,
                    pages * kRecallPage * (run.key_bytes + run.value_bytes));
    if (runs) runs->push_back(run);
  }
  return next;
}

namespace {

// The bytes of the largest page's rows.
uint64_t buffer_bytes(const RecallStore::Shape& shape) {
  uint64_t most = 0;
  for (const RecallStore::Rows& rows : shape.runs)
    most = std::max(most, kRecallPage * (kv_bytes(rows.k, rows.head_dim) + kv_bytes(rows.v, rows.head_dim)));
  return shape.in_file ? most : 0;
}

}  // namespace

uint64_t RecallStore::bytes(const Shape& shape) {
  const uint64_t lists = shape.runs.size() * (sizeof(Run) + 2 * sizeof(uint32_t));
  return round_up(place(shape, nullptr).memory, 4096) + lists + buffer_bytes(shape);
}

uint64_t RecallStore::file_bytes(const Shape& shape) { return place(shape, nullptr).file; }

uint32_t RecallStore::most_pages(Shape shape, uint64_t budget) {
  uint32_t low = 0, high = 1u << 27;  // as many as positions allow
  while (low < high) {
    shape.pages = low + (high - low + 1) / 2;
    if ((shape.in_file ? file_bytes(shape) : bytes(shape)) <= budget)
      low = shape.pages;
    else
      high = shape.pages - 1;
  }
  return low;
}

Result<RecallStore> RecallStore::create(Shape shape) {
  RecallStore store;
  THIMBLE_LET(memory, Pages::allocate(place(shape, &store.runs_).memory));
  if (shape.in_file) {
    THIMBLE_LET(file, ScratchFile::create());
    store.file_.emplace(std::move(file));
  }
  store.runs_.shrink_to_fit();
  store.memory_ = std::move(memory);
  store.counts_.resize(shape.runs.size());
  store.buffer_.resize(buffer_bytes(shape));
  store.shape_ = std::move(shape);
  return store;
}

void RecallStore::clear() {
  std::fill(counts_.begin(), counts_.end(), 0);
  entries_ = 0;
}

void RecallStore::close() {
  clear();
  file_.reset();
  closed_ = true;
  failed_ = false;
}

Status RecallStore::copy_from(const RecallStore& from) {
  if (from.closed_) close();
  counts_ = from.counts_;
  entries_ = from.entries_;
  for (size_t run = 0; run < runs_.size(); ++run) {
    const uint32_t pages = counts_[run];
    const auto copy = [&](uint64_t at, uint64_t bytes) {
      std::memcpy(memory_.data() + at, from.memory_.data() + at, bytes);
    };
    copy(runs_[run].first, pages * sizeof(Page));
    copy(runs_[run].order, pages * sizeof(uint32_t));
    copy(runs_[run].summaries, pages * summary_bytes(run));
    if (!file_) copy(runs_[run].rows, pages * rows_bytes(run));
    for (uint32_t slot = 0; slot < pages && file_; ++slot) {
      THIMBLE_LET(rows, from.rows(run, slot));
      THIMBLE_TRY(write_rows(run, slot, rows));
    }
  }
  return {};
}

Result<std::byte*> RecallStore::rows(size_t run, uint32_t slot) const {
  std::byte* const rows = place_for_rows(run, slot);
  if (!file_) return rows;
  Status read = file_->read(rows_at(run, slot), rows, rows_bytes(run));
  if (read.ok() && sum_of(run, rows) != pages_of(run)[slot].sum) read = changed_file();
  failed_ |= !read.ok();
  THIMBLE_TRY(read);
  return rows;
}

// Writes the rows of a page that are not yet where they belong.
Status RecallStore::write_rows(size_t run, uint32_t slot, const std::byte* rows) {
  if (!file_) return {};
  note_rows(run, slot, rows);
  return file_->write(rows_at(run, slot), rows, rows_bytes(run));
}

// Notes what the file has as the rows of a page.
void RecallStore::note_rows(size_t run, uint32_t slot, const std::byte* rows) {
  pages_of(run)[slot].sum = sum_of(run, rows);
  file_end_ = std::max(file_end_, rows_at(run, slot) + rows_bytes(run));
}

uint32_t RecallStore::sum_of(size_t run, const std::byte* rows) const {
  return static_cast<uint32_t>(checksum(rows, rows_bytes(run)));
}

float* RecallStore::summary(size_t run, uint32_t slot) const {
  return reinterpret_cast<float*>(memory_.data() + runs_[run].summaries) +
         uint64_t(slot) * 2 * shape_.runs[run].head_dim;
}

std::span<const float> RecallStore::means(size_t run, uint32_t i) const {
  return {summary(run, slot(run, i)), shape_.runs[run].head_dim};
}

std::span<const float> RecallStore::squares(size_t run, uint32_t i) const {
  return {summary(run, slot(run, i)) + shape_.runs[run].head_dim, shape_.runs[run].head_dim};
}

// ---- adding ----

// The slot of the page with this number. It may be new, or that of the page with the lowest score, if the new
// page has no lower one. Otherwise kNoSlot.
uint32_t RecallStore::slot_for(size_t run, int32_t number, float score) {
  Page* const pages = pages_of(run);
  uint32_t* const order = order_of(run);
  uint32_t& count = counts_[run];
  const auto place_of = [&](int32_t wanted) {
    return std::lower_bound(order, order + count, wanted,
                            [&](uint32_t slot, int32_t n) { return pages[slot].number < n; });
  };
  uint32_t* at = place_of(number);
  if (at < order + count && pages[*at].number == number) return *at;
  uint32_t slot = count;
  if (count == shape_.pages) {
    uint32_t* const lowest = std::min_element(
        order, order + count, [&](uint32_t a, uint32_t b) { return pages[a].score < pages[b].score; });
    if (lowest == order + count || score < pages[*lowest].score) return kNoSlot;
    slot = *lowest;
    entries_ -= static_cast<uint32_t>(std::popcount(pages[slot].held));
    std::copy(lowest + 1, order + count, lowest);
    --count;
    at = place_of(number);
  }
  std::copy_backward(at, order + count, order + count + 1);
  *at = slot;
  ++count;
  pages[slot] = {.number = number, .score = score};
  std::fill_n(summary(run, slot), 2 * shape_.runs[run].head_dim, 0.0f);
  return slot;
}

Status RecallStore::add(size_t run, const Entries& entries) {
  if (!shape_.runs[run].head_dim || closed_) return {};
  const std::span<const int32_t> positions = entries.positions;
  const uint64_t key_bytes = runs_[run].key_bytes, value_bytes = runs_[run].value_bytes;
  const auto page_of = [&](size_t i) { return positions[i] / static_cast<int32_t>(kRecallPage); };
  for (size_t i = 0, end; i < positions.size(); i = end) {
    float score = -std::numeric_limits<float>::infinity();
    for (end = i; end < positions.size() && page_of(end) == page_of(i); ++end)
      if (entries.scores[end] > score) score = entries.scores[end];  // a NaN counts as -inf
    const uint32_t slot = slot_for(run, page_of(i), score);
    if (slot == kNoSlot) continue;
    Page& page = pages_of(run)[slot];
    page.score = std::max(page.score, score);
    std::byte* const k = place_for_rows(run, slot);
    if (page.held)
      THIMBLE_TRY(rows(run, slot));
    else  // nothing of an earlier page gets into saved files
      std::fill_n(k, rows_bytes(run), std::byte{});
    std::byte* const v = k + kRecallPage * key_bytes;
    for (size_t n = i; n < end; ++n) {
      const uint32_t place = static_cast<uint32_t>(positions[n]) % kRecallPage;
      std::memcpy(k + place * key_bytes, entries.k + n * key_bytes, key_bytes);
      std::memcpy(v + place * value_bytes, entries.v + n * value_bytes, value_bytes);
      page.held = static_cast<uint16_t>(page.held | 1u << place);
      ++entries_;
      summarise(run, slot, entries.keys + n * shape_.runs[run].head_dim);
    }
    THIMBLE_TRY(write_rows(run, slot, k));
  }
  return {};
}

// Adds a key to the mean and the sum of squared differences from it (Welford).
void RecallStore::summarise(size_t run, uint32_t slot, const float* key) {
  const uint32_t head_dim = shape_.runs[run].head_dim;
  const auto count = static_cast<float>(std::popcount(pages_of(run)[slot].held));
  float *const mean = summary(run, slot), *const squares = mean + head_dim;
  for (uint32_t c = 0; c < head_dim; ++c) {
    const float apart = key[c] - mean[c];
    mean[c] += apart / count;
    squares[c] += apart * (key[c] - mean[c]);
  }
}

// ---- reading ----

Result<uint32_t> RecallStore::fetch(size_t run, uint32_t i, int32_t* positions, std::byte* k,
                                    std::byte* v) const {
  const Page& page = this->page(run, i);
  const uint64_t key_bytes = runs_[run].key_bytes, value_bytes = runs_[run].value_bytes;
  THIMBLE_LET(keys, rows(run, slot(run, i)));
  const std::byte* const values = keys + kRecallPage * key_bytes;
  uint32_t count = 0;
  for (uint32_t place = 0; place < kRecallPage; ++place) {
    if (!(page.held >> place & 1)) continue;
    positions[count] = page.number * static_cast<int32_t>(kRecallPage) + static_cast<int32_t>(place);
    std::memcpy(k + count * key_bytes, keys + place * key_bytes, key_bytes);
    std::memcpy(v + count * value_bytes, values + place * value_bytes, value_bytes);
    ++count;
  }
  return count;
}

void RecallStore::set_recalled(size_t run, std::span<const uint32_t> chosen) {
  Page* const pages = pages_of(run);
  for (uint32_t i = 0; i < counts_[run]; ++i) pages[i].recalled = 0;
  for (const uint32_t i : chosen) pages[slot(run, i)].recalled = pages[slot(run, i)].held;
}

RecallStore::Places RecallStore::places(size_t run) const {
  // attend_all reads pages as words.
  static_assert(sizeof(Page) == 16 && offsetof(Page, number) == 0 && offsetof(Page, held) == 4);
  const Run& r = runs_[run];
  const Shape one{{shape_.runs[run]}, shape_.pages, shape_.in_file};
  return {r.first, r.order, r.rows, place(one, nullptr).memory, rows_bytes(run), kRecallPage * r.key_bytes};
}

// Pages use the first slots, so their rows are one range of the file.
Status RecallStore::load(size_t run, std::byte* to) const {
  Status read = file_->read(rows_at(run, 0), to, counts_[run] * rows_bytes(run));
  for (uint32_t at = 0; at < counts_[run] && read.ok(); ++at)
    if (sum_of(run, to + at * rows_bytes(run)) != pages_of(run)[at].sum) read = changed_file();
  failed_ |= !read.ok();
  return read;
}

// ---- files ----

uint64_t RecallStore::saved_bytes(std::span<const uint32_t> counts) const {
  uint64_t bytes = 0;
  for (size_t run = 0; run < runs_.size(); ++run)
    bytes += counts[run] * (sizeof(Page) + summary_bytes(run) + rows_bytes(run));
  return bytes;
}

const char* RecallStore::fault(std::span<const uint32_t> counts, std::span<const std::byte> saved,
                               uint64_t read, std::span<const uint32_t> recalled) const {
  for (size_t run = 0; run < runs_.size(); ++run) {
    if (counts[run] && !shape_.runs[run].head_dim) return "its store has pages of a head that has none";
    int64_t before = -1;
    uint32_t in_pool = 0;
    for (uint32_t i = 0; i < counts[run]; ++i) {
      Page page;
      std::memcpy(&page, saved.data(), sizeof page);
      saved = saved.subspan(sizeof page + summary_bytes(run) + rows_bytes(run));
      if (page.number <= before || page.held == 0 || (page.recalled != 0 && page.recalled != page.held) ||
          uint64_t(page.number) * kRecallPage + static_cast<uint32_t>(std::bit_width(page.held)) > read)
        return "the pages of its store are not those of the text";
      before = page.number;
      in_pool += static_cast<uint32_t>(std::popcount(page.recalled));
    }
    if (in_pool != recalled[run]) return "its store does not hold the entries that came from it";
  }
  return nullptr;
}

Result<std::optional<ScratchFile>> RecallStore::file_of(std::span<const uint32_t> counts,
                                                        std::span<const std::byte> saved) const {
  if (!shape_.in_file) return std::optional<ScratchFile>();
  THIMBLE_LET(file, ScratchFile::create());
  for (size_t run = 0; run < runs_.size(); ++run)
    for (uint32_t i = 0; i < counts[run]; ++i) {
      saved = saved.subspan(sizeof(Page) + summary_bytes(run));
      THIMBLE_TRY(file.write(rows_at(run, i), saved.data(), rows_bytes(run)));
      saved = saved.subspan(rows_bytes(run));
    }
  return std::optional(std::move(file));
}

void RecallStore::restore(std::span<const uint32_t> counts, std::span<const std::byte> saved,
                          std::optional<ScratchFile> rows) {
  clear();
  file_ = std::move(rows);
  file_end_ = 0;
  closed_ = failed_ = false;
  const auto take = [&](void* to, uint64_t bytes) {
    std::memcpy(to, saved.data(), bytes);
    saved = saved.subspan(bytes);
  };
  for (size_t run = 0; run < runs_.size(); ++run) {
    counts_[run] = counts[run];
    for (uint32_t i = 0; i < counts[run]; ++i) {
      order_of(run)[i] = i;
      take(&pages_of(run)[i], sizeof(Page));
      take(summary(run, i), summary_bytes(run));
      take(place_for_rows(run, i), rows_bytes(run));
      if (file_) note_rows(run, i, buffer_.data());
      entries_ += static_cast<uint32_t>(std::popcount(pages_of(run)[i].held));
    }
  }
}

}  // namespace thimble
