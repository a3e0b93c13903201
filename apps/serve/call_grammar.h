// Makes grammars of tool calls in the formats of the model families, so that the arguments of a call meet the
// tool's schema in whatever format the model writes it.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "apps/serve/calls.h"

namespace app::serve {

struct CallRules {
  bool all = false;      // the arguments of every tool must meet its schema; else those of strict tools
  bool several = false;  // more than one call may be made
  // The expression of a mark in a grammar: its text, or its token if it is a control token.
  std::function<std::string(std::string_view)> spell;
  // The style is that of the chat template. A strict tool that cannot be written in it is refused; in another
  // style its arguments are not checked.
  bool native = true;
};

// The grammar, in llama.cpp's notation, of what comes after the opening mark of a style's format. Returns ""
// if calls of this style are in JSON whose members are not known, for which there is call_schema(), and if
// the arguments of every tool must meet its schema and one cannot be written in this style.
std::string call_grammar(const CallStyle& style, const Json& tools, const CallRules& rules);

// The JSON schema of a call {"name": ..., "arguments": {...}} of one of the tools. `only`: the name of the
// tool; "": any. `all`: the arguments of every tool must meet its schema; else only those of tools that are
// strict.
Json call_schema(const Json& tools, std::string_view only, bool all);
// Whether the arguments of a tool must meet its schema.
bool is_strict(const Json& tool);
// The JSON schema of a tool's arguments.
Json arguments_schema(const Json& tool);

}  // namespace app::serve
