// Groups ops of a segment that a backend launches together. The ops of a group follow each other in the list.
// Either the later op reads the output of the earlier one, or no op needs what another one writes.
#pragma once

#include <functional>
#include <initializer_list>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "backends/backend.h"

namespace thimble {

// ---- which ops fit together ----

inline bool same(const View& a, const View& b) {
  return a.buffer == b.buffer && a.offset == b.offset && a.bytes == b.bytes;
}
inline bool overlap(const View& a, const View& b) {
  return a.buffer == b.buffer && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
}
inline bool overlap(std::span<const View> some, std::span<const View> others) {
  for (const View& a : some)
    for (const View& b : others)
      if (overlap(a, b)) return true;
  return false;
}

// Whether two products read the same x, and neither writes what the other reads or writes.
inline bool share_rows(const Linear& a, const Linear& b) {
  return a.x.buffer == b.x.buffer && a.x.offset == b.x.offset && a.p.x_stride == b.p.x_stride &&
         a.p.in_cols == b.p.in_cols && a.p.rows == b.p.rows && !overlap(a.x, a.y) && !overlap(b.x, b.y) &&
         (a.y.buffer != b.y.buffer || a.y.offset != b.y.offset);
}
// Whether b reads the same x as a, b's columns of y follow those of a, and both could be one product.
inline bool side_by_side(const Linear& a, const Linear& b) {
  return a.x.buffer == b.x.buffer && a.x.offset == b.x.offset && a.p.in_cols == b.p.in_cols &&
         a.p.x_stride == b.p.x_stride && a.p.rows == b.p.rows && a.y.buffer == b.y.buffer &&
         a.y.offset + a.p.out_cols * sizeof(float) == b.y.offset && a.p.y_stride == b.p.y_stride &&
         !a.p.add && !b.p.add && !a.bias && !b.bias && a.w.scale == b.w.scale;
}

// Norms without a weight, and those that subtract a mean, are not launched together with other ops.
inline bool is_plain(const RmsNorm& n) { return n.weight && !n.p.center; }

// Whether the product that reads these rows of x and writes y can also compute the norm: the norm writes
// exactly these rows, and neither op overwrites the norm's input or output.
inline bool makes_rows(const RmsNorm& n, const View& x, uint32_t stride, uint32_t cols, uint32_t rows,
                       const View& y) {
  return is_plain(n) && !n.p.add && n.y.buffer == x.buffer && n.y.offset == x.offset && n.p.groups == 1 &&
         n.p.cols == cols && n.p.row_stride == stride && !n.p.x_row_stride && n.p.rows == rows &&
         !overlap(n.x, n.y) && !overlap(n.x, y) && !overlap(n.y, y);
}
inline bool makes_rows(const RmsNorm& n, const Linear& l) {
  return makes_rows(n, l.x, l.p.x_stride, l.p.in_cols, l.p.rows, l.y);
}
inline bool makes_rows(const RmsNorm& n, const Glu& g) {
  return makes_rows(n, g.x, g.p.in_cols, g.p.in_cols, kStepRows, g.h);
}
// Whether the linear's output is exactly the input vector of the norm.
inline bool makes_vector(const Linear& l, const RmsNorm& n) {
  return is_plain(n) && l.y.buffer == n.x.buffer && l.y.offset == n.x.offset && l.p.out_cols == n.p.cols &&
         l.p.rows == kStepRows && n.p.rows == kStepRows && n.p.groups == 1;
}
inline bool makes_vector(const ExpertLinear& l, const RmsNorm& n) {
  return is_plain(n) && l.y.buffer == n.x.buffer && l.y.offset == n.x.offset && l.p.out_cols == n.p.cols &&
         n.p.rows == kStepRows && n.p.groups == 1;
}

// Whether a glu uses the slots of this route, and the route reads nothing that the glu writes.
inline bool makes_slots(const Route& r, const ExpertGlu& g) {
  return same(r.first, g.first) && same(r.row, g.row) && r.p.experts == g.p.experts &&
         r.p.chosen == g.p.chosen && !overlap(r.logits, g.h) && !overlap(r.bias, g.h) &&
         !overlap(r.each, g.h) && !overlap(r.weight, g.h) && !overlap(r.weight, g.x);
}

// Whether a linear uses the slots of this route, and the route reads nothing that the linear writes.
inline bool makes_slots(const Route& r, const ExpertLinear& l) {
  return same(r.first, l.first) && same(r.weight, l.weight) && r.p.experts == l.p.experts &&
         r.p.chosen == l.p.chosen && !overlap(r.logits, l.y) && !overlap(r.bias, l.y) &&
         !overlap(r.each, l.y);
}

// Whether these three, of which the gate may be missing, compute an expert that every token takes: it reads
// the same x as the chosen experts, has their shape and activation, and adds to the same y. It then can be
// one more slot of theirs, whose vector follows theirs in h.
inline bool makes_slot(const Glu& s, const ExpertGlu& g) {
  return s.x.buffer == g.x.buffer && s.x.offset == g.x.offset && s.p.in_cols == g.p.in_cols &&
         s.p.out_cols == g.p.out_cols && s.p.act == g.p.act && g.gate && !g.gate_bias && !g.up_bias &&
         !g.gate_scale && !g.up_scale &&
         g.h.bytes >= (uint64_t(g.p.chosen) + 1) * g.p.out_cols * sizeof(float);
}
inline bool makes_slot(const Gate& s, const Glu& g) {
  return same(s.x, g.h) && s.p.groups == 1 && s.p.cols == g.p.out_cols && s.p.g_cols == 1 &&
         !overlap(s.g, g.h);
}
inline bool makes_slot(const Linear& s, const Glu& g, const ExpertLinear& l) {
  return s.x.buffer == g.h.buffer && s.x.offset == g.h.offset && s.p.rows == kStepRows && s.p.add &&
         !s.bias && s.y.buffer == l.y.buffer && s.y.offset == l.y.offset && s.p.in_cols == l.p.in_cols &&
         s.p.out_cols == l.p.out_cols && s.p.y_stride == l.p.out_cols && !l.bias && !l.scale;
}

// Whether an in-place norm of head vectors computes the columns that a kv_append reads from `column` on, or
// the queries before them.
inline bool makes_heads(const RmsNorm& n, const KvAppend& a, uint32_t column) {
  return same(n.x, n.y) && n.x.buffer == a.qkv.buffer &&
         n.x.offset == a.qkv.offset + column * sizeof(float) && n.p.cols == a.p.head_dim &&
         n.p.row_stride == a.p.row_stride && n.p.rows == kStepRows && !n.p.add && is_plain(n);
}
inline bool makes_heads(const RmsNorm& q, const RmsNorm& k, const KvAppend& a) {
  return makes_heads(q, a, 0) && makes_heads(k, a, a.p.k_column) && q.p.groups * q.p.cols <= a.p.k_column &&
         k.p.groups == a.p.heads && a.p.first_head == 0 && q.p.eps == k.p.eps && a.p.into == kIntoPool &&
         !a.positions;
}

// Whether a delta_net reads exactly the channels that a convolution with silu writes: queries, keys and
// values. Then it can compute them, each where it is needed. Slots have to differ, as each tail is read
// repeatedly.
inline bool makes_vectors(const ShortConv& c, const DeltaNet& n) {
  const uint32_t keys = n.p.key_heads * n.p.width;
  return same(c.y, n.qkv) && c.p.times_column == kNoColumn && c.p.gate_column == kNoColumn && !c.bias &&
         c.p.act == kActSilu && c.tail.slots > 1 && n.p.q_column == 0 && n.p.k_column == keys &&
         n.p.v_column == 2 * keys && c.p.channels == 2 * keys + n.p.value_heads * n.p.width &&
         !overlap(c.x, c.y) && !overlap(c.x, n.y) && !overlap(n.gates, c.y);
}

// Whether a gated_norm normalises what a delta_net writes, in place, before the gate.
inline bool makes_vectors(const DeltaNet& n, const GatedNorm& g) {
  return same(n.y, g.x) && same(g.x, g.y) && g.p.order == kNormThenGate && g.p.cols == n.p.width &&
         g.p.groups == n.p.value_heads && !g.p.weight_per_group && !overlap(g.z, g.y) && !overlap(g.z, n.qkv);
}

// Whether a vote reads the scores of this token_score.
inline bool makes_scores(const TokenScore& s, const Vote& v) {
  return same(s.scores, v.scores) && same(s.lse, v.lse) && same(s.gate, v.gate) && s.p.first_head == 0 &&
         s.p.heads == v.p.heads && s.p.group == v.p.group && s.p.head_state == v.p.head_state &&
         s.p.score_capacity == v.p.score_capacity && v.p.page == 1;
}
// Whether a top_k reads the votes of this vote.
inline bool makes_votes(const Vote& v, const TopK& t) {
  return same(v.votes, t.scores) && same(v.gate, t.gate) && !t.chunk_scores && t.p.keep == kKeepOfStep &&
         !t.p.in_runs && t.p.by_position == (v.p.scope == kVoteLayer) && t.p.page == v.p.page &&
         v.p.heads == t.p.heads && v.p.head_state == t.p.head_state &&
         v.p.vote_capacity == t.p.score_capacity;
}

// ---- groups ----

// The groups that a backend can launch, for one program that it records.
struct Joins {
  enum class Norm {
    kAlone,
    kOfProducts,      // with the products that read its output
    kBetweenProducts  // with these products and the product that computes its input, or not at all
  };
  Norm norm = Norm::kAlone;
  // Whether a product can join the products before it, at least one. They all read the output of `norm`, or
  // the same x if it is null.
  std::function<bool(const RmsNorm* norm, std::span<const Linear> siblings, const Linear& next)> sibling;
  bool routed_glu = false;       // the first product that needs the experts also chooses them
  bool routed_linear = false;    // the product after it chooses them again
  bool shared_expert = false;    // and both compute the expert that every token takes as one more slot
  bool append = false;           // appends, copies and compares a token's rows in one launch
  bool normed_append = false;    // normalises a token's queries and keys in the same launch as the append
  bool convolved_delta = false;  // computes a token's convolution in the same launch as the delta_net
  bool normed_delta = false;     // and normalises what that writes, too
  // Whether a top_k can compute the votes that it reads. makes_votes() holds.
  std::function<bool(const Vote&, const TopK&)> vote;
};

// Groups of two or more ops. They point into the list of ops.
struct Products {
  const Linear* before = nullptr;  // null, or the op that computes the norm's x
  const RmsNorm* norm = nullptr;   // null, or the op that computes the siblings' x
  std::vector<Linear> siblings;
  const ExpertLinear* experts = nullptr;  // null, or the op that computes the norm's x instead of `before`
};
struct GluOfNorm {
  const Linear* before = nullptr;  // null, or the op that computes the norm's x
  const RmsNorm* norm = nullptr;
  const Glu* glu = nullptr;
};
// The expert that every token takes. All are null if there is none.
struct SharedExpert {
  const Glu* glu = nullptr;
  const Gate* gate = nullptr;  // or null
  const Linear* linear = nullptr;
};
struct RoutedExperts {
  const Route* route = nullptr;
  const ExpertGlu* glu = nullptr;
  const ExpertLinear* linear = nullptr;  // or null
  SharedExpert shared;
};
struct AppendToken {
  const RmsNorm *q_norm = nullptr, *k_norm = nullptr;  // both set, or both null
  const KvAppend* append = nullptr;
  const Copy* copy = nullptr;       // or null
  const QueryGate* gate = nullptr;  // or null
};
struct Select {
  const TokenScore* score = nullptr;  // or null
  const Vote* vote = nullptr;
  const TopK* top_k = nullptr;
};
struct ConvolvedDelta {
  const ShortConv* conv = nullptr;
  const DeltaNet* net = nullptr;
  const GatedNorm* norm = nullptr;  // or null
};
using Group =
    std::variant<const Op*, Products, GluOfNorm, RoutedExperts, AppendToken, Select, ConvolvedDelta>;

namespace fusion {

// Removes the first op from the list and returns it, if it is a T that fits. Else returns null.
template <typename T, typename Fits>
const T* take(std::span<const Op>& ops, const Fits& fits) {
  const T* op = ops.empty() ? nullptr : std::get_if<T>(&ops.front());
  if (!op || !fits(*op)) return nullptr;
  ops = ops.subspan(1);
  return op;
}

inline std::vector<Linear> take_siblings(std::span<const Op>& ops, const Joins& joins, const RmsNorm* norm) {
  std::vector<Linear> siblings;
  const auto fits = [&](const Linear& l) {
    return (!norm || makes_rows(*norm, l)) && (siblings.empty() || joins.sibling(norm, siblings, l));
  };
  while (const Linear* l = take<Linear>(ops, fits)) siblings.push_back(*l);
  return siblings;
}

// Each function takes a group that starts with the first op. If there is none, it takes nothing and returns
// that op.

inline Group take_products_of_norm(std::span<const Op>& ops, const Joins& joins) {
  std::span<const Op> rest = ops;
  const Linear* before = nullptr;
  const ExpertLinear* experts = nullptr;
  if (joins.norm == Joins::Norm::kBetweenProducts) {
    before = take<Linear>(rest, [](const Linear&) { return true; });
    if (!before) experts = take<ExpertLinear>(rest, [](const ExpertLinear&) { return true; });
  }
  const bool may = joins.norm == Joins::Norm::kOfProducts || before || experts;
  const RmsNorm* norm = take<RmsNorm>(rest, [&](const RmsNorm& n) {
    return may && (!before || makes_vector(*before, n)) && (!experts || makes_vector(*experts, n));
  });
  if (!norm) return &ops.front();
  Group group = &ops.front();
  const auto is_read = [&](const Glu& g) { return !experts && makes_rows(*norm, g); };
  if (const Glu* glu = take<Glu>(rest, is_read))
    group = GluOfNorm{before, norm, glu};
  else if (auto siblings = take_siblings(rest, joins, norm); !siblings.empty())
    group = Products{before, norm, std::move(siblings), experts};
  else
    return group;
  ops = rest;
  return group;
}

inline Group take_products(std::span<const Op>& ops, const Joins& joins) {
  std::span<const Op> rest = ops;
  std::vector<Linear> siblings = take_siblings(rest, joins, nullptr);
  if (siblings.size() < 2) return &ops.front();
  ops = rest;
  return Products{.siblings = std::move(siblings)};
}

inline SharedExpert take_shared_expert(std::span<const Op>& ops, const ExpertGlu& experts,
                                       const ExpertLinear& sum) {
  std::span<const Op> rest = ops;
  SharedExpert shared;
  shared.glu = take<Glu>(rest, [&](const Glu& g) { return makes_slot(g, experts); });
  if (!shared.glu) return {};
  shared.gate = take<Gate>(rest, [&](const Gate& g) { return makes_slot(g, *shared.glu); });
  shared.linear = take<Linear>(rest, [&](const Linear& l) { return makes_slot(l, *shared.glu, sum); });
  if (!shared.linear) return {};
  ops = rest;
  return shared;
}

inline Group take_routed_experts(std::span<const Op>& ops, const Joins& joins) {
  std::span<const Op> rest = ops;
  const Route* route = take<Route>(rest, [&](const Route&) { return joins.routed_glu; });
  const ExpertGlu* glu =
      take<ExpertGlu>(rest, [&](const ExpertGlu& g) { return route && makes_slots(*route, g); });
  if (!glu) return &ops.front();
  const ExpertLinear* linear = take<ExpertLinear>(
      rest, [&](const ExpertLinear& l) { return joins.routed_linear && makes_slots(*route, l); });
  ops = rest;
  const SharedExpert shared =
      linear && joins.shared_expert ? take_shared_expert(ops, *glu, *linear) : SharedExpert{};
  return RoutedExperts{route, glu, linear, shared};
}

inline Group take_normed_append(std::span<const Op>& ops, const Joins& joins) {
  std::span<const Op> rest = ops;
  const auto is_norm = [&](const RmsNorm&) { return joins.normed_append; };
  const RmsNorm* q = take<RmsNorm>(rest, is_norm);
  const RmsNorm* k = take<RmsNorm>(rest, is_norm);
  const KvAppend* append =
      take<KvAppend>(rest, [&](const KvAppend& a) { return q && k && makes_heads(*q, *k, a); });
  if (!append) return &ops.front();
  ops = rest;
  return AppendToken{.q_norm = q, .k_norm = k, .append = append};
}

inline Group take_append(std::span<const Op>& ops, const Joins& joins) {
  std::span<const Op> rest = ops;
  const KvAppend* append =
      take<KvAppend>(rest, [&](const KvAppend& a) { return joins.append && !a.positions; });
  if (!append) return &ops.front();
  std::vector<View> read{append->qkv, append->rope};
  std::vector<View> written{append->k.values, append->v.values, append->pos, append->saturated};
  // Whether an op with these reads and writes is independent of the ops that were taken.
  const auto apart = [&](std::initializer_list<View> reads, std::initializer_list<View> writes) {
    return !overlap(reads, written) && !overlap(writes, written) && !overlap(writes, read);
  };
  const Copy* copy = take<Copy>(rest, [&](const Copy& c) { return apart({c.src}, {c.dst}); });
  if (copy) read.push_back(copy->src), written.push_back(copy->dst);
  const QueryGate* gate = take<QueryGate>(rest, [&](const QueryGate& g) {
    return apart({g.q}, {g.cached, g.gate});
  });
  if (!copy && !gate) return &ops.front();
  ops = rest;
  return AppendToken{.append = append, .copy = copy, .gate = gate};
}

inline Group take_select(std::span<const Op>& ops, const Joins& joins) {
  std::span<const Op> rest = ops;
  const TokenScore* score = take<TokenScore>(rest, [](const TokenScore&) { return true; });
  const Vote* vote = take<Vote>(rest, [&](const Vote& v) { return !score || makes_scores(*score, v); });
  if (!vote) return &ops.front();
  const TopK* top_k =
      take<TopK>(rest, [&](const TopK& t) { return makes_votes(*vote, t) && joins.vote(*vote, t); });
  if (!top_k) return &ops.front();
  ops = rest;
  return Select{score, vote, top_k};
}

inline Group take_convolved_delta(std::span<const Op>& ops, const Joins& joins) {
  std::span<const Op> rest = ops;
  const ShortConv* conv = take<ShortConv>(rest, [&](const ShortConv&) { return joins.convolved_delta; });
  const DeltaNet* net =
      take<DeltaNet>(rest, [&](const DeltaNet& n) { return conv && makes_vectors(*conv, n); });
  if (!net) return &ops.front();
  const GatedNorm* norm =
      take<GatedNorm>(rest, [&](const GatedNorm& g) { return joins.normed_delta && makes_vectors(*net, g); });
  ops = rest;
  return ConvolvedDelta{conv, net, norm};
}

// Takes the group at the start of the list. An op that joins no other forms a group by itself.
inline Group take_group(std::span<const Op>& ops, const Joins& joins) {
  using Take = Group (*)(std::span<const Op>&, const Joins&);
  constexpr Take kTakes[] = {take_products_of_norm, take_products, take_routed_experts, take_normed_append,
                             take_append,           take_select,   take_convolved_delta};
  for (const Take take : kTakes) {
    Group group = take(ops, joins);
    if (!std::holds_alternative<const Op*>(group)) return group;
  }
  const Op* alone = &ops.front();
  ops = ops.subspan(1);
  return alone;
}

}  // namespace fusion

// The groups of a segment, in order.
inline std::vector<Group> group_ops(std::span<const Op> ops, const Joins& joins) {
  std::vector<Group> groups;
  while (!ops.empty()) groups.push_back(fusion::take_group(ops, joins));
  return groups;
}

}  // namespace thimble
