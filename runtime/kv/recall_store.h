// The store of evicted entries, in host memory or in a file: for each KV head, pages of 16 consecutive
// positions, each with a summary of its keys. A page has the entries of its positions that were evicted; the
// others are still in the pool.
//
// A file has the rows of keys and values; memory has everything else. If the file fails or was changed, the
// store is closed: it is empty and takes nothing more, until it is restored.
//
// All runs have room for equally many pages. If a run's pages are full, the page with the lowest score goes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "backends/backend.h"
#include "backends/host.h"
#include "base/scratch_file.h"
#include "base/system.h"

namespace thimble {

inline constexpr uint32_t kRecallPage = kStoredPage;

class RecallStore {
 public:
  // The rows of a run. head_dim 0: the run's entries are not stored.
  struct Rows {
    uint32_t head_dim = 0;
    DType k = DType::kF16, v = DType::kF16;
  };
  struct Shape {
    std::vector<Rows> runs;
    uint32_t pages = 0;    // of each run
    bool in_file = false;  // whether the rows are in a file
  };
  struct Page {
    int32_t number = 0;     // its first position / 16
    uint16_t held = 0;      // which of its positions have an entry here
    uint16_t recalled = 0;  // which of these entries are in the pool, too
    uint32_t sum = 0;       // a checksum of the rows in a file
    float score = 0;        // the highest retention score of its entries when they were evicted
  };
  // Evicted entries of one run, with ascending positions.
  struct Entries {
    std::span<const int32_t> positions;
    const float* scores;
    const float* keys;       // [entries][head_dim]
    const std::byte *k, *v;  // rows of the store's types
  };

  RecallStore() = default;
  // Allocates memory for all pages, or takes memory_bytes() of zeros, which must live as long as the store.
  static Result<RecallStore> create(Shape, std::byte* memory = nullptr);
  static uint64_t memory_bytes(const Shape& shape) { return place(shape, nullptr).memory; }
  // The bytes of memory and of the file that a store of this shape takes, and the most pages of each run in
  // so many bytes: of the file if there is one.
  static uint64_t bytes(const Shape&);
  static uint64_t file_bytes(const Shape&);
  static uint32_t most_pages(Shape, uint64_t bytes);

  uint64_t bytes() const { return bytes(shape_); }
  // The end of what was written to the file.
  uint64_t file_end() const { return file_end_; }
  ScratchFile* file() { return file_ ? &*file_ : nullptr; }  // for tests, which damage it
  bool empty() const { return entries_ == 0; }
  // The number of entries in all runs.
  uint64_t entries() const { return entries_; }
  void clear();
  // Ends the use of the store.
  void close();
  // Whether reading the file failed, so that the store must be closed.
  bool failed() const { return failed_; }
  Status copy_from(const RecallStore&);
  Status add(size_t run, const Entries&, Host&);

  // The bytes of so many pages of each run in a file, in the order of runs. Calls write(data, bytes) for all
  // of them.
  uint64_t saved_bytes(std::span<const uint32_t> counts) const;
  template <typename Write>
  Status save(const Write& write) const;
  // Why the store cannot continue with these bytes of a file, whose pages are of the first `read` positions
  // and have so many recalled entries in each run. Null: it can. The counts fit and the bytes are as many as
  // saved_bytes() says.
  const char* fault(std::span<const uint32_t> counts, std::span<const std::byte> saved, uint64_t read,
                    std::span<const uint32_t> recalled) const;
  // A new file with the rows of such pages, which were checked; none for a store in memory.
  Result<std::optional<ScratchFile>> file_of(std::span<const uint32_t> counts,
                                             std::span<const std::byte> saved) const;
  // Continues with these pages and the file that file_of() made.
  void restore(std::span<const uint32_t> counts, std::span<const std::byte> saved,
               std::optional<ScratchFile>);
  std::span<const uint32_t> counts() const { return counts_; }

  // The store's memory, and where the arrays of a run begin in it, as attend_all reads them: without a file,
  // the rows too. Those of the next run, if it has the same rows, follow after `stride` bytes. A page has
  // `page_bytes` of rows, of which `key_bytes` are keys.
  std::span<const std::byte> memory() const { return {memory_, memory_bytes(shape_)}; }
  uint32_t page_capacity() const { return shape_.pages; }
  struct Places {
    uint64_t pages, order, rows, stride, page_bytes, key_bytes;
  };
  Places places(size_t run) const;
  // Reads the rows of all pages of a run from the file.
  Status load(size_t run, std::byte* to) const;

