// On the CPU, matrices of experts without tokens are not read, so their pages of a mapped file need not be in
// memory. Here these pages are inaccessible: reading one ends the test with a signal.
#include <sys/mman.h>
#include <unistd.h>

#include "tests/ops/op_test.h"
#include "tests/ops/random_matrix.h"

namespace thimble::test {
namespace {

constexpr uint32_t kExperts = 8, kChosen = 2, kIn = 256, kOut = 512;  // whole pages of 4 KiB in every type

// The matrices of all experts, contiguous as in a file.
class MappedExperts {
 public:
  MappedExperts(Device& device, Random& random, DType type, uint32_t rows, uint32_t cols)
      : expert_bytes_(dtype_bytes(type, uint64_t(rows) * cols)), bytes_(kExperts * expert_bytes_) {
    memory_ = static_cast<std::byte*>(
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_NE(static_cast<void*>(memory_), MAP_FAILED);
    const std::vector<std::byte> blocks = random_blocks(random, type, uint64_t(kExperts) * rows * cols);
    std::copy(blocks.begin(), blocks.end(), memory_);
    auto buffer = device.import_host(memory_, bytes_);
    EXPECT_TRUE(buffer.ok()) << buffer.status().message();
    buffer_ = std::move(*buffer);
    static_cast<View&>(weight) = {buffer_.get(), 0, bytes_};
    weight.type = type, weight.rows = kExperts * rows, weight.cols = cols;
  }
  ~MappedExperts() { munmap(memory_, bytes_); }
  MappedExperts(const MappedExperts&) = delete;
  MappedExperts& operator=(const MappedExperts&) = delete;

  // Makes the pages that only this expert uses inaccessible.
  void forbid(uint32_t expert) {
    const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const uint64_t begin = (expert * expert_bytes_ + page - 1) / page * page,
                   end = (expert + 1) * expert_bytes_ / page * page;
    ASSERT_LT(begin, end);
    ASSERT_EQ(mprotect(memory_ + begin, end - begin, PROT_NONE), 0);
  }

  Weight weight;

 private:
  uint64_t expert_bytes_, bytes_;
  std::byte* memory_;
  std::unique_ptr<Buffer> buffer_;
};

class ExpertsWithoutTokens : public OpTest {};
INSTANTIATE_TEST_SUITE_P(On, ExpertsWithoutTokens, ::testing::Values("cpu"), device_test_name);

TEST_P(ExpertsWithoutTokens, AreNotRead) {
  for (const DType type : {DType::kF16, DType::kQ4_K, DType::kMXFP4})
    for (const uint32_t rows : {1u, 3u, 40u}) {
      SCOPED_TRACE(::testing::Message() << dtype_info(type).name << ", " << rows << " rows");
      clear();
      Random random{rows};
      ModelShape m = model;
      m.experts = kExperts, m.chosen_experts = kChosen, m.d_model = kIn, m.d_ff = kOut;
      SessionShape s = session;
      s.chunk = rows;
      size_for(m, s);
      // Every token goes to experts 2 and 5.
      const uint32_t slots = rows * kChosen;
      std::vector<uint32_t> first(kExperts + 1, 0), row_of_slot(slots);
      for (uint32_t e = 3; e <= kExperts; ++e) first[e] = e <= 5 ? rows : slots;
      for (uint32_t slot = 0; slot < slots; ++slot) row_of_slot[slot] = slot % rows;
      MappedExperts gate(device(), random, type, kOut, kIn), up(device(), random, type, kOut, kIn),
          down(device(), random, type, kIn, kOut);
      const std::vector<float> zeros(size_t(rows) * kIn);
      const View to = input(first), row = input(row_of_slot), h = output<float>(size_t(slots) * kOut),
                 y = inout(zeros);
      const ExpertGlu glu{
          input(random.floats(size_t(rows) * kIn)),
          gate.weight,
          up.weight,
          {},
          {},
          to,
          row,
          h,
          {.in_cols = kIn, .out_cols = kOut, .act = kActSilu, .experts = kExperts, .chosen = kChosen}};
      const ExpertLinear linear{
          h,   down.weight,
          {},  to,
          row, input(random.floats(slots, 0, 1)),
          y,   {.in_cols = kOut, .out_cols = kIn, .experts = kExperts, .chosen = kChosen}};
      const auto run_both = [&] {
        run({.n_rows = rows}, rows, [&](Recorder& r) {
          r.record(glu);
          r.record(linear);
        });
      };
      run_both();
      const std::vector<float> expected = get<float>(y);
      ASSERT_NE(expected, zeros);
      for (const uint32_t expert : {0u, 1u, 3u, 4u, 6u, 7u})
        for (MappedExperts* matrices : {&gate, &up, &down}) matrices->forbid(expert);
      put(y, zeros);
      run_both();
      EXPECT_EQ(get<float>(y), expected);
      if (HasFailure()) return;
    }
}

}  // namespace
}  // namespace thimble::test
