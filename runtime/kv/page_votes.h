// The votes of queries for pages of the store. A query head votes for a page with the largest share that any
// of its queries would pay to the page, of all attention to pages. So a page that matters to one word of a
// question comes before a page that all words attend to a little.
//
// The attention to a page is estimated from the mean m and the variances s of its keys: for keys of a normal
// distribution, the mean of exp(q k) is exp(q m + 1/2 sum q_c^2 s_c). Keys rotate to where the page would be
// in the run. The two channels of a pair then mix, so each gets the mean of their variances.
//
// If the store is in memory, the keys themselves decide, of the kMostCompared pages with the most votes by
// this estimate. The others get no votes.
#pragma once

#include <span>
#include <vector>

#include "backends/host.h"
#include "runtime/kv/recall_store.h"
#include "runtime/model/model.h"

namespace thimble {

// The number of latest tokens whose queries vote.
inline constexpr uint32_t kAskingTokens = 32;
// The pages of a run whose keys are compared with the queries. A text of 16,384 tokens has as many.
inline constexpr uint32_t kMostCompared = 1024;

class PageVotes {
 public:
  struct Limits {
    uint32_t positions = 0, context = 0;  // of the rotary table, as for fill_rope_table()
    uint32_t group = 0, head_dim = 0;     // query heads of a KV head, and channels
    uint32_t pages = 0;                   // of a run
    uint32_t threads = 1;
  };
  PageVotes(const RopeScheme&, const Limits&);
  // The bytes of such an object's arrays.
  static uint64_t bytes(const RopeScheme&, const Limits&);

  // The queries of the latest tokens for one KV head, not rotated.
  struct Queries {
    const float* ring;  // [kAskingTokens][stride], by position in the text
    uint32_t stride, count, group, head_dim;
    uint64_t read;   // one more than the position of the latest token
    uint32_t ahead;  // the latest tokens that are not among the run's entries
    float scale;     // of the products
  };
  // Where the run's own entries are in the text. Empty: keys are stored as rotated to their positions.
  using Positions = std::span<const int32_t>;
  // Adds the votes for each page of a run. They do not depend on the number of threads.
  void add(const RecallStore&, size_t run, const Queries&, const RopeParams&, Positions own, Host&,
           std::span<float> votes);

 private:
  // The columns of which a query and a page have one each, so that the products' sum is the logarithm of the
  // estimate: the channels, the variances, and the number of entries.
  static uint32_t columns(uint32_t head_dim) { return 2 * head_dim + 1; }
  // What a call is about.
  struct Asked {
    const RecallStore& store;
    size_t run;
    const Queries& queries;
    const RopeParams& rope;
    Positions own;
    Host& host;
    uint64_t place_of(const RecallStore::Page&) const;
  };
  void rotate(float* x, uint64_t position, const RopeParams&) const;
  void read_query(const Asked&, uint32_t age, uint32_t head, bool to_estimate);
  void read_queries(const Asked&, bool to_estimate);
  void read_page(const Asked&, uint32_t page, float* row) const;
  void estimate(const Asked&);
  void estimate(const Asked&, uint32_t first, uint32_t count, uint32_t worker);
  void compare(const Asked&);
  void compare(const Asked&, uint32_t first, uint32_t count, uint32_t worker);
  void share(const Asked&);
  void keep_best();

  std::vector<float> rope_;      // as in backends/backend.h
  std::vector<float> queries_;   // [query head][token][columns]
  std::vector<float> scores_;    // [query head][token][pages]
  std::vector<float> sums_;      // [query head][token]: the logarithm of the sum of exp(score)
  std::vector<float> shares_;    // [pages]: votes
  std::vector<uint32_t> pages_;  // [pages]: which pages scores and shares are of, ascending
  size_t of_thread_;             // floats of scratch
  std::vector<float> scratch_;   // [thread]: pages or keys, their panels, and the products of keys
  // Of the latest call.
  uint32_t used_ = 0, n_queries_ = 0, n_pages_ = 0;  // columns, queries and pages
};

}  // namespace thimble
