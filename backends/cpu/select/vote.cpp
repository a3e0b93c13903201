// vote: combines the heads' scores into one vote per entry or page (group) or per position (layer), in the
// log domain.
#include <algorithm>
#include <cstring>
#include <limits>

#include "backends/cpu/entries.h"
#include "backends/cpu/kv_scratch.h"

namespace thimble::cpu {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Max-pool of `window` over n votes with stride 1, padded by (window - 1) / 2 before the first vote. Calls
// write(i, vote) for each. An even window has one output fewer, so the last candidate gets -inf and is never
// picked.
template <typename Write>
static void max_pool(const float* votes, uint32_t n, uint32_t window, const Write& write) {
  const uint32_t before = (window - 1) / 2, outputs = n - (window % 2 == 0);
  for (uint32_t i = 0; i < outputs; ++i) {
    const uint32_t first = i - std::min(i, before), last = std::min(n, i + window - before);
    write(i, *std::max_element(votes + first, votes + last));
  }
  if (outputs < n) write(n - 1, -kInfinity);
}

static void group_vote(const Context& ctx, const Vote& o) {
  const VoteParams& p = o.p;
  const uint32_t begin = ctx.step.n_init;
  const auto end_of = [&](uint32_t head) {
    return scored_end(ctx.step, ctx.heads[p.head_state + head], p.page);
  };
  uint32_t last = begin;
  for (uint32_t head = 0; head < p.heads; ++head) last = std::max(last, end_of(head));
  constexpr uint32_t kBlock = 1024;
  const uint32_t blocks = static_cast<uint32_t>(ceil_div(last - begin, kBlock));
  ctx.threads.run(p.heads * blocks, [&](uint32_t item, uint32_t) {
    const uint32_t head = item / blocks, first = begin + item % blocks * kBlock, query = head * p.group;
    const uint32_t end = end_of(head);
    if (first >= end) return;
    kv_kernels().vote(at<float>(o.scores, query, p.score_capacity, first), p.score_capacity, p.group,
                      data<float>(o.lse) + query, std::min(kBlock, end - first),
                      at<float>(o.votes, head, p.vote_capacity, first));
  });
  uint64_t candidates = 0;  // of all heads
  for (uint32_t head = 0; head < p.heads; ++head) candidates += end_of(head) - begin;
  ScratchLayout layout(ctx.scratch.data());
  const WindowScratch scratch(layout, p.window > 1 ? candidates : 0);
  ctx.threads.run(p.heads, [&](uint32_t head, uint32_t) {
    const uint32_t end = end_of(head);
    if (end == begin) return;
    float* votes = at<float>(o.votes, head, p.vote_capacity, 0);
    std::fill(votes, votes + begin, -kInfinity);
    std::fill_n(votes + end, ctx.step.n_local, -kInfinity);
    if (p.window <= 1) return;
    float* copy = scratch.votes;
    for (uint32_t before = 0; before < head; ++before) copy += end_of(before) - begin;
    std::memcpy(copy, votes + begin, (end - begin) * sizeof(float));
    max_pool(copy, end - begin, p.window, [&](uint32_t i, float vote) { votes[begin + i] = vote; });
  });
}

static void layer_vote(const Context& ctx, const Vote& o) {
  const VoteParams& p = o.p;
  const uint32_t begin = ctx.step.n_init, queries = p.heads * p.group;
  const uint32_t end = scored_end(ctx.step, ctx.heads[p.head_state], 1);  // the same for all heads
  if (end == begin) return;
  const uint32_t positions = static_cast<uint32_t>(ctx.step.position) + ctx.step.n_rows;
  float* const votes = data<float>(o.votes);
  ctx.threads.run(
      static_cast<uint32_t>(ceil_div(positions, kVotePositions)), [&](uint32_t item, uint32_t worker) {
        const VoteScratch scratch = worker_scratch<VoteScratch>(ctx.scratch.data(), worker, queries);
        const int32_t first = static_cast<int32_t>(item * kVotePositions);
        const uint32_t n = std::min(kVotePositions, positions - item * kVotePositions);
        std::fill_n(scratch.scores, uint64_t(queries) * kVotePositions, -kInfinity);
        for (uint32_t head = 0; head < p.heads; ++head) {
          const int32_t* pos = in_run<int32_t>(o.pos, ctx.heads[p.head_state + head], 0);
          const uint32_t from = static_cast<uint32_t>(std::lower_bound(pos + begin, pos + end, first) - pos);
          const uint32_t to = static_cast<uint32_t>(
              std::lower_bound(pos + from, pos + end, first + static_cast<int32_t>(n)) - pos);
          for (uint32_t query = head * p.group; query < (head + 1) * p.group; ++query) {
            const float* scores = at<float>(o.scores, query, p.score_capacity, 0);
            for (uint32_t i = from; i < to; ++i)
              scratch.scores[query * kVotePositions + (pos[i] - first)] = scores[i];
          }
        }
        kv_kernels().vote(scratch.scores, kVotePositions, queries, data<float>(o.lse), n, votes + first);
      });
  if (p.window <= 1) return;
  ScratchLayout layout(ctx.scratch.data());
  const WindowScratch scratch(layout, positions);
  uint32_t candidates = 0;
  for (uint32_t i = 0; i < positions; ++i) {
    if (votes[i] == -kInfinity) continue;
    scratch.votes[candidates] = votes[i];
    scratch.places[candidates++] = i;
  }
  if (candidates == 0) return;
  max_pool(scratch.votes, candidates, p.window,
           [&](uint32_t i, float vote) { votes[scratch.places[i]] = vote; });
}

void vote(const Context& ctx, const Vote& o) {
  if (selection_cached(o.gate)) return;
  if (o.p.scope == kVoteGroup)
    group_vote(ctx, o);
  else
    layer_vote(ctx, o);
}

}  // namespace thimble::cpu
