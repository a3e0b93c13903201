#include "base/dtype.h"

namespace thimble {

constexpr DTypeInfo kTypes[] = {
    {DType::kF32, "f32", 1, 4},       {DType::kF16, "f16", 1, 2},       {DType::kBF16, "bf16", 1, 2},
    {DType::kQ8_0, "q8_0", 32, 34},   {DType::kQ4_0, "q4_0", 32, 18},   {DType::kQ4_1, "q4_1", 32, 20},
    {DType::kQ5_0, "q5_0", 32, 22},   {DType::kQ5_1, "q5_1", 32, 24},   {DType::kQ4_K, "q4_K", 256, 144},
    {DType::kQ5_K, "q5_K", 256, 176}, {DType::kQ6_K, "q6_K", 256, 210},
};

const DTypeInfo* find_dtype(uint32_t gguf_type) {
  for (const DTypeInfo& info : kTypes)
    if (static_cast<uint32_t>(info.type) == gguf_type) return &info;
  return nullptr;
}

const DTypeInfo& dtype_info(DType type) { return *find_dtype(static_cast<uint32_t>(type)); }

const char* gguf_type_name(uint32_t gguf_type) {
  static constexpr const char* kNames[] = {
      "f32",   "f16",        "q4_0",       "q4_1",       "q4_2",     "q4_3",     "q5_0",
      "q5_1",  "q8_0",       "q8_1",       "q2_K",       "q3_K",     "q4_K",     "q5_K",
      "q6_K",  "q8_K",       "iq2_xxs",    "iq2_xs",     "iq3_xxs",  "iq1_s",    "iq4_nl",
      "iq3_s", "iq2_s",      "iq4_xs",     "i8",         "i16",      "i32",      "i64",
      "f64",   "iq1_m",      "bf16",       "q4_0_4_4",   "q4_0_4_8", "q4_0_8_8", "tq1_0",
      "tq2_0", "iq4_nl_4_4", "iq4_nl_4_8", "iq4_nl_8_8", "mxfp4",    "nvfp4"};
  return gguf_type < sizeof kNames / sizeof *kNames ? kNames[gguf_type] : "unknown";
}

}  // namespace thimble
