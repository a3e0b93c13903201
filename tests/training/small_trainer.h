// A model for which training takes a second: seeded weights, and a vocabulary of bytes.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "tests/support/byte_vocabulary.h"
#include "tests/support/seeded_model.h"
#include "tests/support/sessions.h"
#include "training/trainer.h"

namespace thimble::test {

// `chat`: with the chat format chatml.
inline Seeded bytes_model(bool chat) {
  Seeded s;
  s.vocab = 262;
  s.more = [chat](GgufWriter& w) {
    set_byte_vocabulary(w, {"<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "\u2581"},
                        {2, 3, 3, 3, 3, 1}, chat ? 4u : 2u);
    w.set("tokenizer.ggml.add_bos_token", true).set("tokenizer.ggml.add_space_prefix", false);
    if (chat)
      w.set("tokenizer.chat_template",
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}");
  };
  return s;
}

// A folder of this process that is removed at the end of the test.
struct Folder {
  Folder() { std::filesystem::create_directories(path); }
  ~Folder() { std::filesystem::remove_all(path); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string file(const std::string& name) const { return (path / name).string(); }
  std::string written(const std::string& name, const std::string& text) const {
    std::ofstream(file(name), std::ios::binary) << text;
    return file(name);
  }
  std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("thimble-training-" + std::to_string(getpid()));
};

inline std::string contents_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Enough sentences for texts of 1024 bytes.
inline std::string some_book(uint32_t sentences = 400) {
  Random random{3};
  std::string book;
  for (uint32_t i = 0; i < sentences; ++i) {
    for (uint32_t word = 0; word < 7; ++word) {
      for (uint32_t c = 1 + random.below(8); c; --c) book += static_cast<char>('a' + random.below(26));
      book += word == 6 ? ". " : " ";
    }
  }
  return book;
}

}  // namespace thimble::test
