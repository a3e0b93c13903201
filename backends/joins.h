// Which ops follow each other so that a backend may record them as one: the later one reads what the earlier
// one makes, and nothing else.
#pragma once

#include "backends/backend.h"

namespace thimble {

inline bool same(const View& a, const View& b) {
  return a.buffer == b.buffer && a.offset == b.offset && a.bytes == b.bytes;
}
inline bool overlap(const View& a, const View& b) {
  return a.buffer == b.buffer && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
}

// Whether a norm can be left to the products of these rows of x, which write y: they and nothing else are
// what it makes, and nobody writes what it reads or makes.
inline bool makes_rows(const RmsNorm& n, const View& x, uint32_t stride, uint32_t cols, uint32_t rows,
                       const View& y) {
  return n.y.buffer == x.buffer && n.y.offset == x.offset && n.p.groups == 1 && n.p.cols == cols &&
         n.p.row_stride == stride && n.p.rows == rows && !overlap(n.x, n.y) && !overlap(n.x, y) &&
         !overlap(n.y, y);
}

// Whether a vote combines what a token_score writes.
inline bool makes_scores(const TokenScore& s, const Vote& v) {
  return same(s.scores, v.scores) && same(s.lse, v.lse) && same(s.gate, v.gate) && s.p.first_head == 0 &&
         s.p.heads == v.p.heads && s.p.group == v.p.group && s.p.score_capacity == v.p.score_capacity;
}

// Whether a top_k picks by a vote.
inline bool makes_votes(const Vote& v, const TopK& t) {
  return same(v.votes, t.scores) && same(v.gate, t.gate) && t.p.purpose == kTopKSelect &&
         v.p.heads == t.p.heads && v.p.vote_capacity == t.p.score_capacity;
}

}  // namespace thimble
