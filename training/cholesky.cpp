#include "training/cholesky.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "base/bits.h"

namespace thimble {
namespace {

constexpr uint32_t kPanel = 64;  // columns that are factorised before the columns to their right are updated
constexpr uint32_t kGroup = 4;   // rows whose panel columns are packed together: [column][row]
constexpr uint32_t kGroupsOfItem = 8;  // the packed rows of one work item fit into the L1 cache
constexpr uint32_t kPacked = kPanel * kGroup;

// The submatrix from row and column `first` on, which is still to be factorised.
struct Rest {
  double* a;
  uint64_t n, first;

  double* row(uint64_t i) const { return a + (first + i) * n + first; }
  uint32_t rows() const { return static_cast<uint32_t>(n - first); }
};

bool factorise_corner(const Rest& rest, uint32_t width) {
  for (uint32_t j = 0; j < width; ++j) {
    double* of_j = rest.row(j);
    const double square = of_j[j] - std::inner_product(of_j, of_j + j, of_j, 0.0);
    if (!(square > 0)) return false;
    of_j[j] = std::sqrt(square);
    for (uint32_t i = j + 1; i < width; ++i) {
      double* of_i = rest.row(i);
      of_i[j] = (of_i[j] - std::inner_product(of_i, of_i + j, of_j, 0.0)) / of_j[j];
    }
  }
  return true;
}

// Computes the panel's columns of the factor for rows below its corner, and a packed copy, [kPanel][kGroup].
// The packed copy has zeros for missing rows.
void factorise_rows(const Rest& rest, uint64_t first_row, uint32_t rows, double* packed) {
  std::fill_n(packed, kPacked, 0.0);
  for (uint32_t j = 0; j < kPanel; ++j) {
    double* column = packed + uint64_t(j) * kGroup;
    for (uint32_t r = 0; r < rows; ++r) column[r] = rest.row(first_row + r)[j];
    const double* of_j = rest.row(j);
    for (uint32_t k = 0; k < j; ++k)
      for (uint32_t r = 0; r < kGroup; ++r) column[r] -= packed[k * kGroup + r] * of_j[k];
    for (uint32_t r = 0; r < kGroup; ++r) column[r] /= of_j[j];
    for (uint32_t r = 0; r < rows; ++r) rest.row(first_row + r)[j] = column[r];
  }
}

// sums[r][c]: the products of the rows of two groups. The sixteen sums are independent, so the processor can
// compute them in parallel.
void multiply(const double* x, const double* y, double (&sums)[kGroup][kGroup]) {
  for (auto& row : sums) std::fill_n(row, kGroup, 0.0);
  for (uint32_t k = 0; k < kPacked; k += kGroup)
    for (uint32_t r = 0; r < kGroup; ++r)
      for (uint32_t c = 0; c < kGroup; ++c) sums[r][c] += x[k + r] * y[k + c];
}

// Subtracts the panel's products from a few groups of rows, up to the diagonal.
void update_rows(const Rest& rest, const double* packed, uint32_t first_group, uint32_t groups) {
  const uint32_t below = rest.rows() - kPanel;
  for (uint32_t right = 0; right < first_group + groups; ++right)
    for (uint32_t left = std::max(first_group, right); left < first_group + groups; ++left) {
      double sums[kGroup][kGroup];
      multiply(packed + uint64_t(left) * kPacked, packed + uint64_t(right) * kPacked, sums);
      const uint32_t row = left * kGroup, column = right * kGroup;
      for (uint32_t r = 0; r < std::min(kGroup, below - row); ++r)
        for (uint32_t c = 0; c < std::min(kGroup, below - column); ++c)
          rest.row(kPanel + row + r)[kPanel + column + c] -= sums[r][c];
    }
}

}  // namespace

bool factorise(std::span<double> a, uint32_t n, ThreadPool& threads) {
  std::vector<double> packed(ceil_div(n, kGroup) * kPacked);
  for (uint32_t first = 0; first < n; first += kPanel) {
    const Rest rest{a.data(), n, first};
    if (!factorise_corner(rest, std::min(kPanel, rest.rows()))) return false;
    if (rest.rows() <= kPanel) break;
    const uint32_t below = rest.rows() - kPanel, groups = static_cast<uint32_t>(ceil_div(below, kGroup)),
                   items = static_cast<uint32_t>(ceil_div(groups, kGroupsOfItem));
    const auto groups_of = [&](uint32_t item) {
      return std::min(kGroupsOfItem, groups - item * kGroupsOfItem);
    };
    threads.run(items, [&](uint32_t item, uint32_t) {
      for (uint32_t i = 0; i < groups_of(item); ++i) {
        const uint32_t group = item * kGroupsOfItem + i, row = group * kGroup;
        factorise_rows(rest, kPanel + row, std::min(kGroup, below - row), &packed[uint64_t(group) * kPacked]);
      }
    });
    threads.run(items, [&](uint32_t item, uint32_t) {
      update_rows(rest, packed.data(), item * kGroupsOfItem, groups_of(item));
    });
  }
  return true;
}

// Both passes read the factor row by row, because its rows are contiguous in memory.
void solve(std::span<const double> factor, uint32_t n, double* b) {
  for (uint32_t i = 0; i < n; ++i) {
    const double* row = &factor[uint64_t(i) * n];
    b[i] = (b[i] - std::inner_product(b, b + i, row, 0.0)) / row[i];
  }
  for (uint32_t i = n; i-- > 0;) {
    const double* row = &factor[uint64_t(i) * n];
    b[i] /= row[i];
    for (uint32_t j = 0; j < i; ++j) b[j] -= row[j] * b[i];
  }
}

}  // namespace thimble
