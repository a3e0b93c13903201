// top_k: scores become ascending lists. The same score bits give the same list on every backend.
#include <algorithm>
#include <bit>
#include <limits>

#include "backends/cpu/entries.h"

namespace thimble::cpu {

// Bits that order as scores do: NaN lowest, with -inf; -0 as 0.
static uint32_t order_bits(float score) {
  if (score != score) score = -std::numeric_limits<float>::infinity();
  const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);  // -0 + 0 is +0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Order among scored things: by score, then the larger index.
static uint64_t order_key(float score, uint32_t index) { return uint64_t(order_bits(score)) << 32 | index; }

// The smallest of the `count` largest keys of [begin, end): a key is among them if it is no smaller. Finds
// the score's bits digit by digit, from counts of the scores that share the digits so far; then how many of
// its ties are left out.
template <typename Score>
static uint64_t threshold(uint32_t begin, uint32_t end, uint32_t count, const Score& score) {
  if (count == 0) return UINT64_MAX;
  if (count >= end - begin) return 0;
  uint32_t bits = 0, wanted = count;
  for (int shift = 24; shift >= 0; shift -= 8) {
    uint32_t counts[256] = {};
    const uint32_t known = shift == 24 ? 0 : ~0u << (shift + 8);
    for (uint32_t i = begin; i < end; ++i) {
      const uint32_t b = order_bits(score(i));
      if ((b & known) == bits) ++counts[b >> shift & 255];
    }
    uint32_t digit = 255;
    while (wanted > counts[digit]) wanted -= counts[digit--];
    bits |= digit << shift;
  }
  for (uint32_t i = end; i-- > begin;)
    if (order_bits(score(i)) == bits && --wanted == 0) return uint64_t(bits) << 32 | i;
  return 0;
}

static void list_everything(uint32_t n, uint32_t* list) {
  list[0] = n;
  for (uint32_t i = 0; i < n; ++i) list[1 + i] = i;
}

static void retain(const Context& ctx, const TopK& o, uint32_t head, uint32_t* list) {
  const TopKParams& p = o.p;
  const StepParams& s = ctx.step;
  const uint32_t n = step_entries(s);
  const float* pool = at<float>(o.scores, head, p.score_capacity, 0);
  const float* chunk = at<float>(o.chunk_scores, head, p.chunk_capacity, 0);
  const auto score = [&](uint32_t i) { return chunk && i >= s.n_entries ? chunk[i - s.n_entries] : pool[i]; };
  if (s.keep >= n) return list_everything(n, list);
  const uint32_t last = std::min(s.protect_last, s.keep), first = std::min(s.protect_first, s.keep - last);
  const uint64_t lowest = threshold(first, n - last, s.keep - last - first, score);
  uint32_t count = 0;
  for (uint32_t i = 0; i < n; ++i)
    if (i < first || i >= n - last || order_key(score(i), i) >= lowest) list[1 + count++] = i;
  list[0] = count;
}

// Sinks, the middle entries that `picked` wants, and the local window.
template <typename Picked>
static void list_selection(const StepParams& s, uint32_t* list, const Picked& picked) {
  const uint32_t n = step_entries(s), end = middle_end(s);
  uint32_t count = 0;
  for (uint32_t i = 0; i < s.n_init; ++i) list[1 + count++] = i;
  for (uint32_t i = s.n_init; i < end; ++i)
    if (picked(i)) list[1 + count++] = i;
  for (uint32_t i = end; i < n; ++i) list[1 + count++] = i;
  list[0] = count;
}

static void select(const Context& ctx, const TopK& o) {
  const TopKParams& p = o.p;
  const StepParams& s = ctx.step;
  const auto list_of = [&](uint32_t head) { return at<uint32_t>(o.list, head, p.list_capacity, 0); };
  if (!selects(s)) {
    for (uint32_t head = 0; head < p.heads; ++head) list_everything(step_entries(s), list_of(head));
    return;
  }
  if (selection_cached(o.gate)) {
    for (uint32_t head = 0; head < p.heads; ++head) {
      uint32_t* list = list_of(head);
      for (uint32_t i = 0; i < s.n_local; ++i) list[1 + list[0] - s.n_local + i] = middle_end(s) + i;
    }
    return;
  }
  const float* votes = data<float>(o.scores);
  if (s.vote_scope == kVoteGroup) {
    ctx.threads.run(p.heads, [&](uint32_t head, uint32_t) {
      const float* own = votes + uint64_t(head) * p.score_capacity;
      const uint64_t lowest =
          threshold(s.n_init, middle_end(s), s.select_k, [&](uint32_t i) { return own[i]; });
      list_selection(s, list_of(head), [&](uint32_t i) { return order_key(own[i], i) >= lowest; });
    });
    return;
  }
  const uint32_t positions = static_cast<uint32_t>(s.position) + s.n_rows;
  const uint64_t lowest = threshold(0, positions, s.select_k, [&](uint32_t i) { return votes[i]; });
  ctx.threads.run(p.heads, [&](uint32_t head, uint32_t) {
    const int32_t* pos = at<int32_t>(o.pos, head, p.pos_capacity, 0);
    list_selection(s, list_of(head), [&](uint32_t i) {
      const uint32_t position = static_cast<uint32_t>(pos[i]);
      return order_key(votes[position], position) >= lowest;
    });
  });
}

void top_k(const Context& ctx, const TopK& o) {
  if (o.p.purpose == kTopKSelect) return select(ctx, o);
  ctx.threads.run(o.p.heads, [&](uint32_t head, uint32_t) {
    retain(ctx, o, head, at<uint32_t>(o.list, head, o.p.list_capacity, 0));
  });
}

}  // namespace thimble::cpu
