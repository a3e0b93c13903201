// Errors as values: codes, messages, and the macros that forward them.
#include "base/status.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>

namespace thimble {
namespace {

TEST(Status, IsOkUntilItHoldsAnError) {
  EXPECT_TRUE(Status().ok());
  EXPECT_EQ(Status().message(), "");
  const Status status = error(Code::kFormat, "%s: version %u", "m.gguf", 2u);
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.code(), Code::kFormat);
  EXPECT_EQ(status.message(), "m.gguf: version 2");
}

TEST(Status, TruncatesLongMessages) {
  const Status status = error(Code::kIo, "%s", std::string(100000, 'x').c_str());
  EXPECT_GT(status.message().size(), 400u);
  EXPECT_LT(status.message().size(), 1000u);
}

TEST(Status, HasANameAndATextForEveryCode) {
  std::set<std::string> names, texts;
#define X(name, c_name, value, text)                 \
  EXPECT_STREQ(code_name(Code::k##name), #c_name);   \
  EXPECT_STREQ(code_text(Code::k##name), text);      \
  EXPECT_EQ(static_cast<int>(Code::k##name), value); \
  names.insert(#c_name);                             \
  texts.insert(text);
  THIMBLE_STATUS_CODES(X)
#undef X
  EXPECT_EQ(names.size(), texts.size());
  EXPECT_STREQ(code_name(static_cast<Code>(12345)), "UNKNOWN");
}

Result<std::unique_ptr<int>> half(int n) {
  if (n % 2 != 0) return error(Code::kInvalidArgument, "%d is odd", n);
  return std::make_unique<int>(n / 2);
}

Result<int> quarter(int n) {
  THIMBLE_LET(once, half(n));
  THIMBLE_LET(twice, half(*once));
  return *twice;
}

Status check_quarter(int n, bool& reached) {
  THIMBLE_TRY(quarter(n));
  reached = true;
  return {};
}

TEST(Status, IsForwardedByLetAndTry) {
  EXPECT_EQ(*quarter(12), 3);
  EXPECT_EQ(quarter(7).status().message(), "7 is odd");
  EXPECT_EQ(quarter(6).status().message(), "3 is odd");
  bool reached = false;
  EXPECT_EQ(check_quarter(6, reached).code(), Code::kInvalidArgument);
  EXPECT_FALSE(reached);
  EXPECT_TRUE(check_quarter(8, reached).ok());
  EXPECT_TRUE(reached);
}

}  // namespace
}  // namespace thimble
