#include "text/grammar/automaton.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <tuple>

namespace thimble::grammar {
namespace {

constexpr size_t kMostNodes = 1 << 20;
constexpr uint64_t kMostWork = 20'000'000;  // looks at an expression
constexpr uint32_t kNever = UINT32_MAX;     // Node::need of a node from which nothing can be completed
// A body that is repeated at most so often is copied. Otherwise a frame of the stack counts.
constexpr uint32_t kMostCopies = 3;
// The same for a body that may be empty, which cannot be counted.
constexpr uint32_t kMostEmptyCopies = 16;
constexpr uint32_t kMostRepetitions = 1 << 24;

// A range of bytes at each place of a UTF-8 sequence.
struct ByteRange {
  uint8_t first, last;
};
using ByteSequence = std::vector<ByteRange>;

// The bytes of a code point as UTF-8.
ByteSequence encoded(uint32_t code) {
  std::vector<uint32_t> bytes;
  if (code < 0x80) {
    bytes = {code};
  } else if (code < 0x800) {
    bytes = {0xC0 | code >> 6, 0x80 | (code & 0x3F)};
  } else if (code < 0x10000) {
    bytes = {0xE0 | code >> 12, 0x80 | (code >> 6 & 0x3F), 0x80 | (code & 0x3F)};
  } else {
    bytes = {0xF0 | code >> 18, 0x80 | (code >> 12 & 0x3F), 0x80 | (code >> 6 & 0x3F), 0x80 | (code & 0x3F)};
  }
  ByteSequence sequence;
  for (const uint32_t b : bytes) sequence.push_back({static_cast<uint8_t>(b), static_cast<uint8_t>(b)});
  return sequence;
}

// Appends sequences of byte ranges that match exactly the code points `first` to `last`. Each matches all
// combinations of its bytes, so a range is cut where a higher byte changes while lower bytes do not run from
// 80 to BF.
void append_sequences(uint32_t first, uint32_t last, std::vector<ByteSequence>& out) {
  for (const uint32_t end : {0x7Fu, 0x7FFu, 0xFFFFu})  // where the encoding becomes longer
    if (first <= end && end < last) {
      append_sequences(first, end, out);
      append_sequences(end + 1, last, out);
      return;
    }
  if (last >= 0x80)
    for (uint32_t bits = 6; bits <= 18; bits += 6) {
      const uint32_t low = (1u << bits) - 1;
      if ((first & ~low) == (last & ~low)) break;
      if (first & low) {
        append_sequences(first, first | low, out);
        append_sequences((first | low) + 1, last, out);
        return;
      }
      if ((last & low) != low) {
        append_sequences(first, (last & ~low) - 1, out);
        append_sequences(last & ~low, last, out);
        return;
      }
    }
  ByteSequence sequence = encoded(first);
  const ByteSequence to = encoded(last);
  for (size_t i = 0; i < sequence.size(); ++i) sequence[i].last = to[i].last;
  out.push_back(std::move(sequence));
}

}  // namespace

class AutomatonBuilder {
 public:
  explicit AutomatonBuilder(const Syntax& syntax)
      : syntax_(syntax), nullable_(syntax.rules().size(), false) {}

  Result<Automaton> build();

 private:
  using Kind = Automaton::Kind;
  using Node = Automaton::Node;

  Status find_nullable();
  bool nullable(Expr e) const;
  // Whether the grammar asked for so much work that it is refused.
  Status check_work() const;
  Status check_left_recursion() const;
  // Appends the rules that the expression may begin with.
  void begins_with(Expr e, std::vector<uint32_t>& rules) const;
  uint32_t add(Node node);
  uint32_t split(const std::vector<uint32_t>& targets);
  uint32_t byte(uint8_t first, uint8_t last, uint32_t next);
  // The node from which the expression is read before `next`.
  Result<uint32_t> lower(Expr e, uint32_t next);
  uint32_t lower_set(const CodeSet& set, uint32_t next);
  uint32_t lower_words(std::span<const std::string_view> words, size_t at, uint32_t next, uint32_t depth);
  uint32_t lower_bytes(std::string_view bytes, uint32_t next);
  Result<uint32_t> lower_repeat(const Syntax::Node& n, uint32_t next);
  uint32_t need(const Node& n) const;
  void find_needs();
  // Removes the ways on which nothing can be completed.
  void prune();

