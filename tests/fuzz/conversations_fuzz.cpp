// Any bytes as lines of prompts and answers: they are read or refused.
#include "training/conversations.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  for (const thimble::NumberedLine& line : thimble::lines_of(text))
    static_cast<void>(thimble::read_conversation(line.text, "line").ok());
  return 0;
}
