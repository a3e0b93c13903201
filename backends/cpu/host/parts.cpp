#include "backends/cpu/host/parts.h"

#include <algorithm>
#include <cmath>

#include "backends/cpu/kernels.h"

namespace thimble::cpu {
namespace {

// A low estimate of the bytes that a core reads per second. If it is too low, parts become shorter.
constexpr double kBytesPerSecond = 10e9;

// An upper estimate of the time that one core takes for an op with so many rows. It is 0 if that is short, or
// if the op does not support shares.
struct Seconds {
  double rows;

  double products(const Weight& w, double vectors, double matrices) const {
    const double size = double(w.rows) * w.cols, all = double(dtype_bytes(w.type, w.cols)) * w.rows;
    return std::max(2 * vectors * size / kernels().flop_per_second, matrices * all / kBytesPerSecond);
  }
  // A token uses `chosen` of `all` matrices, which are contiguous in W.
  double experts(const Weight& w, double all, double chosen) const {
    return products(w, rows * chosen / all, std::min(1.0, rows * chosen / all));
  }
  // Queries of so many heads times keys, and weights times values. It runs at half the rate of matrix
  // products.
  double attending(double heads, double group, double head_dim, double entries) const {
    return 4 * rows * heads * group * head_dim * entries / kernels().flop_per_second;
  }

  template <typename T>
  double operator()(const T&) const {
    return 0;
  }
  double operator()(const Linear& o) const {
    return products(o.w, o.p.rows == kLogitRows ? std::min<double>(rows, kMostLogitRows) : rows, 1);
  }
  double operator()(const HeadLinear& o) const {
    const double size = double(o.p.heads) * o.p.in_cols * o.p.out_cols;
    return 2 * rows * size / kernels().flop_per_second;
  }
  double operator()(const LiftView& o) const {
    const double size = double(o.p.heads) * o.p.latent * (o.p.key_cols + o.p.value_cols);
    return 2 * o.p.view_capacity * size / kernels().flop_per_second;
  }
  double operator()(const Glu& o) const { return products(o.gate, rows, 1) + products(o.up, rows, 1); }
  double operator()(const ExpertGlu& o) const {
    return (o.gate ? experts(o.gate, o.p.experts, o.p.chosen) : 0) + experts(o.up, o.p.experts, o.p.chosen);
  }
  double operator()(const ExpertLinear& o) const { return experts(o.w, o.p.experts, o.p.chosen); }
  double operator()(const KvView& o) const {
    const double elements = 2.0 * o.p.heads * o.p.view_capacity * o.p.head_dim;
    return elements * (sizeof(uint16_t) + sizeof(float)) / kBytesPerSecond;
  }
  double operator()(const Attention& o) const {
    if (o.p.source != kFromView) return 0;
    const double seen =
        o.p.window ? std::min<double>(o.p.window + rows, o.p.view_capacity) : o.p.view_capacity;
    return 2 * attending(o.p.heads, o.p.group, o.p.head_dim, seen);
  }
  // A step seldom reads so many pages; the limit keeps the list of parts short.
  double operator()(const AttendAll& o) const {
    constexpr double kMostEntries = 1 << 16;
    if (!o.chunk_k) return 0;
    const double stored = double(o.p.page_capacity) * kStoredPage;
    return 2 * attending(o.p.heads, o.p.group, o.p.head_dim, std::min(stored, kMostEntries));
  }
  // The chunk form, at half the rate of matrix products.
  double operator()(const DeltaNet& o) const {
    return 2 * rows * o.p.value_heads * 8 * o.p.width * o.p.width / kernels().flop_per_second;
  }
  double operator()(const Ssm& o) const {
    return 2 * rows * o.p.heads * 5 * o.p.width * o.p.state / kernels().flop_per_second;
  }
  // Each product is computed once for the sums and once for the weights.
  double operator()(const QueryScore& o) const {
    if (o.p.kind != kQueryRows) return 0;
    return 2 * attending(o.p.heads, o.p.group, o.p.head_dim, o.p.sinks + 2 * rows);
  }
};

}  // namespace

std::vector<Part> parts_of(const std::vector<Op>& ops, uint32_t rows, double seconds) {
  std::vector<Part> parts;
  uint32_t first = 0;
  double sum = 0;
  const auto end_part = [&](uint32_t last) {
    if (first < last) parts.push_back({first, last, {}});
    first = last;
    sum = 0;
  };
  for (uint32_t i = 0; i < ops.size(); ++i) {
    const double cost = std::visit(Seconds{double(rows)}, ops[i]);
    if (sum + cost > seconds) end_part(i);
    sum += cost;
    if (cost <= seconds) continue;
    const auto shares = static_cast<uint32_t>(std::ceil(cost / seconds));
    for (uint32_t share = 0; share < shares; ++share) parts.push_back({i, i + 1, {share, shares}});
    first = i + 1;
    sum = 0;
  }
  end_part(static_cast<uint32_t>(ops.size()));
  if (parts.empty()) parts.emplace_back();
  return parts;
}

}  // namespace thimble::cpu
