// A table of builtins, searched by name.
#pragma once

#include <algorithm>
#include <iterator>

#include "templates/jinja/builtins.h"

namespace thimble::jinja {

template <size_t n>
const Builtin* find_in(const Builtin (&table)[n], std::string_view name) {
  const auto found =
      std::find_if(std::begin(table), std::end(table), [&](const Builtin& b) { return name == b.name; });
  return found == std::end(table) ? nullptr : found;
}

}  // namespace thimble::jinja
