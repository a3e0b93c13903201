// The ops of the CPU backend, one function and one file each.
#pragma once

#include <cstddef>
#include <span>

#include "backends/backend.h"
#include "base/thread_pool.h"

namespace thimble::cpu {

// A share of an op's work. The work consists of items, which are divided evenly among `of` shares. Running
// all shares one after the other gives the same bits as running the op at once.
struct Share {
  uint32_t index = 0, of = 1;
  uint32_t begin(uint32_t items) const { return static_cast<uint32_t>(uint64_t(items) * index / of); }
  uint32_t end(uint32_t items) const { return static_cast<uint32_t>(uint64_t(items) * (index + 1) / of); }
};

// The arguments of every op in addition to its operands: the step's values, the workers, and scratch memory
// that it owns until it returns.
struct Context {
  const StepParams& step;
  std::span<const HeadState> heads;
  ThreadPool& threads;
  std::span<std::byte> scratch;  // as large as needs() said, 64-byte aligned
  Share share = {};              // everything, except for ops that can take long (host/parts.cpp)
};

// Calls body(item, worker) for every item of the op's share.
template <typename Body>
void for_share(const Context& c, uint32_t items, const Body& body) {
  const uint32_t begin = c.share.begin(items);
  c.threads.run(c.share.end(items) - begin, [&](uint32_t i, uint32_t worker) { body(begin + i, worker); });
}

// The address of a view's first element.
template <typename T>
T* data(const View& v) {
  return reinterpret_cast<T*>(static_cast<std::byte*>(v.buffer->mapped) + v.offset);
}

// The rows that an op works on: `rows` is kStepRows or kLogitRows.
inline uint32_t row_count(const Context& c, uint rows) {
  return rows == kLogitRows ? c.step.n_logit_rows : c.step.n_rows;
}

// Calls body(row) for every row of `cols` elements, as many rows to an item as make it worth handing over
// (about 5 us).
template <typename Body>
void for_rows(const Context& c, uint32_t rows, uint32_t cols, const Body& body) {
  const uint32_t step = 1 + 16384 / (cols + 1);
  c.threads.run((rows + step - 1) / step, [&](uint32_t item, uint32_t) {
    for (uint32_t row = item * step; row < rows && row < (item + 1) * step; ++row) body(row);
  });
}

#define THIMBLE_DECLARE_OP(Type, name, backends) void name(const Context&, const Type&);
THIMBLE_OPS(THIMBLE_DECLARE_OP)
#undef THIMBLE_DECLARE_OP

}  // namespace thimble::cpu
