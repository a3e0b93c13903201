// Any bytes as another program's tensor file: they are read or refused with one sentence, and no other memory
// is accessed.
#pragma once

#include <cstdlib>

#include "gguf/import/foreign.h"
#include "tests/support/gguf_writer.h"

namespace thimble {

template <typename Read>
void read_foreign(const uint8_t* data, size_t size, const Read& read) {
  FileBytes bytes;  // exactly as long as the input
  append(bytes, data, size);
  bytes.shrink_to_fit();
  const auto tensors = read(bytes, "fuzz");
  if (!tensors.ok()) {
    if (tensors.status().message().empty()) std::abort();
    return;
  }
  static volatile uint64_t sum = 0;  // sum of all bytes read, so that no read is optimised away
  for (const ForeignTensor& tensor : *tensors)
    for (uint64_t i = 0; i < tensor.bytes; ++i) sum = sum + static_cast<uint64_t>(tensor.data[i]);
}

}  // namespace thimble
