// Tests what bindings in other languages read from the header and look up in the shared library.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "tests/support/data.h"
#include "thimble/thimble.h"

namespace thimble {
namespace {

std::string source(const char* name) {
  std::ifstream file(project_file(name));
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}
std::string header() { return source("include/thimble/thimble.h"); }

// All matches of a pattern in the header, or of its first group if it has one.
std::set<std::string> find_all(const std::string& text, const char* pattern) {
  const std::regex regex(pattern);
  std::set<std::string> found;
  for (std::sregex_iterator it(text.begin(), text.end(), regex), end; it != end; ++it)
    found.insert((*it)[(*it).size() > 1 ? 1 : 0]);
  return found;
}

TEST(Header, NamesOnlyFunctionsThatTheLibraryExports) {
  ASSERT_NE(thimble_version(), nullptr);  // so that the library is linked
  const std::set<std::string> functions = find_all(header(), R"(\b(thimble_\w+)\()");
  EXPECT_GT(functions.size(), 45u);
  for (const std::string& name : functions) EXPECT_TRUE(dlsym(RTLD_DEFAULT, name.c_str())) << name;
  EXPECT_FALSE(dlsym(RTLD_DEFAULT, "thimble_no_such_function"));
}

TEST(Header, UsesTypesOfFixedWidthAndTwoStandardHeaders) {
  const std::string text = std::regex_replace(header(), std::regex(R"(/\*[\s\S]*?\*/)"), "");
  EXPECT_EQ(find_all(text, R"(#include <\w+\.h>)"),
            (std::set<std::string>{"#include <stddef.h>", "#include <stdint.h>"}));
  for (const char* type :
       {R"(\bsize_t\b)", R"(\blong\b)", R"(\bint\b)", R"(\bunsigned\b)", R"(\bbool\b)", R"(: \d+;)"})
    EXPECT_TRUE(find_all(text, type).empty()) << type;
}

TEST(Header, HasOnlyConstantsThatTheLayoutTestPins) {
  const std::set<std::string> pinned =
      find_all(source("tests/capi/layout_test.cpp"), R"(EXPECT_EQ\((THIMBLE_\w+), )");
  const std::set<std::string> constants = find_all(header(), R"(\b(THIMBLE_[A-Z0-9_]+) = -?\d)");
  EXPECT_GT(constants.size(), 40u);
  for (const std::string& name : constants) EXPECT_TRUE(pinned.contains(name)) << name;
}

}  // namespace
}  // namespace thimble
