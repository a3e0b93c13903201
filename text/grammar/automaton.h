// A grammar compiled to an automaton over bytes with a stack: nodes that read bytes, and nodes that choose,
// call a rule, count repetitions or return without reading.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "text/grammar/syntax.h"

namespace thimble::grammar {

class Automaton {
 public:
  enum class Kind : uint8_t {
    kReturn,  // the rule, or the repeated body, is complete
    kBytes,   // reads a byte along one of the edges
    kSplit,   // goes to any of the targets
    kCall,    // runs the rule that begins at `first`, then goes to `next`
    kRepeat   // runs the body that begins at `first`, from `min` to `max` times, then goes to `next`
  };
  struct Node {
    Kind kind;
    uint32_t first = 0;  // kBytes: of its edges; kSplit: of its targets
    uint32_t count = 0;  // of edges or targets
    uint32_t next = 0;
    uint32_t min = 0, max = 0;
    uint32_t need = 0;  // stack frames that are needed to return from here, at the least
  };
  struct Edge {
    uint8_t first, last;
    uint32_t next;
  };

  // The largest number of calls and repetitions that may be open at a time. Text that needs more is not
  // allowed. Every text that is allowed can be completed within this depth.
  static constexpr uint32_t kDeepest = 1024;
  static constexpr uint32_t kReturn = 0;  // the node of this kind

  // Refuses a grammar that is too large, that has left recursion, or in which a rule can never be completed.
  static Result<Automaton> make(const Syntax& syntax);

  const Node& operator[](uint32_t node) const { return nodes_[node]; }
  std::span<const Edge> edges(const Node& n) const { return std::span(edges_).subspan(n.first, n.count); }
  std::span<const uint32_t> targets(const Node& n) const {
    return std::span(targets_).subspan(n.first, n.count);
  }
  uint32_t start() const { return start_; }
  uint64_t host_bytes() const {
    return nodes_.capacity() * sizeof(Node) + edges_.capacity() * sizeof(Edge) +
           targets_.capacity() * sizeof(uint32_t);
  }

 private:
  friend class AutomatonBuilder;

  std::vector<Node> nodes_;
  std::vector<Edge> edges_;
  std::vector<uint32_t> targets_;
  uint32_t start_ = 0;
};

}  // namespace thimble::grammar
