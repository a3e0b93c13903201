// Tests how answers are scored.
#include "apps/score.h"

#include <gtest/gtest.h>

namespace app {
namespace {

TEST(Score, ComparesWithoutCaseWhiteSpaceAndDigitMarks) {
  EXPECT_EQ(share_found("It is 1,234,567.", {"1234567"}), 1);
  EXPECT_EQ(share_found("1'234'567 or 1\u2019234\u2019567", {"1234567"}), 1);
  EXPECT_EQ(share_found("1 234\u2009567, 1\u202F234\u00A0567", {"1234567"}), 1);
  EXPECT_EQ(share_found("7", {"1_234_567"}), 0);
  EXPECT_EQ(share_found("1234567", {"1_234_567"}), 1);
  EXPECT_EQ(share_found("the AMBER  Lantern\n", {"amber lantern"}), 1);
}

TEST(Score, KeepsMarksThatGroupNoDigits) {
  EXPECT_EQ(comparable("a,b 1, x2' _3,"), "a,b1,x2'_3,");
  EXPECT_EQ(share_found("ABC", {"a_c"}), 0);
}

TEST(Score, IsTheShareThatIsFound) {
  EXPECT_EQ(share_found("one and three", {"one", "two", "three", "four"}), 0.5);
  EXPECT_EQ(share_found("", {"one"}), 0);
}

TEST(Score, HasAStandardErrorWithOneRightAndOneWrongScoreAdded) {
  Mean right;
  EXPECT_EQ(right.mean(), 0);
  for (int i = 0; i < 8; ++i) right.add(1);
  EXPECT_EQ(right.mean(), 1);
  EXPECT_NEAR(right.standard_error(), std::sqrt(0.9 * 0.1 / 10), 1e-12);  // (8 + 1) / (8 + 2) right
  Mean halves;  // with 0 and 1 added: variance (2 * 0.25) / 4 around 0.5
  halves.add(0.5);
  halves.add(0.5);
  EXPECT_NEAR(halves.standard_error(), std::sqrt(0.125 / 4), 1e-12);
}

}  // namespace
}  // namespace app