  // The pages of a run, by ascending number.
  uint32_t count(size_t run) const { return counts_[run]; }
  const Page& page(size_t run, uint32_t i) const { return pages_of(run)[slot(run, i)]; }
  // For each channel, the mean of a page's keys, and the sum of their squared differences from it.
  std::span<const float> means(size_t run, uint32_t i) const;
  std::span<const float> squares(size_t run, uint32_t i) const;
  // Without a file: the type of a run's keys, and the row of a page's position, which is one that it holds.
  bool in_memory() const { return !shape_.in_file; }
  DType key_type(size_t run) const { return shape_.runs[run].k; }
  const std::byte* key(size_t run, uint32_t i, uint32_t place) const {
    return memory_ + rows_at(run, slot(run, i)) + place * runs_[run].key_bytes;
  }
  // Copies a page's entries one after the other, and returns their number.
  Result<uint32_t> fetch(size_t run, uint32_t i, int32_t* positions, std::byte* k, std::byte* v) const;
  // Notes which pages of the run are in the pool: those that `chosen` lists, by ascending index.
  void set_recalled(size_t run, std::span<const uint32_t> chosen);

 private:
  struct Run {
    uint64_t first = 0;  // its pages in memory: the table, then the order, summaries and rows
    uint64_t order = 0, lowest = 0, summaries = 0, rows = 0;
    uint64_t key_bytes = 0, value_bytes = 0;  // of a row
  };
  struct Sizes {
    uint64_t memory = 0, file = 0;
  };
  static Sizes place(const Shape&, std::vector<Run>* runs);

  Page* pages_of(size_t run) const { return reinterpret_cast<Page*>(memory_ + runs_[run].first); }
  uint32_t* order_of(size_t run) const { return reinterpret_cast<uint32_t*>(memory_ + runs_[run].order); }
  // A page in a heap of a full run's pages. The first one has the lowest score; among equal scores, the
  // lowest number. Pages may have changed since.
  struct Low {
    float score;
    int32_t number;
    uint32_t slot;
  };
  Low* lowest_of(size_t run) const { return reinterpret_cast<Low*>(memory_ + runs_[run].lowest); }
  uint32_t slot(size_t run, uint32_t i) const { return order_of(run)[i]; }
  float* summary(size_t run, uint32_t slot) const;
  uint64_t summary_bytes(size_t run) const { return 2 * shape_.runs[run].head_dim * sizeof(float); }
  uint64_t rows_bytes(size_t run) const {
    return kRecallPage * (runs_[run].key_bytes + runs_[run].value_bytes);
  }
  uint64_t rows_at(size_t run, uint32_t slot) const { return runs_[run].rows + slot * rows_bytes(run); }
  // Where a page's keys, [16][row], are in memory, followed by its values: with a file, in the buffer until
  // another page's are.
  std::byte* place_for_rows(size_t run, uint32_t slot) const {
    return shape_.in_file ? buffer_.data() : memory_ + rows_at(run, slot);
  }
  uint32_t sum_of(size_t run, const std::byte* rows) const;
  Result<std::byte*> rows(size_t run, uint32_t slot) const;
  Status write_rows(size_t run, uint32_t slot, const std::byte* rows);
  void note_rows(size_t run, uint32_t slot, const std::byte* rows);
  uint32_t* find(size_t run, int32_t number) const;
  uint32_t slot_of(size_t run, int32_t number) const;
  uint32_t lowest(size_t run);
  uint32_t slot_for(size_t run, int32_t number, float score);
  void count(size_t run, const Entries&, size_t first, size_t end);
  void copy_rows(size_t run, uint32_t slot, const Entries&, size_t first, size_t end, uint32_t before);
  Status take_rows(size_t run, const Entries&, size_t first, size_t end);
  void summarise(size_t run, uint32_t slot, float count, const float* key);

  Shape shape_;
  Pages own_memory_;  // empty if the memory is another's
  std::byte* memory_ = nullptr;
  std::vector<Run> runs_;
  std::vector<uint32_t> counts_;
  std::vector<bool> ranked_;  // whether lowest_of(run) is a heap of its pages
  std::optional<ScratchFile> file_;
  mutable std::vector<std::byte> buffer_;  // the rows of one page
  uint64_t entries_ = 0, file_end_ = 0;
  bool closed_ = false;
  mutable bool failed_ = false;
};

template <typename Write>
Status RecallStore::save(const Write& write) const {
  for (size_t run = 0; run < runs_.size(); ++run)
    for (uint32_t i = 0; i < counts_[run]; ++i) {
      const uint32_t at = slot(run, i);
      THIMBLE_TRY(write(&pages_of(run)[at], sizeof(Page)));
      THIMBLE_TRY(write(summary(run, at), summary_bytes(run)));
      THIMBLE_LET(page_rows, rows(run, at));
      THIMBLE_TRY(write(page_rows, rows_bytes(run)));
    }
  return {};
}

}  // namespace thimble