  const Syntax& syntax_;
  Automaton made_;
  std::vector<bool> nullable_;    // of each rule
  std::vector<uint32_t> starts_;  // of each rule
  mutable uint64_t work_ = 0;
  std::map<std::tuple<uint8_t, uint8_t, uint32_t>, uint32_t> bytes_;  // single edges that were made
};

Result<Automaton> Automaton::make(const Syntax& syntax) { return AutomatonBuilder(syntax).build(); }

Result<Automaton> AutomatonBuilder::build() {
  if (syntax_.too_large()) return Syntax::too_large_error();
  for (const Syntax::Rule& rule : syntax_.rules())
    if (!rule.defined) return error(Code::kInvalidArgument, "%s is used but not defined", rule.name.c_str());
  THIMBLE_TRY(find_nullable());
  THIMBLE_TRY(check_left_recursion());
  add({.kind = Kind::kReturn});
  for (const Syntax::Rule& rule : syntax_.rules()) {
    THIMBLE_LET(start, lower(rule.body, Automaton::kReturn));
    starts_.push_back(start);
  }
  for (Node& n : made_.nodes_)
    if (n.kind == Kind::kCall) n.first = starts_[n.first];
  find_needs();
  for (size_t i = 0; i < starts_.size(); ++i)
    if (made_.nodes_[starts_[i]].need == kNever)
      return error(Code::kInvalidArgument, "%s can never be completed", syntax_.rules()[i].name.c_str());
  made_.start_ = starts_[syntax_.root()];
  if (made_.nodes_[made_.start_].need > Automaton::kDeepest)
    return error(Code::kInvalidArgument, "the grammar nests rules more than %u deep; make it simpler",
                 Automaton::kDeepest);
  prune();
  return std::move(made_);
}

Status AutomatonBuilder::find_nullable() {
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = 0; i < nullable_.size(); ++i) {
      if (!nullable_[i] && nullable(syntax_.rules()[i].body)) nullable_[i] = changed = true;
      THIMBLE_TRY(check_work());
    }
  }
  return {};
}

Status AutomatonBuilder::check_work() const {
  return work_ <= kMostWork && made_.nodes_.size() <= kMostNodes ? Status() : Syntax::too_large_error();
}

bool AutomatonBuilder::nullable(Expr e) const {
  ++work_;
  const Syntax::Node& n = syntax_[e];
  const auto part = [this](Expr p) { return nullable(p); };
  switch (n.kind) {
    case Syntax::Kind::kLiteral:
      return n.bytes.empty();
    case Syntax::Kind::kSet:
      return false;
    case Syntax::Kind::kSequence:
      return std::all_of(n.parts.begin(), n.parts.end(), part);
    case Syntax::Kind::kChoice:
      return std::any_of(n.parts.begin(), n.parts.end(), part);
    case Syntax::Kind::kRepeat:
      return n.min == 0 || nullable(n.parts[0]);
    case Syntax::Kind::kRule:
      return nullable_[n.rule];
  }
  return false;
}

void AutomatonBuilder::begins_with(Expr e, std::vector<uint32_t>& rules) const {
  const Syntax::Node& n = syntax_[e];
  if (n.kind == Syntax::Kind::kRule) rules.push_back(n.rule);
  for (const Expr part : n.parts) {
    begins_with(part, rules);
    if (n.kind == Syntax::Kind::kSequence && !nullable(part)) return;
  }
}

// A depth-first search for a circle of rules, each of which may begin with the next.
Status AutomatonBuilder::check_left_recursion() const {
  enum class Seen : uint8_t { kNot, kOpen, kDone };
  struct Open {
    uint32_t rule;
    std::vector<uint32_t> first;
    size_t next = 0;
  };
  const size_t count = syntax_.rules().size();
  std::vector<Seen> seen(count, Seen::kNot);
  for (uint32_t root = 0; root < count; ++root) {
    if (seen[root] != Seen::kNot) continue;
    std::vector<Open> open;
    const auto enter = [&](uint32_t rule) {
      seen[rule] = Seen::kOpen;
      open.push_back({rule, {}});
      begins_with(syntax_.rules()[rule].body, open.back().first);
    };
    enter(root);
    while (!open.empty()) {
      Open& top = open.back();
      if (top.next == top.first.size()) {
        seen[top.rule] = Seen::kDone;
        open.pop_back();
        continue;
      }
      THIMBLE_TRY(check_work());
      const uint32_t rule = top.first[top.next++];
      if (seen[rule] == Seen::kOpen)
        return error(Code::kInvalidArgument,
                     "%s begins with itself (left recursion); let it begin with something else",
                     syntax_.rules()[rule].name.c_str());
      if (seen[rule] == Seen::kNot) enter(rule);
    }
  }
  return {};
}

uint32_t AutomatonBuilder::add(Node node) {
  made_.nodes_.push_back(node);
  return static_cast<uint32_t>(made_.nodes_.size() - 1);
}

uint32_t AutomatonBuilder::split(const std::vector<uint32_t>& targets) {
  if (targets.size() == 1) return targets[0];
  const auto first = static_cast<uint32_t>(made_.targets_.size());
  made_.targets_.insert(made_.targets_.end(), targets.begin(), targets.end());
  return add({.kind = Kind::kSplit, .first = first, .count = static_cast<uint32_t>(targets.size())});
}

