#include "text/grammar/syntax.h"

#include <algorithm>

namespace thimble::grammar {

CodeSet normal(CodeSet set) {
  constexpr uint32_t kFirstSurrogate = 0xD800, kLastSurrogate = 0xDFFF;
  CodeSet parts;
  for (const CodeRange& r : set) {
    const CodeRange below{r.first, std::min(r.last, kFirstSurrogate - 1)};
    const CodeRange above{std::max(r.first, kLastSurrogate + 1), std::min(r.last, kLastCode)};
    if (below.first <= below.last) parts.push_back(below);
    if (above.first <= above.last) parts.push_back(above);
  }
  std::sort(parts.begin(), parts.end(),
            [](const CodeRange& a, const CodeRange& b) { return a.first < b.first; });
  CodeSet joined;
  for (const CodeRange& r : parts) {
    if (!joined.empty() && r.first <= joined.back().last + 1)
      joined.back().last = std::max(joined.back().last, r.last);
    else
      joined.push_back(r);
  }
  return joined;
}

CodeSet complement(const CodeSet& set) {
  CodeSet rest;
  uint32_t next = 0;
  for (const CodeRange& r : normal(set)) {
    if (r.first > next) rest.push_back({next, r.first - 1});
    next = r.last + 1;
  }
  if (next <= kLastCode) rest.push_back({next, kLastCode});
  return normal(std::move(rest));
}

CodeSet intersection(const CodeSet& a, const CodeSet& b) {
  CodeSet neither = complement(a);
  const CodeSet outside = complement(b);
  neither.insert(neither.end(), outside.begin(), outside.end());
  return complement(neither);
}

std::string control_bytes(int32_t token) {
  return {kControlByte, static_cast<char>(token >> 16), static_cast<char>(token >> 8),
          static_cast<char>(token)};
}

Expr Syntax::add(Node node) {
  nodes_.push_back(std::move(node));
  return static_cast<Expr>(nodes_.size() - 1);
}

Expr Syntax::literal(std::string_view bytes) {
  return add({.kind = Kind::kLiteral, .bytes = std::string(bytes), .set = {}, .parts = {}});
}

Expr Syntax::control(int32_t token) {
  controls_.push_back(token);
  return literal(control_bytes(token));
}

Expr Syntax::set(CodeSet set) {
  return add({.kind = Kind::kSet, .bytes = {}, .set = normal(std::move(set)), .parts = {}});
}

Expr Syntax::sequence(std::vector<Expr> parts) {
  if (parts.size() == 1) return parts[0];
  return add({.kind = Kind::kSequence, .bytes = {}, .set = {}, .parts = std::move(parts)});
}

Expr Syntax::choice(std::vector<Expr> parts) {
  if (parts.size() == 1) return parts[0];
  return add({.kind = Kind::kChoice, .bytes = {}, .set = {}, .parts = std::move(parts)});
}

Expr Syntax::repeat(Expr part, uint32_t min, uint32_t max) {
  return add({.kind = Kind::kRepeat, .bytes = {}, .set = {}, .parts = {part}, .min = min, .max = max});
}

Expr Syntax::rule(uint32_t rule) {
  return add({.kind = Kind::kRule, .bytes = {}, .set = {}, .parts = {}, .rule = rule});
}

uint32_t Syntax::add_rule(std::string name) {
  rules_.push_back({std::move(name)});
  return static_cast<uint32_t>(rules_.size() - 1);
}

void Syntax::define(uint32_t rule, Expr body) {
  rules_[rule].body = body;
  rules_[rule].defined = true;
}

Status Syntax::too_large_error() {
  return error(Code::kInvalidArgument,
               "the grammar is too large: it has more than %zu expressions; make it simpler", kMostNodes);
}

}  // namespace thimble::grammar
