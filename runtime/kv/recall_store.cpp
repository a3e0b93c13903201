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
    run.lowest = take(next.memory, pages * sizeof(Low));
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

Result<RecallStore> RecallStore::create(Shape shape, std::byte* memory) {
  RecallStore store;
  const uint64_t bytes = place(shape, &store.runs_).memory;
  if (!memory) {
    THIMBLE_SET(store.own_memory_, Pages::allocate(bytes));
    memory = store.own_memory_.data();
  }
  if (shape.in_file) {
    THIMBLE_LET(file, ScratchFile::create());
    store.file_.emplace(std::move(file));
  }
  store.runs_.shrink_to_fit();
  store.memory_ = memory;
  store.counts_.resize(shape.runs.size());
  store.ranked_.resize(shape.runs.size());
  store.buffer_.resize(buffer_bytes(shape));
  store.shape_ = std::move(shape);
  return store;
}

void RecallStore::clear() {
  std::fill(counts_.begin(), counts_.end(), 0);
  ranked_.assign(ranked_.size(), false);
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
  ranked_.assign(ranked_.size(), false);
  counts_ = from.counts_;
  entries_ = from.entries_;
  for (size_t run = 0; run < runs_.size(); ++run) {
    const uint32_t pages = counts_[run];
    const auto copy = [&](uint64_t at, uint64_t bytes) {
      std::memcpy(memory_ + at, from.memory_ + at, bytes);
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
  return reinterpret_cast<float*>(memory_ + runs_[run].summaries) +
         uint64_t(slot) * 2 * shape_.runs[run].head_dim;
}

std::span<const float> RecallStore::means(size_t run, uint32_t i) const {
  return {summary(run, slot(run, i)), shape_.runs[run].head_dim};
}

std::span<const float> RecallStore::squares(size_t run, uint32_t i) const {
  return {summary(run, slot(run, i)) + shape_.runs[run].head_dim, shape_.runs[run].head_dim};
}

// ---- adding ----

namespace {

int32_t page_of(int32_t position) { return position / static_cast<int32_t>(kRecallPage); }
uint32_t place_of(int32_t position) { return static_cast<uint32_t>(position) % kRecallPage; }

// Calls use(first, end) for the entries of each page that begin in [from, to).
template <typename Use>
void for_pages(std::span<const int32_t> positions, size_t from, size_t to, const Use& use) {
  const auto is_first = [&](size_t i) {
    return i == 0 || i == positions.size() || page_of(positions[i]) != page_of(positions[i - 1]);
  };
  while (from < to && !is_first(from)) ++from;
  for (size_t end; from < to; from = end) {
    for (end = from + 1; !is_first(end);) ++end;
    use(from, end);
  }
}

}  // namespace

// Where a run's order has the page with this number, or would have it.
uint32_t* RecallStore::find(size_t run, int32_t number) const {
  const Page* const pages = pages_of(run);
  uint32_t* const order = order_of(run);
  return std::lower_bound(order, order + counts_[run], number,
                          [&](uint32_t slot, int32_t n) { return pages[slot].number < n; });
}

// The slot of the page with this number, or kNoSlot.
uint32_t RecallStore::slot_of(size_t run, int32_t number) const {
  const uint32_t* const at = find(run, number);
  return at < order_of(run) + counts_[run] && pages_of(run)[*at].number == number ? *at : kNoSlot;
}

// The slot of a full run's page with the lowest score.
uint32_t RecallStore::lowest(size_t run) {
  const Page* const pages = pages_of(run);
  Low *const lows = lowest_of(run), *const end = lows + counts_[run];
  const auto after = [](const Low& a, const Low& b) {
    return a.score != b.score ? a.score > b.score : a.number > b.number;
  };
  const auto now = [&](uint32_t slot) { return Low{pages[slot].score, pages[slot].number, slot}; };
  if (!ranked_[run]) {
    for (uint32_t slot = 0; slot < counts_[run]; ++slot) lows[slot] = now(slot);
    std::make_heap(lows, end, after);
    ranked_[run] = true;
  }
  // Scores only rise, and a slot gets a new page only if it is the first one here.
  while (lows->score != pages[lows->slot].score || lows->number != pages[lows->slot].number) {
    std::pop_heap(lows, end, after);
    end[-1] = now(end[-1].slot);
    std::push_heap(lows, end, after);
  }
  return lows->slot;
}

// The slot of the page with this number. It may be new, or that of the page with the lowest score, if the new
// page has no lower one. Otherwise kNoSlot.
uint32_t RecallStore::slot_for(size_t run, int32_t number, float score) {
  uint32_t slot = slot_of(run, number);
  if (slot != kNoSlot) return slot;
  Page* const pages = pages_of(run);
  uint32_t* const order = order_of(run);
  uint32_t& count = counts_[run];
  slot = count;
  if (count == shape_.pages) {
    slot = lowest(run);
    if (score < pages[slot].score) return kNoSlot;
    entries_ -= static_cast<uint32_t>(std::popcount(pages[slot].held));
    uint32_t* const dropped = find(run, pages[slot].number);
    std::copy(dropped + 1, order + count, dropped);
    --count;
  }
  uint32_t* const at = find(run, number);
  std::copy_backward(at, order + count, order + count + 1);
  *at = slot;
  ++count;
  pages[slot] = {.number = number, .score = score};
  std::fill_n(summary(run, slot), 2 * shape_.runs[run].head_dim, 0.0f);
  return slot;
}

// Notes that a page has these entries, if it is in the store or gets there.
void RecallStore::count(size_t run, const Entries& entries, size_t first, size_t end) {
  float score = -std::numeric_limits<float>::infinity();
  for (size_t i = first; i < end; ++i)
    if (entries.scores[i] > score) score = entries.scores[i];  // a NaN counts as -inf
  const uint32_t slot = slot_for(run, page_of(entries.positions[first]), score);
  if (slot == kNoSlot) return;
  Page& page = pages_of(run)[slot];
  page.score = std::max(page.score, score);
  for (size_t i = first; i < end; ++i)
    page.held = static_cast<uint16_t>(page.held | 1u << place_of(entries.positions[i]));
  entries_ += end - first;
}

// Adds entries to a page's rows in memory and to its summary. `before`: bits of the positions it had.
void RecallStore::copy_rows(size_t run, uint32_t slot, const Entries& entries, size_t first, size_t end,
                            uint32_t before) {
  const uint64_t key_bytes = runs_[run].key_bytes, value_bytes = runs_[run].value_bytes;
  std::byte *const k = place_for_rows(run, slot), *const v = k + kRecallPage * key_bytes;
  if (!before) std::fill_n(k, rows_bytes(run), std::byte{});  // nothing of an earlier page is saved
  auto held = static_cast<float>(std::popcount(before));
  for (size_t i = first; i < end; ++i) {
    const uint32_t place = place_of(entries.positions[i]);
    std::memcpy(k + place * key_bytes, entries.k + i * key_bytes, key_bytes);
    std::memcpy(v + place * value_bytes, entries.v + i * value_bytes, value_bytes);
    summarise(run, slot, ++held, entries.keys + i * shape_.runs[run].head_dim);
  }
}

// Takes the rows of entries that were counted, unless their page has left the store since.
Status RecallStore::take_rows(size_t run, const Entries& entries, size_t first, size_t end) {
  const uint32_t slot = slot_of(run, page_of(entries.positions[first]));
  if (slot == kNoSlot) return {};
  uint32_t before = pages_of(run)[slot].held;
  for (size_t i = first; i < end; ++i) before &= ~(1u << place_of(entries.positions[i]));
  if (before) THIMBLE_TRY(rows(run, slot));
  copy_rows(run, slot, entries, first, end, before);
  return write_rows(run, slot, place_for_rows(run, slot));
}

// Threads share the pages. With a file there is one buffer, so one thread does all.
Status RecallStore::add(size_t run, const Entries& entries, Host& host) {
  constexpr size_t kAtOnce = 64;  // entries
  if (!shape_.runs[run].head_dim || closed_) return {};
  const std::span<const int32_t> positions = entries.positions;
  for_pages(positions, 0, positions.size(),
            [&](size_t first, size_t end) { count(run, entries, first, end); });
  Status taken;
  const auto take = [&](size_t first, size_t end) {
    if (Status one = take_rows(run, entries, first, end); !one.ok()) taken = std::move(one);
  };
  if (file_)
    for_pages(positions, 0, positions.size(), [&](size_t first, size_t end) {
      if (taken.ok()) take(first, end);
    });
  else  // never fails
    host.run(static_cast<uint32_t>(ceil_div(positions.size(), kAtOnce)), [&](uint32_t part, uint32_t) {
      for_pages(positions, part * kAtOnce, std::min(positions.size(), (part + 1) * kAtOnce), take);
    });
  return taken;
}

// Adds a key to the mean and the sum of squared differences from it (Welford), the count-th of its page.
void RecallStore::summarise(size_t run, uint32_t slot, float count, const float* key) {
  const uint32_t head_dim = shape_.runs[run].head_dim;
  const float share = 1 / count;
  float *const mean = summary(run, slot), *const squares = mean + head_dim;
  for (uint32_t c = 0; c < head_dim; ++c) {
    const float apart = key[c] - mean[c];
    mean[c] += apart * share;
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
