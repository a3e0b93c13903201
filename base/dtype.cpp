#include "base/dtype.h"

namespace thimble {

static constexpr const char* kNames[] = {
    "f32",      "f16",      "q4_0",    "q4_1",  "q4_2",       "q4_3",       "q5_0",       "q5_1",
    "q8_0",     "q8_1",     "q2_K",    "q3_K",  "q4_K",       "q5_K",       "q6_K",       "q8_K",
    "iq2_xxs",  "iq2_xs",   "iq3_xxs", "iq1_s", "iq4_nl",     "iq3_s",      "iq2_s",      "iq4_xs",
    "i8",       "i16",      "i32",     "i64",   "f64",        "iq1_m",      "bf16",       "q4_0_4_4",
    "q4_0_4_8", "q4_0_8_8", "tq1_0",   "tq2_0", "iq4_nl_4_4", "iq4_nl_4_8", "iq4_nl_8_8", "mxfp4",
    "nvfp4",    "q1_0",     "q2_0"};

#define X(name, number, block, bytes) {DType::k##name, kNames[number], block, bytes},
static constexpr DTypeInfo kTypes[] = {THIMBLE_DTYPES(X)};
#undef X

const char* gguf_type_name(uint32_t gguf_type) {
  return gguf_type < sizeof kNames / sizeof *kNames ? kNames[gguf_type] : "unknown";
}

const DTypeInfo* find_dtype(uint32_t gguf_type) {
  for (const DTypeInfo& info : kTypes)
    if (static_cast<uint32_t>(info.type) == gguf_type) return &info;
  return nullptr;
}

const DTypeInfo& dtype_info(DType type) { return *find_dtype(static_cast<uint32_t>(type)); }

}  // namespace thimble
