// The header compiles alone in C++11, also if it is included twice.
#include "thimble/thimble.h"
#include "thimble/thimble.h"  // NOLINT: on purpose

static_assert(sizeof(thimble_error) == 512, "thimble_error has no holes");
static_assert(sizeof(thimble_status) == 4, "status codes are 32 bits wide");

const char* header_cpp11();
const char* header_cpp11() { return thimble_version(); }
