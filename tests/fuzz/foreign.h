// Any bytes as another program's file of tensors: they are read or refused in one sentence, and nothing
// outside them is touched.
#pragma once

#include <cstdlib>

#include "gguf/import/foreign.h"
#include "tests/support/gguf_writer.h"

namespace thimble {

template <typename Read>
void read_foreign(const uint8_t* data, size_t size, const Read& read) {
  FileBytes bytes;  // no byte longer than the input
  append(bytes, data, size);
  bytes.shrink_to_fit();
  const auto tensors = read(bytes, "fuzz");
  if (!tensors.ok()) {
    if (tensors.status().message().empty()) std::abort();
    return;
  }
  static volatile uint64_t sum = 0;  // of all that was read, so that no read is optimised away
  for (const ForeignTensor& tensor : *tensors)
    for (uint64_t i = 0; i < tensor.bytes; ++i) sum = sum + static_cast<uint64_t>(tensor.data[i]);
}

}  // namespace thimble
