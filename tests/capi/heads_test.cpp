// Tests importing a retainer and describing a heads file, through the C API.
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/capi/handles.h"
#include "tests/support/checkpoint_writer.h"

namespace thimble {
namespace {

namespace fs = std::filesystem;

std::string info_of(const std::string& path, const thimble_model* model) {
  Error e;
  uint64_t length = 0;
  EXPECT_EQ(thimble_heads_info(path.c_str(), model, nullptr, 0, &length, &e), THIMBLE_INVALID_ARGUMENT);
  std::string text(length, '\0');
  EXPECT_OK(thimble_heads_info(path.c_str(), model, text.data(), length, &length, &e), e);
  return text;
}

TEST(Heads, AreImportedAndDescribed) {
  const fs::path folder = fs::temp_directory_path() / ("thimble-capi-heads-" + std::to_string(getpid()));
  fs::create_directories(folder);
  const std::string input = (folder / "in").string(), output = (folder / "out.gguf").string();
  const SmallModel small;
  std::vector<CheckpointTensor> tensors;  // for small_model()'s two layers of width 8 with one KV head
  for (const std::string layer : {"layers.0.", "layers.1."}) {
    tensors.push_back({layer + "weight", {1, 8}, std::vector<float>(8, 0.5f)});
    tensors.push_back({layer + "bias", {1}, {0.25f}});
  }
  std::ofstream(input, std::ios::binary) << safetensors(tensors, "BF16");

  Error e;
  EXPECT_EQ(thimble_heads_import(small.model.get(), input.c_str(), "sink", output.c_str(), &e),
            THIMBLE_FORMAT);
  expect_sentence(e);
  EXPECT_OK(thimble_heads_import(small.model.get(), input.c_str(), nullptr, output.c_str(), &e), e);
  EXPECT_EQ(thimble_heads_import(small.model.get(), input.c_str(), nullptr, output.c_str(), &e), THIMBLE_IO);
  const std::string info = info_of(output, nullptr);
  EXPECT_NE(info.find("\"kind\": \"linear\""), info.npos) << info;
  EXPECT_EQ(info.find("\"fits\""), info.npos) << info;
  EXPECT_NE(info_of(output, small.model.get()).find("\"fits\": true"), info.npos);
  fs::remove_all(folder);
}

}  // namespace
}  // namespace thimble
