// Where token_score and page_score store their scores, and the log-sum-exps that they compute at the end.
#pragma once

#include <cstring>

#include "backends/cpu/entries.h"
#include "backends/cpu/kv_kernels.h"

namespace thimble::cpu {

// Copies a tile's scores, [group][kTileKeys], to those of a KV head's group from `unit` on, for n entries or
// pages.
template <typename Op>
void store_tile(const Op& o, uint32_t head, uint32_t unit, const float* tile, uint32_t n) {
  const uint32_t first_query = (o.p.first_head + head) * o.p.group;
  for (uint32_t h = 0; h < o.p.group; ++h)
    std::memcpy(at<float>(o.scores, first_query + h, o.p.score_capacity, unit), tile + h * kTileKeys,
                n * sizeof(float));
}

// The log-sum-exp of each query head's scores in [begin, end_of(KV head)); no value if that range is empty.
template <typename Op, typename EndOf>
void sum_scores(const Context& ctx, const Op& o, uint32_t begin, const EndOf& end_of) {
  ctx.threads.run(o.p.heads * o.p.group, [&](uint32_t query, uint32_t) {
    const uint32_t end = end_of(query / o.p.group), own = o.p.first_head * o.p.group + query;
    if (end == begin) return;
    data<float>(o.lse)[own] =
        kv_kernels().log_sum_exp(at<float>(o.scores, own, o.p.score_capacity, begin), end - begin);
  });
}

}  // namespace thimble::cpu
