// Tensor types: names, block sizes, and types that are not supported.
#include "base/dtype.h"

#include <gtest/gtest.h>

#include <string>

namespace thimble {
namespace {

TEST(DType, KnowsBlocksAndBytesOfEverySupportedType) {
  const struct {
    uint32_t id;
    const char* name;
    uint32_t block,
        bytes;  // a scale of 2 bytes, possibly an offset of 2 more, and the bits of the elements
  } expected[] = {
      {0, "f32", 1, 4},
      {1, "f16", 1, 2},
      {30, "bf16", 1, 2},
      {2, "q4_0", 32, 2 + 16},
      {3, "q4_1", 32, 2 + 2 + 16},
      {6, "q5_0", 32, 2 + 4 + 16},
      {7, "q5_1", 32, 2 + 2 + 4 + 16},
      {8, "q8_0", 32, 2 + 32},
      {12, "q4_K", 256, 2 + 2 + 12 + 128},
      {13, "q5_K", 256, 2 + 2 + 12 + 32 + 128},
      {14, "q6_K", 256, 2 + 16 + 64 + 128},
      {10, "q2_K", 256, 2 + 2 + 16 + 64},
      {11, "q3_K", 256, 2 + 12 + 32 + 64},
      {20, "iq4_nl", 32, 2 + 16},
      {23, "iq4_xs", 256, 2 + 6 + 128},
      {39, "mxfp4", 32, 1 + 16},
      {21, "iq3_s", 256, 2 + 4 + 32 + 8 + 64},
      {18, "iq3_xxs", 256, 2 + 32 + 64},
      {22, "iq2_s", 256, 2 + 8 + 32 + 8 + 32},
      {17, "iq2_xs", 256, 2 + 8 + 64},
      {16, "iq2_xxs", 256, 2 + 64},
      {29, "iq1_m", 256, 8 + 16 + 32},
      {19, "iq1_s", 256, 2 + 16 + 32},
      {35, "tq2_0", 256, 2 + 64},
      {34, "tq1_0", 256, 2 + 4 + 48},
      {40, "nvfp4", 64, 4 + 32},
      {41, "q1_0", 128, 2 + 16},
      {42, "q2_0", 64, 2 + 16},
  };
  for (const auto& e : expected) {
    const DTypeInfo* info = find_dtype(e.id);
    ASSERT_NE(info, nullptr) << e.name;
    EXPECT_EQ(static_cast<uint32_t>(info->type), e.id);
    EXPECT_STREQ(info->name, e.name);
    EXPECT_STREQ(gguf_type_name(e.id), e.name);
    EXPECT_EQ(info->block, e.block) << e.name;
    EXPECT_EQ(info->block_bytes, e.bytes) << e.name;
    EXPECT_EQ(dtype_bytes(info->type, 3 * e.block), 3 * e.bytes) << e.name;
  }
}

TEST(DType, NamesTypesThatItCannotRead) {
  EXPECT_EQ(find_dtype(9), nullptr);
  EXPECT_STREQ(gguf_type_name(9), "q8_1");
  EXPECT_STREQ(gguf_type_name(28), "f64");
  EXPECT_EQ(find_dtype(43), nullptr);
  EXPECT_STREQ(gguf_type_name(43), "unknown");
  EXPECT_EQ(find_dtype(100000), nullptr);
  EXPECT_STREQ(gguf_type_name(100000), "unknown");
}

}  // namespace
}  // namespace thimble
