// Any bytes as a model and as a retainer: they are read or refused, and no other memory is accessed.
#include <cstdlib>

#include "runtime/model/model.h"
#include "tests/support/tiny_model.h"

namespace thimble {
namespace {

uint64_t sum = 0;  // sum of all bytes read, so that no read is optimised away

void touch(const std::byte* data, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; ++i) sum += static_cast<uint64_t>(data[i]);
}

void touch(const Tensor& tensor) {
  if (tensor) touch(tensor.data, tensor.bytes());
}

void read_everything(const Gguf& gguf) {
  for (const auto& [key, value] : gguf.metadata()) {
    touch(value.bytes.data(), value.bytes.size());
    sum += printed(value).size() + in_quotes(key).size();
    sum += gguf.get_uint(key).ok() + gguf.get_float(key).ok() + gguf.get_bool(key).ok() +
           gguf.get_string(key).ok();
    sum += gguf.get_strings(key).ok() + gguf.get_ints(key).ok() + gguf.get_floats(key).ok();
  }
  for (const GgufTensor& tensor : gguf.tensors()) touch(tensor.data, tensor.bytes);
}

void read_everything(const Model& model) {
  for (const Layer& layer : model.layers)
    if (const AttentionMixer* attention = layer.attention()) sum += attention->window + attention->rotates;
  for (const Tensor& tensor : model.tensors()) touch(tensor);
  touch(model.token_embedding);
  sum += model.fingerprint() + model.host_bytes();
  if (!model.has_weights()) return;
  std::vector<float> table(uint64_t(rope_table_rows(100)) * model.rope.n_rot);
  fill_rope_table(model.rope, 100, model.info.context_length, table.data());
}

}  // namespace
}  // namespace thimble

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace thimble;
  FileBytes bytes;  // page-aligned like a mapping, and exactly as long as the input
  append(bytes, data, size);
  bytes.shrink_to_fit();
  if (const Result<Gguf> gguf = Gguf::parse(lend(bytes), "fuzz"); gguf.ok()) read_everything(*gguf);
  if (const auto model = Model::open(lend(bytes), "fuzz"); model.ok()) read_everything(**model);

  // The input as the first and as the second of two parts of a model.
  static const std::vector<GgufWriter> parts = tiny_model("llama").parts(2);
  static const FileBytes part_bytes[] = {parts[0].bytes(), parts[1].bytes()};
  for (const size_t other : {0, 1}) {
    std::vector<GgufFile> files;
    files.push_back({lend(bytes), "fuzz"});
    files.push_back({lend(part_bytes[other]), "part"});
    if (const auto model = Model::open(std::move(files)); model.ok()) read_everything(**model);
  }

  static const FileBytes base_bytes = tiny_model("llama").bytes();
  static const auto base = Model::open(lend(base_bytes), "base");
  if (!base.ok()) std::abort();
  if (const auto heads = (*base)->open_retainer(lend(bytes), "fuzz"); heads.ok())
    for (const Tensor& tensor : (*heads)->tensors()) touch(tensor);
  return 0;
}
