// Values written by a layout: "%05.1f" % x and "{:>8}".format(x), as Python does.
#pragma once

#include <string_view>

#include "templates/jinja/builtins.h"

namespace thimble::jinja {

// format % values: a tuple's elements, a dict's by %(name)s, or the one value. Texts are escaped where the
// format is markup.
Result<Value> percent_format(Heap& heap, const Text& format, const Value& values);

// format.format(*rest, **keywords) of a call.
Result<Value> brace_format(Call& call, const Text& format);

// round(number, digits): to the nearest, of two as near the even one.
double rounded(double number, int64_t digits);

}  // namespace thimble::jinja
