// The votes of queries for pages of the store. A query head votes for a page with the largest share that any
// of its queries would pay to the page, of all attention to pages. So a page that matters to one word of a
// question comes before a page that all words attend to a little.
//
// The attention to a page is estimated from the mean m and the variances s of its keys: for keys of a normal
// distribution, the mean of exp(q k) is exp(q m + 1/2 sum q_c^2 s_c). Keys rotate to where the page would be
// in the run. The two channels of a pair then mix, so each gets the mean of their variances.
#pragma once

#include <span>
#include <vector>

#include "runtime/kv/recall_store.h"
#include "runtime/model/model.h"

namespace thimble {

// The number of latest tokens whose queries vote.
inline constexpr uint32_t kAskingTokens = 32;

class PageVotes {
 public:
  // Room for these numbers of rotary positions, of query heads of a KV head, of channels, and of pages of a
  // run. `context` as for fill_rope_table().
  PageVotes(const RopeScheme&, uint32_t positions, uint32_t context, uint32_t group, uint32_t head_dim,
            uint32_t pages);
  // The bytes of such an object's arrays.
  static uint64_t bytes(const RopeScheme&, uint32_t positions, uint32_t group, uint32_t head_dim,
                        uint32_t pages);

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
  // Adds the votes for each page of a run.
  void add(const RecallStore&, size_t run, const Queries&, const RopeParams&, Positions own,
           std::span<float> votes);

 private:
  void rotate(float* x, uint64_t position, const RopeParams&) const;
  void read_queries(const Queries&, const RopeParams&, Positions own);
  void estimate(const RecallStore&, size_t run, const Queries&, const RopeParams&, Positions own);

  std::vector<float> rope_;                     // as in backends/backend.h
  std::vector<float> q_, q2_;                   // [head_dim][queries]: scaled queries, and half their squares
  std::vector<float> scores_;                   // [pages][queries]
  std::vector<float> most_, sum_;               // [queries]
  std::vector<float> mean_, variance_, query_;  // [head_dim]
};

}  // namespace thimble
