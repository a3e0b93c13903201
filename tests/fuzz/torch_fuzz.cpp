#include "gguf/import/torch_file.h"
#include "tests/fuzz/foreign.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  thimble::read_foreign(data, size, thimble::read_torch_file);
  return 0;
}
