// Templates with what Jinja2 makes of them (tests/reference/chat_templates.py), and what our machine does.
#pragma once

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "runtime/jinja/json.h"
#include "runtime/jinja/template.h"

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
  size_t rendered = 0, refused = 0;
};

// Expects the same text for every case that Jinja2 renders, and a refusal for every other one.
inline void expect_as_jinja(const nlohmann::ordered_json& groups, CaseCounts& counts) {
  for (const auto& group : groups) {
    const auto compiled = jinja::Template::parse(group["source"].get<std::string>());
    EXPECT_TRUE(compiled.ok()) << group["name"] << ": " << compiled.status().message();
    if (!compiled.ok()) continue;
    for (const auto& one : group["cases"]) {
      SCOPED_TRACE(group["name"].get<std::string>() + ": " + one["name"].get<std::string>());
      const auto text = render(*compiled, one["variables"].dump());
      if (one.contains("output")) {
        ++counts.rendered;
        EXPECT_TRUE(text.ok()) << text.status().message();
        if (text.ok()) EXPECT_EQ(*text, one["output"].get<std::string>());
      } else {
        ++counts.refused;
        EXPECT_FALSE(text.ok()) << "Jinja2 says " << one["error"] << ", and this came out:\n" << *text;
      }
    }
  }
}

}  // namespace thimble