uint32_t AutomatonBuilder::byte(uint8_t first, uint8_t last, uint32_t next) {
  const auto [known, is_new] = bytes_.try_emplace({first, last, next}, 0);
  if (is_new) {
    known->second =
        add({.kind = Kind::kBytes, .first = static_cast<uint32_t>(made_.edges_.size()), .count = 1});
    made_.edges_.push_back({first, last, next});
  }
  return known->second;
}

uint32_t AutomatonBuilder::lower_set(const CodeSet& set, uint32_t next) {
  std::vector<ByteSequence> sequences;
  for (const CodeRange& r : set) append_sequences(r.first, r.last, sequences);
  if (sequences.size() == 1 && sequences[0].size() == 1)
    return byte(sequences[0][0].first, sequences[0][0].last, next);
  std::vector<Automaton::Edge> edges;
  for (const ByteSequence& s : sequences) {
    uint32_t rest = next;
    for (size_t i = s.size() - 1; i > 0; --i) rest = byte(s[i].first, s[i].last, rest);
    edges.push_back({s[0].first, s[0].last, rest});
  }
  const auto first = static_cast<uint32_t>(made_.edges_.size());
  made_.edges_.insert(made_.edges_.end(), edges.begin(), edges.end());
  return add({.kind = Kind::kBytes, .first = first, .count = static_cast<uint32_t>(edges.size())});
}

uint32_t AutomatonBuilder::lower_bytes(std::string_view bytes, uint32_t next) {
  for (size_t i = bytes.size(); i-- > 0;) {
    const auto b = static_cast<uint8_t>(bytes[i]);
    next = byte(b, b, next);
  }
  return next;
}

// Sorted words that are equal up to `at`. They share the nodes of their common beginnings, so that a long
// list stands at few places at a time.
uint32_t AutomatonBuilder::lower_words(std::span<const std::string_view> words, size_t at, uint32_t next,
                                       uint32_t depth) {
  constexpr uint32_t kDeepestWords = 500;
  const std::string_view first = words.front(), last = words.back();
  const auto common = static_cast<size_t>(
      std::mismatch(first.begin(), first.end(), last.begin(), last.end()).first - first.begin());
  std::vector<uint32_t> ways;
  for (size_t i = 0; i < words.size();) {
    size_t end = i + 1;
    const bool ends = words[i].size() == common;
    while (end < words.size() && (ends ? words[end].size() == common
                                       : words[end].substr(0, common + 1) == words[i].substr(0, common + 1)))
      ++end;
    const auto group = words.subspan(i, end - i);
    if (ends || group.size() == 1 || depth == kDeepestWords) {
      for (const std::string_view word : depth == kDeepestWords ? group : group.first(1))
        ways.push_back(lower_bytes(word.substr(common), next));
    } else {
      ways.push_back(lower_words(group, common, next, depth + 1));
    }
    i = end;
  }
  return lower_bytes(first.substr(at, common - at), split(ways));
}

Result<uint32_t> AutomatonBuilder::lower_repeat(const Syntax::Node& n, uint32_t next) {
  const Expr body = n.parts[0];
  const bool empty = nullable(body);
  const uint32_t min = empty ? 0 : n.min;
  uint32_t after = next;
  uint32_t most = n.max;
  if (n.max == kUnbounded) {
    const auto first = static_cast<uint32_t>(made_.targets_.size());
    made_.targets_.resize(first + 2);
    const uint32_t loop = add({.kind = Kind::kSplit, .first = first, .count = 2});
    THIMBLE_LET(start, lower(body, loop));
    made_.targets_[first] = start;
    made_.targets_[first + 1] = next;
    after = loop;
    most = min;
  }
  if (most == 0) return after;
  if (empty && most > kMostEmptyCopies)
    return error(Code::kInvalidArgument,
                 "something that may be empty is repeated up to %u times; at most %u are supported, or no "
                 "upper limit",
                 most, kMostEmptyCopies);
  if (most > kMostRepetitions)
    return error(Code::kInvalidArgument, "a repetition counts to %u; at most %u are supported", most,
                 kMostRepetitions);
  if (!empty && most > kMostCopies) {
    const uint32_t repeat = add({.kind = Kind::kRepeat, .next = after, .min = min, .max = most});
    THIMBLE_LET(start, lower(body, Automaton::kReturn));
    made_.nodes_[repeat].first = start;
    return repeat;
  }
  uint32_t node = after;
  for (uint32_t i = most; i-- > 0;) {
    THIMBLE_LET(start, lower(body, node));
    node = i < min ? start : split({start, after});
  }
  return node;
}

