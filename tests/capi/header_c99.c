/* The header stands alone in C99, and twice. */
#include "thimble/thimble.h"
#include "thimble/thimble.h" /* NOLINT: on purpose */

/* Layouts are part of the ABI: a struct without a hole is the same in every compiler. */
typedef char thimble_error_has_no_holes[sizeof(thimble_error) == 512 ? 1 : -1];

const char* header_c99(void);
const char* header_c99(void) { return thimble_version(); }
