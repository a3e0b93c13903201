// Templates with Jinja2's output (tests/reference/chat_templates.py), to compare with our interpreter's
// output.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "templates/jinja/json.h"
#include "templates/jinja/template.h"

namespace thimble {

inline Result<std::string> render(const jinja::Template& compiled, const std::string& variables_json,
                                  const jinja::Limits& limits = {}) {
  constexpr int64_t kNow = 1741338302;  // NOW of chat_templates.py
  jinja::Heap heap(limits);
  THIMBLE_LET(variables, jinja::read_json(heap, variables_json, "the variables"));
  return compiled.render(heap, **jinja::as<jinja::Dict*>(variables), kNow);
}

inline Result<std::string> render(const std::string& source, const std::string& variables_json = "{}",
                                  const jinja::Limits& limits = {}) {
  THIMBLE_LET(compiled, jinja::Template::parse(source));
  return render(compiled, variables_json, limits);
}

struct CaseCounts {
  size_t templates = 0, rendered = 0, refused = 0;
};

// Expects the same text for each case that Jinja2 renders, and an error for each other case.
inline CaseCounts expect_as_jinja(const std::string& json) {
  using jinja::Value;
  CaseCounts counts;
  jinja::Heap heap(jinja::Limits{UINT64_MAX, UINT64_MAX, UINT64_MAX});
  const auto read = jinja::read_json(heap, json, "the cases");
  EXPECT_TRUE(read.ok()) << read.status().message();
  if (!read.ok()) return counts;
  const auto text = [](const Value& of, const char* key) {
    const Value* value = (*jinja::as<jinja::Dict*>(of))->find(key);
    return value ? jinja::as_text(*value) : nullptr;
  };
  for (const Value& group : (*jinja::as<jinja::List*>(*read))->items) {
    ++counts.templates;
    const auto compiled = jinja::Template::parse(*text(group, "source"));
    const Value& cases = *(*jinja::as<jinja::Dict*>(group))->find("cases");
    for (const Value& one : (*jinja::as<jinja::List*>(cases))->items) {
      SCOPED_TRACE(*text(group, "name") + ": " + *text(one, "name"));
      const auto ours = compiled.ok() ? render(*compiled, *text(one, "variables")) : compiled.status();
      if (const std::string* expected = text(one, "output")) {
        ++counts.rendered;
        EXPECT_TRUE(ours.ok()) << ours.status().message();
        if (ours.ok()) {
          EXPECT_EQ(*ours, *expected);
        }
      } else {
        ++counts.refused;
        EXPECT_FALSE(ours.ok()) << "Jinja2 says " << *text(one, "error") << ", and this came out:\n" << *ours;
      }
    }
  }
  return counts;
}

}  // namespace thimble