Result<uint32_t> AutomatonBuilder::lower(Expr e, uint32_t next) {
  THIMBLE_TRY(check_work());
  const Syntax::Node& n = syntax_[e];
  switch (n.kind) {
    case Syntax::Kind::kLiteral:
      return lower_bytes(n.bytes, next);
    case Syntax::Kind::kSet:
      return lower_set(n.set, next);
    case Syntax::Kind::kSequence:
      for (size_t i = n.parts.size(); i-- > 0;) THIMBLE_SET(next, lower(n.parts[i], next));
      return next;
    case Syntax::Kind::kChoice: {
      std::vector<uint32_t> targets;
      std::vector<std::string_view> words;
      for (const Expr part : n.parts) {
        if (syntax_[part].kind == Syntax::Kind::kLiteral) {
          words.push_back(syntax_[part].bytes);
          continue;
        }
        THIMBLE_LET(start, lower(part, next));
        targets.push_back(start);
      }
      std::sort(words.begin(), words.end());
      if (!words.empty()) targets.push_back(lower_words(words, 0, next, 0));
      return split(targets);
    }
    case Syntax::Kind::kRepeat:
      return lower_repeat(n, next);
    case Syntax::Kind::kRule:
      return add({.kind = Kind::kCall, .first = n.rule, .next = next});  // build() replaces the rule
  }
  return next;
}

// A call that is the last thing in a rule needs no frame.
uint32_t AutomatonBuilder::need(const Node& n) const {
  const auto need_of = [this](uint32_t node) { return made_.nodes_[node].need; };
  const auto framed = [&](uint32_t node) {
    const uint32_t inner = need_of(node);
    return inner == kNever ? kNever : inner + 1;
  };
  uint32_t least = kNever;
  switch (n.kind) {
    case Kind::kReturn:
      return 0;
    case Kind::kBytes:
      for (const Automaton::Edge& e : made_.edges(n)) least = std::min(least, need_of(e.next));
      return least;
    case Kind::kSplit:
      for (const uint32_t target : made_.targets(n)) least = std::min(least, need_of(target));
      return least;
    case Kind::kCall:
      if (n.next == Automaton::kReturn) return need_of(n.first);
      return std::max(framed(n.first), need_of(n.next));
    case Kind::kRepeat:
      return n.min == 0 ? need_of(n.next) : std::max(framed(n.first), need_of(n.next));
  }
  return least;
}

// Nodes are found in the order of their needs: once a node is known, so are those before it that need nothing
// else, with the same need or one more.
void AutomatonBuilder::find_needs() {
  std::vector<Node>& nodes = made_.nodes_;
  std::vector<std::vector<uint32_t>> before(nodes.size());
  for (uint32_t i = 0; i < nodes.size(); ++i) {
    Node& n = nodes[i];
    n.need = kNever;
    if (n.kind == Kind::kBytes)
      for (const Automaton::Edge& e : made_.edges(n)) before[e.next].push_back(i);
    if (n.kind == Kind::kSplit)
      for (const uint32_t target : made_.targets(n)) before[target].push_back(i);
    if (n.kind == Kind::kCall || n.kind == Kind::kRepeat) {
      before[n.first].push_back(i);
      before[n.next].push_back(i);
    }
  }
  nodes[Automaton::kReturn].need = 0;
  std::vector<uint32_t> now = {Automaton::kReturn}, later;
  for (uint32_t level = 0; !now.empty(); ++level) {
    while (!now.empty()) {
      const uint32_t known = now.back();
      now.pop_back();
      for (const uint32_t i : before[known]) {
        if (nodes[i].need != kNever) continue;
        nodes[i].need = need(nodes[i]);
        if (nodes[i].need != kNever) (nodes[i].need == level ? now : later).push_back(i);
      }
    }
    now.swap(later);
  }
}

void AutomatonBuilder::prune() {
  const auto dead = [this](uint32_t node) { return made_.nodes_[node].need == kNever; };
  for (Node& n : made_.nodes_) {
    if (n.kind == Kind::kBytes) {
      const auto first = made_.edges_.begin() + n.first;
      const auto end =
          std::remove_if(first, first + n.count, [&](const Automaton::Edge& e) { return dead(e.next); });
      n.count = static_cast<uint32_t>(end - first);
    }
    if (n.kind == Kind::kSplit) {
      const auto first = made_.targets_.begin() + n.first;
      n.count = static_cast<uint32_t>(std::remove_if(first, first + n.count, dead) - first);
    }
    if (n.kind == Kind::kRepeat && dead(n.first)) {  // goes on without the body
      n.kind = Kind::kSplit;
      n.first = static_cast<uint32_t>(made_.targets_.size());
      n.count = 1;
      made_.targets_.push_back(n.next);
    }
  }
}

}  // namespace thimble::grammar
