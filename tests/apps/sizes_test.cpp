// Tests byte sizes as people write them.
#include "apps/sizes.h"

#include <gtest/gtest.h>

namespace app {

TEST(Sizes, ReadsDecimalAndBinaryUnits) {
  EXPECT_EQ(parse_size("1"), 1u);
  EXPECT_EQ(parse_size("4096"), 4096u);
  EXPECT_EQ(parse_size("12B"), 12u);
  EXPECT_EQ(parse_size("3KB"), 3000u);
  EXPECT_EQ(parse_size("3KiB"), 3072u);
  EXPECT_EQ(parse_size("64MiB"), uint64_t{64} << 20);
  EXPECT_EQ(parse_size("8GB"), uint64_t{8000000000});
  EXPECT_EQ(parse_size("1.5GiB"), uint64_t{3} << 29);
  EXPECT_EQ(parse_size("2TiB"), uint64_t{2} << 40);
}

TEST(Sizes, IgnoresCaseAndOneBlankBeforeTheUnit) {
  EXPECT_EQ(parse_size("64mib"), uint64_t{64} << 20);
  EXPECT_EQ(parse_size("64 MiB"), uint64_t{64} << 20);
}

TEST(Sizes, RefusesOtherText) {
  for (const char* text : {"", "MiB", "64M", "64G", "64Mi", "-1", "-1MiB", "+1", "1.5", "1.5B", "1..5GiB",
                           "1e9", "0x10", "0", "0GiB", "64MiB extra", "64 M i B", "nan", "99999999999TiB"}) {
    EXPECT_FALSE(parse_size(text).has_value()) << text;
  }
}

TEST(Sizes, WritesSizesAndCountsForPeople) {
  EXPECT_EQ(format_size(0), "0 B");
  EXPECT_EQ(format_size(1023), "1023 B");
  EXPECT_EQ(format_size(64 << 20), "64.0 MiB");
  EXPECT_EQ(format_size(uint64_t{3} << 29), "1.5 GiB");
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(1000), "1,000");
  EXPECT_EQ(format_count(57004), "57,004");
  EXPECT_EQ(format_count(1234567), "1,234,567");
}

}  // namespace app
