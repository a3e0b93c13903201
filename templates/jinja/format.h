// Formats values as Python does: "%05.1f" % x and "{:>8}".format(x).
#pragma once

#include <string_view>

#include "templates/jinja/builtins.h"

namespace thimble::jinja {

// format % values. `values` is a tuple, a dict for %(name)s, or a single value. Texts are escaped if the
// format is markup.
Result<Value> percent_format(Heap& heap, const Text& format, const Value& values);

// format.format(*rest, **keywords) of a call.
Result<Value> brace_format(Call& call, const Text& format);

// round(number, digits): to nearest; ties go to the even digit.
double rounded(double number, int64_t digits);

}  // namespace thimble::jinja
