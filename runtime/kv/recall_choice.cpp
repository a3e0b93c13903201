#include "runtime/kv/recall_choice.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace thimble {
namespace {

// The largest numbers of any layer with a store.
struct Widest {
  uint32_t q_cols = 0, group = 0, head_dim = 0, kv_heads = 0;

  explicit Widest(const Model& model) {
    for (const Layer& layer : model.layers) {
      if (!layer.retains()) continue;
      const AttentionMixer& m = *layer.attention();
      q_cols = std::max(q_cols, m.q_cols());
      group = std::max(group, m.group());
      head_dim = std::max(head_dim, m.head_dim);
      kv_heads = std::max(kv_heads, m.kv_heads);
    }
  }
};

PageVotes::Limits votes_limits(const Model& model, const RecallChoice::Limits& l) {
  const Widest widest(model);
  return {.positions = l.rope_positions,
          .context = l.context,
          .group = widest.group,
          .head_dim = widest.head_dim,
          .pages = l.pages,
          .threads = l.threads};
}

}  // namespace

RecallChoice::RecallChoice(const Model& model, const Limits& limits) : limits_(limits) {
  const Widest widest(model);
  if (limits.votes) {
    votes_.emplace(model.rope, votes_limits(model, limits));
    ring_.resize(size_t(kAskingTokens) * widest.q_cols);
  }
  positions_.resize(size_t(widest.kv_heads) * limits.capacity);
  own_.resize(widest.kv_heads);
  sums_.resize(size_t(widest.kv_heads) * limits.pages);
  heaps_.resize(size_t(widest.kv_heads) * limits.pages);
  chosen_.resize(size_t(widest.kv_heads) * limits.recall);
  counts_.resize(widest.kv_heads);
}

uint64_t RecallChoice::bytes(const Model& model, const Limits& limits) {
  const Widest widest(model);
  const uint64_t word = 4, kv_heads = widest.kv_heads;
  const uint64_t voting = limits.votes ? PageVotes::bytes(model.rope, votes_limits(model, limits)) +
                                             word * kAskingTokens * widest.q_cols
                                       : 0;
  return voting +
         word * kv_heads * (uint64_t(limits.capacity) + 2 + 2 * uint64_t(limits.pages) + limits.recall);
}

void RecallChoice::list_own(const RecallStore& store, size_t run, uint32_t head, uint32_t entries,
                            uint32_t* list) {
  const std::span<int32_t> positions = this->positions(head);
  uint32_t own = 0, page = 0;
  for (uint32_t i = 0; i < entries; ++i) {
    const auto number = positions[i] / static_cast<int32_t>(kRecallPage);
    while (page < store.count(run) && store.page(run, page).number < number) ++page;
    const bool recalled =
        page < store.count(run) && store.page(run, page).number == number &&
        store.page(run, page).recalled >> positions[i] % static_cast<int32_t>(kRecallPage) & 1;
    if (recalled) continue;
    positions[own] = positions[i];
    list[1 + own++] = i;
  }
  list[0] = own_[head] = own;
}

template <typename Vote>
void RecallChoice::choose_with(const RecallStore& store, const AttentionMixer& m, bool alike, Host& host,
                               const Vote& vote) {
  const auto votes = [&](uint32_t head) { return sums_.data() + size_t(alike ? 0 : head) * limits_.pages; };
  for (uint32_t head = 0; head < m.kv_heads; ++head) {
    const std::span<float> sums(votes(head), store.count(m.first_run + head));
    if (!alike || head == 0) std::fill(sums.begin(), sums.end(), 0.0f);
    vote(head, sums);
  }
  host.run(m.kv_heads, [&](uint32_t head, uint32_t) {
    take_best(store, m.first_run + head, head, votes(head), &heaps_[size_t(head) * limits_.pages]);
  });
}

void RecallChoice::choose(const RecallStore& store, const AttentionMixer& m, const Asking& asking,
                          Host& host) {
  choose_with(store, m, asking.alike, host, [&](uint32_t head, std::span<float> sums) {
    votes_->add(store, m.first_run + head,
                {.ring = ring_.data() + size_t(head) * m.group() * m.head_dim,
                 .stride = m.q_cols(),
                 .count = asking.tokens,
                 .group = m.group(),
                 .head_dim = m.head_dim,
                 .read = asking.read,
                 .ahead = asking.ahead,
                 .scale = asking.scale},
                asking.rope, positions(head).first(own_[head]), host, sums);
  });
}

void RecallChoice::choose(const RecallStore& store, const AttentionMixer& m, bool alike, const float* votes,
                          Host& host) {
  choose_with(store, m, alike, host, [&](uint32_t head, std::span<float> sums) {
    const float* const of_head = votes + size_t(head) * limits_.pages;
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += of_head[i];
  });
}

// Takes pages from a heap, since few of many fit. Of pages with equal votes, the later one comes first.
void RecallChoice::take_best(const RecallStore& store, size_t run, uint32_t head, const float* votes,
                             uint32_t* pages) {
  const std::span<uint32_t> heap(pages, store.count(run));
  const auto comes_later = [&](uint32_t a, uint32_t b) {
    return votes[a] != votes[b] ? votes[a] < votes[b] : a < b;
  };
  std::iota(heap.begin(), heap.end(), 0);
  std::make_heap(heap.begin(), heap.end(), comes_later);
  uint32_t* const chosen = &chosen_[size_t(head) * limits_.recall];
  uint32_t &count = counts_[head], room = limits_.recall;
  count = 0;
  for (auto end = heap.end(); end != heap.begin(); --end) {
    std::pop_heap(heap.begin(), end, comes_later);
    const uint32_t page = *(end - 1);
    const auto entries = static_cast<uint32_t>(std::popcount(store.page(run, page).held));
    if (entries > room) break;
    room -= entries;
    chosen[count++] = page;
  }
  std::sort(chosen, chosen + count);
}

bool RecallChoice::is_in_pool(const RecallStore& store, size_t run, uint32_t head) const {
  const std::span<const uint32_t> chosen = this->chosen(head);
  size_t next = 0;
  for (uint32_t i = 0; i < store.count(run); ++i) {
    const RecallStore::Page& page = store.page(run, i);
    const bool is_chosen = next < chosen.size() && chosen[next] == i;
    next += is_chosen;
    if (page.recalled != (is_chosen ? page.held : 0)) return false;
  }
  return true;
}

}  // namespace thimble
