// kv_merge: sorts a run by position after entries were appended out of order.
#include <algorithm>

#include "backends/cpu/entries.h"

namespace thimble::cpu {

// The positions of a run. Those from `tail` on belong among the earlier ones. They are few, so each is
// rotated into its place.
struct Tail {
  int32_t* pos;
  uint32_t tail, count;

  Tail(int32_t* p, uint32_t n)
      : pos(p), tail(static_cast<uint32_t>(std::is_sorted_until(p, p + n) - p)), count(n) {}
  // Merges one array in rows of `bytes`. The positions must not have been merged yet.
  void merge(std::byte* column, size_t bytes) const {
    for (uint32_t i = tail; i < count; ++i) {
      const auto before = std::lower_bound(pos, pos + tail, pos[i]) - pos;
      // After the tail entries that already moved
      const uint64_t to = static_cast<uint64_t>(before) + (i - tail);
      std::rotate(column + to * bytes, column + i * bytes, column + (i + uint64_t{1}) * bytes);
    }
  }
  void merge_positions() const {
    for (int32_t* p = pos + tail; p < pos + count; ++p) std::rotate(std::lower_bound(pos, p, *p), p, p + 1);
  }
};

void kv_merge(const Context& ctx, const KvMerge& o) {
  const KvMergeParams& p = o.p;
  const struct {
    const View& run;
    size_t bytes;
  } columns[] = {{o.k.values, kv_bytes(o.k.type, p.head_dim)},
                 {o.v.values, kv_bytes(o.v.type, p.head_dim)},
                 {o.cis, sizeof(float)}};
  constexpr uint32_t kColumns = 3;
  const auto state_of = [&](uint32_t head) -> const HeadState& { return ctx.heads[p.head_state + head]; };
  const auto tail_of = [&](const HeadState& state) {
    return Tail(in_run<int32_t>(o.pos, state, 0), std::min(state.keep, step_entries(ctx.step, state)));
  };
  ctx.threads.run(kColumns * p.heads, [&](uint32_t item, uint32_t) {
    const HeadState& state = state_of(p.first_head + item / kColumns);
    const auto& [run, bytes] = columns[item % kColumns];
    if (run) tail_of(state).merge(in_run<std::byte>(run, state, 0, bytes), bytes);
  });
  for (uint32_t head = p.first_head; head < p.first_head + p.heads; ++head)
    tail_of(state_of(head)).merge_positions();
}

}  // namespace thimble::cpu
