// top_k: turns scores into ascending lists. The same score bits give the same list on every backend.
#include <algorithm>
#include <bit>

#include "backends/cpu/entries.h"
#include "backends/order_bits.h"

namespace thimble::cpu {

static uint32_t bits_of(float score) { return order_bits(std::bit_cast<uint32_t>(score)); }

// The sort key of a scored entry: by score, then by index; the larger index wins.
static uint64_t order_key(float score, uint32_t index) { return uint64_t(bits_of(score)) << 32 | index; }

// The smallest of the `count` largest keys of [begin, end). A key belongs to the selection if it is not
// smaller. The search determines the score's bits digit by digit, by counting the scores that share the
// digits so far, and then how many ties to leave out.
template <typename Score>
static uint64_t threshold(uint32_t begin, uint32_t end, uint32_t count, const Score& score) {
  if (count == 0) return UINT64_MAX;
  if (count >= end - begin) return 0;
  uint32_t bits = 0, wanted = count;
  for (int shift = 24; shift >= 0; shift -= 8) {
    uint32_t counts[256] = {};
    const uint32_t known = shift == 24 ? 0 : ~0u << (shift + 8);
    for (uint32_t i = begin; i < end; ++i) {
      const uint32_t b = bits_of(score(i));
      if ((b & known) == bits) ++counts[b >> shift & 255];
    }
    uint32_t digit = 255;
    while (wanted > counts[digit]) wanted -= counts[digit--];
    bits |= digit << shift;
  }
  for (uint32_t i = end; i-- > begin;)
    if (bits_of(score(i)) == bits && --wanted == 0) return uint64_t(bits) << 32 | i;
  return 0;
}

// Lists the entries of the units before and after the regions, and of the picked units in between.
template <typename Picked>
static void list_units(uint32_t entries, uint32_t page, const Regions& r, uint32_t* list,
                       const Picked& picked) {
  uint32_t count = 0;
  const auto add = [&](uint32_t begin, uint32_t end) {
    for (uint32_t i = begin; i < end; ++i) list[1 + count++] = i;
  };
  add(0, r.begin * page);
  for (uint32_t unit = r.begin; unit < r.end; ++unit)
    if (picked(unit)) add(unit * page, std::min(entries, (unit + 1) * page));
  add(r.end * page, entries);
  list[0] = count;
}

// The inputs of one KV head's list.
struct Choice {
  uint32_t entries;
  bool everything;
  Regions regions{};  // not used if everything is listed

  Choice(const StepParams& step, const HeadState& head, const TopKParams& p)
      : entries(step_entries(step, head)) {
    if (p.keep == kKeepOfHead) {
      everything = head.keep >= entries;
      if (!everything) regions = kept_regions(head, entries);
    } else {
      const uint32_t n = units(entries, p.page);
      everything = !selects(step, n);
      if (!everything) regions = selected_regions(step, n);
    }
  }
};

// Lists by the scores of the head's own entries or pages.
static void list_by_score(const TopK& o, uint32_t head, const HeadState& state, const Choice& c,
                          uint32_t* list) {
  const TopKParams& p = o.p;
  const float* own =
      p.in_runs ? in_run<float>(o.scores, state, 0) : at<float>(o.scores, head, p.score_capacity, 0);
  const float* chunk = at<float>(o.chunk_scores, head, p.chunk_capacity, 0);
  const auto score = [&](uint32_t i) {
    return chunk && i >= state.n_entries ? chunk[i - state.n_entries] : own[i];
  };
  const Regions& r = c.regions;
  const uint64_t lowest = threshold(r.begin, r.end, r.wanted, score);
  list_units(c.entries, p.page, r, list, [&](uint32_t i) { return order_key(score(i), i) >= lowest; });
}

void top_k(const Context& ctx, const TopK& o) {
  const TopKParams& p = o.p;
  const auto choice_of = [&](uint32_t head) { return Choice(ctx.step, ctx.heads[p.head_state + head], p); };
  uint64_t lowest = 0;  // of the positions, which all heads share; they then have as many entries (backend.h)
  if (p.by_position && !selection_cached(o.gate) && !choice_of(0).everything) {
    const float* scores = data<float>(o.scores);
    const uint32_t positions = static_cast<uint32_t>(ctx.step.position) + ctx.step.n_rows;
    lowest = threshold(0, positions, ctx.step.select_k, [&](uint32_t i) { return scores[i]; });
  }
  ctx.threads.run(p.heads, [&](uint32_t head, uint32_t) {
    const HeadState& state = ctx.heads[p.head_state + head];
    const Choice c = choice_of(head);
    uint32_t* list = at<uint32_t>(o.list, head, p.list_capacity, 0);
    if (c.everything)
      list_units(c.entries, p.page, {0, 0, 0}, list, [](uint32_t) { return false; });
    else if (selection_cached(o.gate))
      for (uint32_t i = 0; i < ctx.step.n_local; ++i)
        list[1 + list[0] - ctx.step.n_local + i] = c.regions.end + i;
    else if (p.by_position)
      list_units(c.entries, 1, c.regions, list, [&](uint32_t i) {
        const auto position = static_cast<uint32_t>(*in_run<int32_t>(o.pos, state, i));
        return order_key(data<float>(o.scores)[position], position) >= lowest;
      });
    else
      list_by_score(o, head, state, c, list);
  });
}

}  // namespace thimble::cpu
