#include "gguf/import/safetensors.h"
#include "tests/fuzz/foreign.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  thimble::read_foreign(data, size, thimble::read_safetensors);
  return 0;
}
