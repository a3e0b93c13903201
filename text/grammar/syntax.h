// A grammar as expressions over code points. Every language (regular expressions, GBNF, JSON schema) is
// translated into one, and Automaton::make() compiles it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace thimble::grammar {

// Both ends are included.
struct CodeRange {
  uint32_t first, last;

  bool operator==(const CodeRange&) const = default;
};
using CodeSet = std::vector<CodeRange>;

inline constexpr uint32_t kLastCode = 0x10FFFF;

// Sorts and joins the ranges, and leaves out surrogates, which UTF-8 cannot hold.
CodeSet normal(CodeSet set);
// Every code point that is not in the set.
CodeSet complement(const CodeSet& set);
CodeSet intersection(const CodeSet& a, const CodeSet& b);

// An expression of a Syntax, by number.
using Expr = uint32_t;

// What stands for a control token in a text: a byte that UTF-8 does not have, and the token's number.
inline constexpr char kControlByte = '\xFF';
inline constexpr uint32_t kLargestControl = 0xFFFFFF;
std::string control_bytes(int32_t token);

// A number of repetitions without limit.
inline constexpr uint32_t kUnbounded = UINT32_MAX;

class Syntax {
 public:
  enum class Kind : uint8_t { kLiteral, kSet, kSequence, kChoice, kRepeat, kRule };
  struct Node {
    Kind kind = Kind::kLiteral;
    std::string bytes;          // kLiteral
    CodeSet set;                // kSet: normal
    std::vector<Expr> parts;    // kSequence, kChoice; kRepeat: one
    uint32_t min = 0, max = 0;  // kRepeat
    uint32_t rule = 0;          // kRule
  };
  struct Rule {
    std::string name;  // for error messages
    Expr body = 0;
    bool defined = false;
  };

  // The text itself. The empty text matches nothing but the end.
  Expr literal(std::string_view bytes);
  Expr empty() { return literal({}); }
  // One code point of the set. An empty set matches nothing, so its expression can never be completed.
  Expr set(CodeSet set);
  Expr sequence(std::vector<Expr> parts);
  // One of the parts. Without parts, it can never be completed.
  Expr choice(std::vector<Expr> parts);
  Expr repeat(Expr part, uint32_t min, uint32_t max);
  // A control token, at most kLargestControl.
  Expr control(int32_t token);
  Expr optional(Expr part) { return repeat(part, 0, 1); }
  Expr rule(uint32_t rule);

  uint32_t add_rule(std::string name);
  void define(uint32_t rule, Expr body);
  // The rule that the whole text must match.
  void set_root(uint32_t rule) { root_ = rule; }

  const Node& operator[](Expr e) const { return nodes_[e]; }
  const std::vector<Rule>& rules() const { return rules_; }
  uint32_t root() const { return root_; }
  // The control tokens that the grammar names.
  const std::vector<int32_t>& controls() const { return controls_; }
  size_t size() const { return nodes_.size(); }
  // Whether so many expressions were made that the grammar must be refused.
  bool too_large() const { return nodes_.size() > kMostNodes; }
  static Status too_large_error();

 private:
  static constexpr size_t kMostNodes = 1 << 19;

  Expr add(Node node);

  std::vector<Node> nodes_;
  std::vector<Rule> rules_;
  std::vector<int32_t> controls_;
  uint32_t root_ = 0;
};

}  // namespace thimble::grammar
