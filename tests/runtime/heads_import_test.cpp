// Tests that published retainers become a sidecar file of a model, and that all other files are refused in
// one sentence.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>

#include "gguf/import/safetensors.h"
#include "gguf/import/torch_file.h"
#include "runtime/heads/import.h"
#include "runtime/heads/info.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/data.h"
#include "tests/support/seeded_model.h"
#include "tests/support/tiny_model.h"

namespace thimble {
namespace {

namespace fs = std::filesystem;

// ---- what is written and read ----

// A folder for the running test, removed with this object.
class Folder {
 public:
  Folder() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    path_ =
        fs::temp_directory_path() / ("thimble-heads-" + std::string(test->name()) + std::to_string(getpid()));
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::string write(const std::string& name, std::string_view content) const {
    fs::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name, std::ios::binary) << content;
    return *this / name;
  }

 private:
  fs::path path_;
};

struct TinyModel {
  FileBytes bytes;
  std::shared_ptr<const Model> model;
  explicit TinyModel(const std::string& architecture = "llama") : bytes(tiny_model(architecture).bytes()) {
    const auto opened = Model::open(lend(bytes), "m.gguf");
    EXPECT_TRUE(opened.ok()) << opened.status().message();
    model = *opened;
  }
};

// An opened sidecar file.
struct Written {
  MappedFile file;
  Result<Gguf> gguf;
  explicit Written(const std::string& path)
      : file(std::move(*MappedFile::open(path))), gguf(Gguf::parse(file, path)) {
    EXPECT_TRUE(gguf.ok()) << gguf.status().message();
  }
  std::string text(const std::string& key) const {
    return std::string(gguf->get_string(key)->value_or("(none)"));
  }
  uint64_t number(const std::string& key) const { return gguf->get_uint(key)->value_or(999999); }
  // The values of a tensor, which must have this type and this shape, with the fastest dimension first.
  std::vector<float> values(const std::string& name, std::vector<uint64_t> shape, DType type) const {
    const GgufTensor* t = gguf->tensor(name);
    if (!t) {
      ADD_FAILURE() << "no tensor " << name;
      return {};
    }
    EXPECT_EQ(std::vector<uint64_t>(t->shape, t->shape + t->dims), shape) << name;
    EXPECT_EQ(t->type, static_cast<uint32_t>(type)) << name;
    std::vector<float> out(t->elements);
    for (size_t i = 0; i < out.size(); ++i) {
      uint16_t half = 0;
      if (type == DType::kF32)
        std::memcpy(&out[i], t->data + 4 * i, 4);
      else
        std::memcpy(&half, t->data + 2 * i, 2),
            out[i] = type == DType::kF16 ? f16_to_f32(half) : bf16_to_f32(half);
    }
    return out;
  }
};

// The values that tests/data/make_checkpoints.py writes, which are exact in every 16-bit type.
std::vector<float> values_of(size_t count, uint32_t seed) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = (static_cast<float>((7 * i + 13 * seed) % 255) - 127) / 32;
  return values;
}

CheckpointTensor tensor(const std::string& name, const std::vector<int64_t>& shape, uint32_t seed) {
  size_t count = 1;
  for (const int64_t extent : shape) count *= static_cast<size_t>(extent);
  return {name, shape, values_of(count, seed)};
}

// Scores for tiny_model(): two layers, width 8, two query heads on one KV head of 4 channels.
std::vector<CheckpointTensor> locret_tensors(uint32_t layers = 2) {
  std::vector<CheckpointTensor> all;
  for (uint32_t i = 0; i < layers; ++i) {
    const std::string prefix = "model.layers." + std::to_string(i) + ".self_attn.";
    all.push_back(tensor(prefix + "fc1.weight", {3, 16}, 2 * i));
    all.push_back(tensor(prefix + "fc2.weight", {1, 3}, 2 * i + 1));
  }
  return all;
}
std::vector<CheckpointTensor> linear_tensors() {
  return {tensor("layers.0.weight", {1, 8}, 0), tensor("layers.0.bias", {1}, 1),
          tensor("layers.1.weight", {1, 8}, 2), tensor("layers.1.bias", {1}, 3)};
}
std::vector<CheckpointTensor> mlp_tensors() {
  std::vector<CheckpointTensor> all;
  for (uint32_t i = 0; i < 2; ++i) {
    const std::string prefix = "layers." + std::to_string(i) + ".";
    all.push_back(tensor(prefix + "0.weight", {5, 8}, 4 * i));
    all.push_back(tensor(prefix + "0.bias", {5}, 4 * i + 1));
    all.push_back(tensor(prefix + "2.weight", {1, 5}, 4 * i + 2));
    all.push_back(tensor(prefix + "2.bias", {1}, 4 * i + 3));
  }
  return all;
}

std::string locret_zip(const std::vector<CheckpointTensor>& tensors = locret_tensors()) {
  return torch_zip(state_dict(tensors, "BFloat16", false), tensors, "BFloat16");
}
std::string locret_legacy(const std::vector<CheckpointTensor>& tensors = locret_tensors()) {
  return torch_legacy(state_dict(tensors, "Half", true), tensors, "Half");
}

// Column (head, 2 i + s) in a llama file is column (head, 2 s + i) of the trained matrix, for heads of 4
// channels (methods 2.8). This applies to two query heads and one KV head, but not to the KV head's values.
std::vector<float> interleaved(const std::vector<float>& trained) {
  const size_t order[16] = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 13, 14, 15};
  std::vector<float> out(trained.size());
  for (size_t i = 0; i < out.size(); ++i) out[i] = trained[i / 16 * 16 + order[i % 16]];
  return out;
}

void expect_sentence(const Status& status, Code code, const std::string& part) {
  EXPECT_EQ(std::string(code_name(status.code())), code_name(code)) << status.message();
  EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  EXPECT_EQ(status.message().find('\n'), std::string::npos) << status.message();
}

void expect_base(const Written& out, const Model& model) {
  EXPECT_EQ(out.text("general.type"), "adapter");
  EXPECT_EQ(out.text("adapter.type"), "retainer");
  EXPECT_EQ(out.text("general.architecture"), model.info.architecture);
  EXPECT_EQ(out.number("retainer.base.block_count"), 2u);
  EXPECT_EQ(out.number("retainer.base.head_count"), 2u);
  EXPECT_EQ(out.number("retainer.base.head_count_kv"), 1u);
  EXPECT_EQ(out.number("retainer.base.key_length"), 4u);
  EXPECT_EQ(out.number("retainer.base.fingerprint"), model.fingerprint());
  // The first entries are protected as with every other retention, although the published code protects none.
  EXPECT_FALSE(out.gguf->get_uint("retainer.protect_init")->has_value());
}

// ---- what is imported ----

// Tests both layouts, for a model whose file interleaves the channels of heads and for one whose file does
// not.
TEST(HeadsImport, MakesASidecarOfLocretsCheckpoints) {
  const Folder folder;
  for (const char* architecture : {"llama", "qwen2"})
    for (const bool legacy : {false, true}) {
      const TinyModel tiny(architecture);
      const std::string name = std::string(architecture) + (legacy ? "-legacy" : "-zip");
      const std::string input = folder.write(name + ".pt", legacy ? locret_legacy() : locret_zip());
      const Status status = import_heads(*tiny.model, input, "", folder / (name + ".gguf"));
      ASSERT_TRUE(status.ok()) << status.message();
      const Written out(folder / (name + ".gguf"));
      expect_base(out, *tiny.model);
      EXPECT_EQ(out.text("general.name"), name);
      EXPECT_EQ(out.text("retainer.kind"), "locret");
      EXPECT_EQ(out.text("retainer.input"), "qkv");
      EXPECT_EQ(out.text("retainer.target"), "max_logit");
      EXPECT_EQ(out.text("retainer.act"), "silu");
      EXPECT_EQ(out.number("retainer.hidden"), 3u);
      EXPECT_EQ(out.number("retainer.stabilizers"), 2500u);
      const DType type = legacy ? DType::kF16 : DType::kBF16;
      for (uint32_t i = 0; i < 2; ++i) {
        const std::string block = "blk." + std::to_string(i) + ".";
        std::vector<float> fc1 = values_of(48, 2 * i);
        if (std::string(architecture) == "llama") fc1 = interleaved(fc1);
        EXPECT_EQ(out.values(block + "retain_fc1.weight", {16, 3}, type), fc1) << name;
        EXPECT_EQ(out.values(block + "retain_fc2.weight", {3, 1}, type), values_of(3, 2 * i + 1)) << name;
      }
      EXPECT_EQ(out.gguf->tensors().size(), 4u);
    }
}

// The matrices of a llama file give q and k interleaved, because its converter reorders their rows: channel i
// of half s of a head becomes channel 2 i + s. Their product with the imported columns must equal the product
// of the original q and k with the trained columns. All numbers are multiples of 1/1024 below 2^10, so sums
// are exact in any order.
TEST(HeadsImport, GivesALlamasInterleavedQueriesTheScoresThatWereTrained) {
  const Folder folder;
  const TinyModel tiny;
  ASSERT_TRUE(import_heads(*tiny.model, folder.write("l.pt", locret_zip()), "", folder / "o.gguf").ok());
  const Written out(folder / "o.gguf");
  const std::vector<float> trained = values_of(48, 0), x = values_of(16, 77);
  const std::vector<float> imported = out.values("blk.0.retain_fc1.weight", {16, 3}, DType::kBF16);
  std::vector<float> from_file = x;
  for (size_t head = 0; head < 3; ++head)
    for (size_t s = 0; s < 2; ++s)
      for (size_t i = 0; i < 2; ++i) from_file[head * 4 + 2 * i + s] = x[head * 4 + 2 * s + i];
  ASSERT_NE(from_file, x);
  for (size_t row = 0; row < 3; ++row) {
    float expected = 0, score = 0;
    for (size_t c = 0; c < 16; ++c) {
      expected += trained[row * 16 + c] * x[c];
      score += imported[row * 16 + c] * from_file[c];
    }
    EXPECT_EQ(score, expected);
  }
}

TEST(HeadsImport, MakesASidecarOfKVzapsLinearScores) {
  const Folder folder;
  const TinyModel tiny;
  const std::string input = folder.write("m.safetensors", safetensors(linear_tensors(), "F32"));
  const Status status = import_heads(*tiny.model, input, "", folder / "o.gguf");
  ASSERT_TRUE(status.ok()) << status.message();
  const Written out(folder / "o.gguf");
  expect_base(out, *tiny.model);
  EXPECT_EQ(out.text("retainer.kind"), "linear");
  EXPECT_EQ(out.text("retainer.input"), "x");
  EXPECT_EQ(out.text("retainer.target"), "log_kvzip_plus");
  EXPECT_EQ(out.values("blk.1.retain.weight", {8, 1}, DType::kF32), values_of(8, 2));
  EXPECT_EQ(out.values("blk.1.retain.bias", {1}, DType::kF32), values_of(1, 3));
  EXPECT_EQ(out.gguf->tensors().size(), 4u);
}

// The published form: a folder with config.json. Matrices keep their type, biases become f32.
TEST(HeadsImport, MakesASidecarOfAFolderOfKVzapsMlp) {
  const Folder folder;
  const TinyModel tiny;
  for (const char* type : {"F16", "BF16"}) {
    const std::string name = std::string("KVzap-") + type;
    folder.write(name + "/model.safetensors", safetensors(mlp_tensors(), type));
    folder.write(name + "/config.json", R"({"architectures": ["KVzapModel"], "dtype": null, "hidden_dim": 5,
                 "n": [1, -2.5e3, {"a\"\u00e9": true}], "model_type": "kvzap"})");
    const Status status = import_heads(*tiny.model, folder / (name + "/"), "mlp", folder / (name + ".gguf"));
    ASSERT_TRUE(status.ok()) << status.message();
    const Written out(folder / (name + ".gguf"));
    EXPECT_EQ(out.text("general.name"), name);
    EXPECT_EQ(out.text("retainer.kind"), "mlp");
    EXPECT_EQ(out.text("retainer.act"), "gelu_erf");
    EXPECT_EQ(out.number("retainer.hidden"), 5u);
    const DType dtype = std::string(type) == "F16" ? DType::kF16 : DType::kBF16;
    EXPECT_EQ(out.values("blk.1.retain_fc1.weight", {8, 5}, dtype), values_of(40, 4));
    EXPECT_EQ(out.values("blk.1.retain_fc1.bias", {5}, DType::kF32), values_of(5, 5));
    EXPECT_EQ(out.values("blk.1.retain_fc2.weight", {5, 1}, dtype), values_of(5, 6));
    EXPECT_EQ(out.values("blk.1.retain_fc2.bias", {1}, DType::kF32), values_of(1, 7));
    EXPECT_EQ(out.gguf->tensors().size(), 8u);
  }
}

// Reads files that Python's pickle wrote (tests/data/make_checkpoints.py), including the other data that a
// training stores in them.
TEST(HeadsImport, ReadsWhatPythonsPickleWrites) {
  const Folder folder;
  const TinyModel tiny("qwen2");
  for (const char* name : {"locret-zip", "locret-legacy"}) {
    const std::string input = project_file("tests/data/" + std::string(name) + ".pt");
    const Status status = import_heads(*tiny.model, input, "", folder / name);
    ASSERT_TRUE(status.ok()) << status.message();
    const Written out(folder / name);
    const DType type = std::string(name) == "locret-zip" ? DType::kBF16 : DType::kF16;
    EXPECT_EQ(out.values("blk.1.retain_fc1.weight", {16, 3}, type), values_of(48, 2));
    EXPECT_EQ(out.values("blk.1.retain_fc2.weight", {3, 1}, type), values_of(3, 3));
  }
  for (const char* name : {"sink-zip", "sink-legacy"}) {
    const std::string input = project_file("tests/data/" + std::string(name) + ".pt");
    const Status status = import_heads(*tiny.model, input, "", folder / name);
    ASSERT_TRUE(status.ok()) << status.message();
    const Written out(folder / name);
    expect_base(out, *tiny.model);
    EXPECT_EQ(out.text("retainer.kind"), "sink");
    EXPECT_EQ(out.text("retainer.input"), "x");
    EXPECT_EQ(out.text("retainer.target"), "kvzip");
    EXPECT_EQ(out.number("retainer.rank"), 4u);
    EXPECT_EQ(out.number("retainer.sinks"), 3u);
    EXPECT_EQ(out.values("blk.1.retain_kbase", {4, 3}, DType::kF32), values_of(12, 7));
    EXPECT_EQ(out.values("blk.1.retain_b", {2}, DType::kF32), values_of(2, 8));
    EXPECT_EQ(out.values("blk.1.retain_q.weight", {8, 8}, DType::kBF16), values_of(64, 9));
    EXPECT_EQ(out.values("blk.1.retain_q.bias", {8}, DType::kF32), values_of(8, 10));
    EXPECT_EQ(out.values("blk.1.retain_k.weight", {8, 4}, DType::kBF16), values_of(32, 11));
    EXPECT_EQ(out.values("blk.1.retain_q_norm.weight", {4}, DType::kF32), values_of(4, 12));
    EXPECT_EQ(out.values("blk.1.retain_k_norm.weight", {4}, DType::kF32), values_of(4, 13));
    EXPECT_EQ(out.gguf->tensors().size(), 14u);
  }
}

// ---- what does not fit the model ----

TEST(HeadsImport, RefusesScoresOfAnotherModelSayingWhatDiffers) {
  const Folder folder;
  const TinyModel tiny;
  const auto without = [](std::vector<CheckpointTensor> tensors, size_t index) {
    tensors.erase(tensors.begin() + static_cast<ptrdiff_t>(index));
    return tensors;
  };
  const auto with = [](std::vector<CheckpointTensor> tensors, const CheckpointTensor& more) {
    tensors.push_back(more);
    return tensors;
  };
  auto wide = mlp_tensors();
  wide[0] = tensor("layers.0.0.weight", {5, 9}, 0);
  auto odd = mlp_tensors();
  odd[4] = tensor("layers.1.0.weight", {6, 8}, 0);
  const struct {
    const char* what;
    std::string file;
    Code code;
    const char* part;
    const char* kind = "";
  } kCases[] = {
      {"three layers", locret_zip(locret_tensors(3)), Code::kMismatch,
       "scores for 3 layers, and the model has 2"},
      {"one layer", locret_legacy(locret_tensors(1)), Code::kMismatch,
       "scores for 1 layers, and the model has 2"},
      {"a layer of 4 billion",
       locret_zip(with(locret_tensors(), tensor("model.layers.4294967295.a", {1}, 0))), Code::kMismatch,
       "scores for 4294967296 layers"},
      {"a missing tensor", locret_zip(without(locret_tensors(), 1)), Code::kFormat,
       "lacks the tensor 'model.layers.0.self_attn.fc2.weight'"},
      {"a missing bias", safetensors(without(linear_tensors(), 3), "F32"), Code::kFormat,
       "lacks the tensor 'layers.1.bias'"},
      {"an unknown tensor", safetensors(with(linear_tensors(), tensor("layers.1.gain", {1}, 0)), "F32"),
       Code::kUnsupported, "tensor 'layers.1.gain' has no place in a retainer of the kind linear"},
      {"another width", safetensors(wide, "F16"), Code::kMismatch,
       "tensor 'layers.0.0.weight' is 5 x 9, where this model needs 5 x 8"},
      {"a layer of another width", safetensors(odd, "F16"), Code::kMismatch,
       "tensor 'layers.1.0.weight' is 6 x 8, where this model needs 5 x 8"},
      {"no scores", safetensors({tensor("model.embed_tokens.weight", {6, 8}, 0)}, "F32"), Code::kUnsupported,
       "its first tensor is 'model.embed_tokens.weight'"},
      {"no tensors", safetensors({}, "F32"), Code::kFormat, "holds no tensors"},
      {"another kind", safetensors(linear_tensors(), "F32"), Code::kFormat,
       "lacks the tensor 'layers.0.0.weight'", "mlp"},
      {"an unknown kind", safetensors(linear_tensors(), "F32"), Code::kInvalidArgument,
       "'gate' is not a kind of retainer; the kinds are locret, linear, mlp, sink", "gate"},
      {"text", "scores, please", Code::kFormat, "neither a file of torch.save nor one of safetensors"},
      {"nothing", "", Code::kFormat, "neither a file of torch.save nor one of safetensors"},
      {"a model", std::string(reinterpret_cast<const char*>(tiny.bytes.data()), tiny.bytes.size()),
       Code::kFormat, "is a GGUF file already"},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.what);
    expect_sentence(import_heads(*tiny.model, folder.write("in", c.file), c.kind, folder / "out"), c.code,
                    c.part);
    EXPECT_FALSE(fs::exists(folder / "out"));
    EXPECT_FALSE(fs::exists(folder / "out.part"));
  }
}

TEST(HeadsImport, RefusesTypesThatItDoesNotRead) {
  const Folder folder;
  const TinyModel tiny;
  std::vector<CheckpointTensor> twice = linear_tensors();  // 8 bytes per element
  for (CheckpointTensor& t : twice) t.values.resize(2 * t.values.size());
  std::string file = safetensors(twice, "F32");
  for (size_t at = 0; (at = file.find("F32", at)) != std::string::npos;) file.replace(at, 3, "F64");
  expect_sentence(import_heads(*tiny.model, folder.write("in", file), "", folder / "out"), Code::kUnsupported,
                  "is of type float64; float32, float16 and bfloat16 can be read");
}

TEST(HeadsImport, RefusesFoldersThatHoldNoScores) {
  const Folder folder;
  const TinyModel tiny;
  folder.write("empty/readme", "");
  expect_sentence(import_heads(*tiny.model, folder / "empty", "", folder / "out"), Code::kIo, "config.json");
  folder.write("config/config.json", R"({"model_type": "kvzap"})");
  expect_sentence(import_heads(*tiny.model, folder / "config", "", folder / "out"), Code::kIo,
                  "model.safetensors");
  for (const char* text : {R"({"model_type": "llama"})", R"({})"}) {
    folder.write("other/config.json", text);
    folder.write("other/model.safetensors", safetensors(linear_tensors(), "F32"));
    expect_sentence(import_heads(*tiny.model, folder / "other", "", folder / "out"), Code::kUnsupported,
                    "where retainers have 'kvzap'");
  }
  folder.write("other/config.json", R"({"model_type": )");
  expect_sentence(import_heads(*tiny.model, folder / "other", "", folder / "out"), Code::kFormat, "not JSON");
}

TEST(HeadsImport, OverwritesNothingAndLeavesNothingHalfWritten) {
  const Folder folder;
  const TinyModel tiny;
  const std::string input = folder.write("in", locret_zip()), there = folder.write("there", "precious");
  expect_sentence(import_heads(*tiny.model, input, "", there), Code::kIo, "exists already");
  EXPECT_EQ(fs::file_size(there), 8u);
  expect_sentence(import_heads(*tiny.model, input, "", folder / "no/such/out"), Code::kIo,
                  "cannot be written");
  ASSERT_TRUE(import_heads(*tiny.model, input, "", folder / "out").ok());
  EXPECT_FALSE(fs::exists(folder / "out.part"));
}

// ---- pickles that are not checkpoints ----

using Tensors = Result<std::vector<ForeignTensor>>;
Tensors read_torch(const FileBytes& bytes) { return read_torch_file(bytes, "in.pt"); }
Tensors read_torch(const std::string& text) {
  static FileBytes bytes;
  bytes = file_bytes(text);
  bytes.shrink_to_fit();
  return read_torch(bytes);
}
std::string zip_of(const std::string& pickle, const std::string& storage = std::string(64, '\0')) {
  return zip({{"m/data.pkl", pickle}, {"m/data/0", storage}});
}

// A pickle runs code by naming a callable and calling it. The reader refuses all of these names before any
// call.
TEST(Pickle, RefusesAllNamesExceptThoseOfCheckpointsAndRunsNoCode) {
  const std::pair<const char*, const char*> kNames[] = {{"os", "system"},
                                                        {"posix", "system"},
                                                        {"nt", "system"},
                                                        {"builtins", "eval"},
                                                        {"__builtin__", "eval"},
                                                        {"builtins", "exec"},
                                                        {"builtins", "getattr"},
                                                        {"subprocess", "Popen"},
                                                        {"torch", "load"},
                                                        {"torch.hub", "load"},
                                                        {"torch._utils", "eval"},
                                                        {"numpy", "load"},
                                                        {"numpy.core", "scalar"},
                                                        {"collections", "Counter"},
                                                        {"torch", "ComplexFloatStorage"},
                                                        {"copyreg", "_reconstructor"},
                                                        {"", ""}};
  for (const auto& [module, name] : kNames)
    for (const bool legacy : {false, true}) {
      const std::string pickle =
          PickleWriter().global(module, name).op("(").text("touch /tmp/x").op("tR").end();
      expect_sentence(read_torch(legacy ? torch_legacy(pickle, {}, "Float") : zip_of(pickle)).status(),
                      Code::kUnsupported,
                      "calls '" + std::string(module) + "." + name +
                          "', which loading tensors does not need; it was not run");
    }
  const std::string marker = "/tmp/thimble-was-run";
  fs::remove(marker);
  const MappedFile file = std::move(*MappedFile::open(project_file("tests/data/runs-a-command.pt")));
  expect_sentence(read_torch_file({file.data(), file.size()}, "in.pt").status(), Code::kUnsupported,
                  "calls 'posix.system'");
  EXPECT_FALSE(fs::exists(marker));
}

TEST(Pickle, RefusesInstructionsThatCheckpointsDoNotNeed) {
  // inst, obj, newobj, persid, string, put, get, dup, pop, ext1, stack_global, frame, bytes
  for (const char* op : {"i", "o", "\x81", "P", "S", "p", "g", "2", "0", "\x82", "\x93", "\x95", "C", "\xff"})
    expect_sentence(read_torch(zip_of(PickleWriter().op("}").op(op).end())).status(), Code::kUnsupported,
                    "torch.save does not write");
  for (const char* begin : {"\x80\x04", "\x80\x03", "\x80\x01", "}."})
    expect_sentence(read_torch(zip_of(std::string(begin) + "}.")).status(), Code::kUnsupported, "protocol 2");
}

TEST(Pickle, RefusesInvalidPickles) {
  const auto tensor = [](int64_t elements, int64_t offset, const std::vector<int64_t>& shape,
                         const std::vector<int64_t>& strides) {
    return PickleWriter()
        .op("}")
        .text("t")
        .tensor("Float", "0", elements, offset, shape, strides)
        .op("s")
        .end();
  };
  ASSERT_TRUE(read_torch(zip_of(tensor(16, 4, {3, 4}, {4, 1}))).ok());
  ASSERT_TRUE(read_torch(zip_of(tensor(16, 4, {1, 12}, {99, 1}))).ok());  // a single row needs no stride
  const int64_t huge = int64_t{1} << 62;
  const struct {
    const char* what;
    std::string pickle;
  } kDamaged[] = {
      {"an empty pickle", PickleWriter().end()},
      {"two values", PickleWriter().op("}}").end()},
      {"an open mark", PickleWriter().op("}(").end()},
      {"an append to a list below a mark", PickleWriter().op("](Nata").end()},
      {"a tuple of a value below a mark", PickleWriter().op("N(\x85t\x86").end()},
      {"append to nothing", PickleWriter().op("a").end()},
      {"appends without a mark", PickleWriter().op("]NNe").end()},
      {"append to a dict", PickleWriter().op("}Na").end()},
      {"set in a list", PickleWriter().op("]NNs").end()},
      {"a key without a value", PickleWriter().op("}(").text("a").op("u").end()},
      {"a dict as a key", PickleWriter().op("}}Ns").end()},
      {"a memo that was never made", PickleWriter().op("h\x05").end()},
      {"a memo of nothing", PickleWriter().op(std::string_view("q\0", 2)).end()},
      {"a tuple of too many", PickleWriter().op("N\x87").end()},
      {"a call of text", PickleWriter().text("a").op(")R").end()},
      {"a call of a type", PickleWriter().global("torch", "float32").op(")R").end()},
      {"a call of a storage's type", PickleWriter().global("torch", "FloatStorage").op(")R").end()},
      {"arguments that are not a tuple", PickleWriter().global("collections", "OrderedDict").op("NR").end()},
      {"an OrderedDict of arguments", PickleWriter().global("collections", "OrderedDict").op("]\x85R").end()},
      {"a parameter of nothing", PickleWriter().global("torch._utils", "_rebuild_parameter").op(")R").end()},
      {"a tensor of nothing", PickleWriter().global("torch._utils", "_rebuild_tensor_v2").op(")R").end()},
      {"a tensor of text",
       PickleWriter().global("torch._utils", "_rebuild_tensor_v2").op("(").text("a").op("NNNtR").end()},
      {"the state of text", PickleWriter().text("a").op("}b").end()},
      {"an id that is text", PickleWriter().text("a").op("Q").end()},
      {"an id of a module", PickleWriter().op("(").text("module").op("NNNNtQ").end()},
      {"a text that is too long", PickleWriter().op("X\xff\xff\xff\xff").end()},
      {"a number of 255 bytes", PickleWriter().op("\x8a\xff").end()},
      {"a name without an end", PickleWriter().op("ctorch").end()},
      {"more elements than the storage", tensor(16, 0, {17}, {1})},
      {"an offset past the storage", tensor(16, 17, {0}, {1})},
      {"an offset that makes it too long", tensor(16, 1, {16}, {1})},
      {"a negative offset", tensor(16, -1, {2}, {1})},
      {"a negative shape", tensor(16, 0, {-1}, {1})},
      {"a negative storage", tensor(-1, 0, {1}, {1})},
      {"a shape whose product overflows", tensor(16, 0, {huge, 4}, {4, 1})},
      {"a shape whose product overflows to 16", tensor(16, 0, {huge + 4, 4}, {4, 1})},
      {"a shape without strides", tensor(16, 0, {4, 4}, {1})},
      {"nine dimensions", tensor(16, 0, {1, 1, 1, 1, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 1, 1, 1, 1})},
      {"a storage that is not there", tensor(17, 0, {17}, {1})},
      {"a storage of 2^62", tensor(huge, 0, {huge}, {1})},
  };
  for (const auto& c : kDamaged) {
    SCOPED_TRACE(c.what);
    expect_sentence(read_torch(zip_of(c.pickle)).status(), Code::kFormat, "damaged or incomplete");
  }
  expect_sentence(read_torch(zip_of(tensor(16, 0, {4, 4}, {1, 4}))).status(), Code::kUnsupported,
                  "contiguous()");
  expect_sentence(read_torch(zip({{"m/data.pkl", tensor(16, 0, {16}, {1})}})).status(), Code::kFormat,
                  "the values of tensor 't' are missing");
}

// Lists that contain themselves, or each other many times, do not make the reader run without end; nor does a
// pickle of only instructions.
TEST(Pickle, BoundsDepthNumberAndInstructions) {
  const std::string zero("q\0", 2), get("h\0", 2);
  expect_sentence(read_torch(zip_of(PickleWriter().op("]").op(zero).op(get).op("a").end())).status(),
                  Code::kUnsupported, "deeper nested ones");
  // Eight levels of tuples, each with ten references to the level before: 10^8 elements from a few hundred
  // instructions.
  PickleWriter wide;
  wide.op(")").op(zero);
  for (int level = 0; level < 8; ++level) {
    wide.op("(");
    for (int i = 0; i < 10; ++i) wide.op(get);
    wide.op("t").op(zero);
  }
  // Collects the values that the levels leave on the stack in one list, so that the pickle ends correctly.
  expect_sentence(read_torch(zip_of(PickleWriter().op("](").op(wide.out.substr(2)).op("e").end())).status(),
                  Code::kUnsupported, "holds more");
  const std::string long_key(300, 'k');
  expect_sentence(read_torch(zip_of(PickleWriter().op("}").text(long_key).op("Ns").end())).status(),
                  Code::kUnsupported, "deeper nested ones");
  expect_sentence(read_torch(zip_of(PickleWriter().op(std::string(1 << 21, 'N')).end())).status(),
                  Code::kUnsupported, "more than 1048576 instructions");
}

// ---- archives ----

TEST(Checkpoints, OfBigEndianMachinesAreRefused) {
  const auto tensors = locret_tensors();
  expect_sentence(
      read_torch(torch_legacy(state_dict(tensors, "Half", true), tensors, "Half", false)).status(),
      Code::kUnsupported, "big-endian");
  expect_sentence(read_torch(torch_zip(state_dict(tensors, "Half", false), tensors, "Half", "big")).status(),
                  Code::kUnsupported, "big-endian");
}

TEST(Checkpoints, MayHoldSharedStoragesAndValuesThatAreNotTensors) {
  PickleWriter w;
  w.op("}(")
      .text("list")
      .op("](N\x88\x89")
      .op("G")
      .op(std::string(8, 'f'))
      .integer(-1)
      .integer(int64_t{-1} << 40);
  w.op("e").text("size").global("torch", "Size").integers({2, 3}).op("\x85R");
  w.text("type").global("torch", "bfloat16");
  w.integer(7).tensor("Float", "0", 16, 4, {2}, {1});
  w.text("nested").op("](").tensor("Float", "0", 16, 8, {1, 1}, {1, 1}).op("e");
  const Tensors tensors = read_torch(zip_of(w.op("u").end(), packed(values_of(16, 5), "Float")));
  ASSERT_TRUE(tensors.ok()) << tensors.status().message();
  ASSERT_EQ(tensors->size(), 2u);
  const std::vector<float> values = values_of(16, 5);
  EXPECT_EQ((*tensors)[0].name, "7");
  EXPECT_EQ((*tensors)[0].bytes, 8u);
  EXPECT_EQ(std::memcmp((*tensors)[0].data, &values[4], 8), 0);
  EXPECT_EQ((*tensors)[1].name, "nested.0");
  EXPECT_EQ((*tensors)[1].shape, (std::vector<uint64_t>{1, 1}));
  EXPECT_EQ(std::memcmp((*tensors)[1].data, &values[8], 4), 0);
}

TEST(Checkpoints, RefuseArchivesThatTorchDoesNotWrite) {
  const std::string empty = PickleWriter().op("}").end();
  expect_sentence(read_torch(zip({{"m/data.pkl", empty, 8}})).status(), Code::kUnsupported,
                  "entry 'm/data.pkl' is compressed");
  expect_sentence(read_torch(zip({{"m/data.pkl", empty}, {"m/data.pkl", empty}})).status(), Code::kFormat,
                  "twice");
  expect_sentence(read_torch(zip({{"word/document.xml", "<a>"}})).status(), Code::kFormat,
                  "it has no data.pkl");
  std::string large = zip({{"m/data.pkl", empty}});
  large.replace(large.size() - 6, 4, "\xff\xff\xff\xff");
  expect_sentence(read_torch(large).status(), Code::kUnsupported, "more than 4 GiB");
  EXPECT_TRUE(read_torch(zip({{"m/data.pkl", empty}})).ok());
}

// ---- safetensors ----

Tensors read_safe(const std::string& text) {
  static FileBytes bytes;
  bytes = file_bytes(text);
  bytes.shrink_to_fit();
  return read_safetensors(bytes, "in.safetensors");
}
std::string safe_of(std::string header, size_t data = 64) {
  return raw(static_cast<uint64_t>(header.size())) + header + std::string(data, '\0');
}

TEST(Safetensors, RefuseAHeaderWithErrors) {
  ASSERT_TRUE(read_safe(safe_of(R"( {)")).ok() == false);
  ASSERT_TRUE(read_safe(safe_of(R"({"a":{"dtype":"F32","shape":[2, 8],"data_offsets":[0,64]}} )")).ok());
  ASSERT_TRUE(
      read_safe(safe_of(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[60,64],"more":[{}]}})")).ok());
  const char* kDamaged[] = {
      R"({"a":{"dtype":"F32","shape":[17],"data_offsets":[0,68]}})",
      R"({"a":{"dtype":"F32","shape":[16],"data_offsets":[0,60]}})",
      R"({"a":{"dtype":"F32","shape":[16],"data_offsets":[64,0]}})",
      R"({"a":{"dtype":"F32","shape":[16],"data_offsets":[0]}})",
      R"({"a":{"dtype":"F32","shape":[16],"data_offsets":[0,64,64]}})",
      R"({"a":{"dtype":"F32","shape":[16]}})",
      R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})",
      R"({"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]}})",
      R"({"a":{"dtype":"F16","shape":[1],"data_offsets":[0,3]}})",
      R"({"a":{"dtype":"F32","shape":[-16],"data_offsets":[0,64]}})",
      R"({"a":{"dtype":"F32","shape":[99999999999999999999999],"data_offsets":[0,64]}})",
      R"({"a":{"dtype":"F32","shape":16,"data_offsets":[0,64]}})",
      R"({"a":[]})",
      R"({"a")",
      R"({"a":{"dtype":"F32)",
      R"({"a":1)",
      R"({"__metadata__":{"a":"b}})",
      R"({"__metadata__":{"\u12":1}})",
      R"({} {})",
  };
  for (const char* header : kDamaged) {
    SCOPED_TRACE(header);
    const Status status = read_safe(safe_of(header)).status();
    EXPECT_EQ(status.code(), Code::kFormat) << status.message();
  }
  const std::string deep = R"({"__metadata__":)" + std::string(100000, '[') + std::string(100000, ']') + "}";
  EXPECT_EQ(read_safe(safe_of(deep)).status().code(), Code::kFormat);
  expect_sentence(read_safe(safe_of(R"({"a":{"dtype":"F8","shape":[64],"data_offsets":[0,64]}})")).status(),
                  Code::kUnsupported, "is of type 'F8'");
  expect_sentence(
      read_safe(safe_of(R"({"a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,16],"data_offsets":[0,64]}})"))
          .status(),
      Code::kUnsupported, "more than 8 dimensions");
  for (const uint64_t length : {uint64_t{3}, uint64_t{1} << 27, uint64_t{1} << 63, UINT64_MAX})
    EXPECT_EQ(read_safe(raw(length) + "{}").status().code(), Code::kFormat);
  const Folder folder;
  const TinyModel tiny;
  const std::string twice = safe_of(R"({"a":{"dtype":"F32","shape":[16],"data_offsets":[0,64]},)"
                                    R"("a":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}})");
  expect_sentence(import_heads(*tiny.model, folder.write("in", twice), "", folder / "out"), Code::kFormat,
                  "has the tensor 'a' twice");
}

// ---- every byte ----

// A file that is cut off at any byte is refused. A file with any byte changed is read or refused. Sanitizers
// check both.
TEST(Checkpoints, SurviveBeingCutAndChangedAtEveryByte) {
  const struct {
    const char* what;
    std::string file;
    std::function<Tensors(const std::string&)> read;
  } kFiles[] = {
      {"zip", locret_zip(), [](const std::string& text) { return read_torch(text); }},
      {"legacy", locret_legacy(), [](const std::string& text) { return read_torch(text); }},
      {"safetensors", safetensors(mlp_tensors(), "BF16"), read_safe},
  };
  uint64_t sum = 0;  // sum of all values, so that a sanitizer sees them being read
  for (const auto& f : kFiles) {
    SCOPED_TRACE(f.what);
    ASSERT_TRUE(f.read(f.file).ok());
    for (size_t size = 0; size < f.file.size(); ++size) {
      const Status status = f.read(f.file.substr(0, size)).status();
      EXPECT_FALSE(status.ok()) << "cut at " << size;
      EXPECT_EQ(status.message().find('\n'), std::string::npos);
    }
    for (size_t at = 0; at < f.file.size(); ++at)
      for (const int change : {1, 0x80, 0xff}) {
        std::string changed = f.file;
        changed[at] = static_cast<char>(changed[at] ^ change);
        const Tensors tensors = f.read(changed);
        if (!tensors.ok()) continue;
        for (const ForeignTensor& t : *tensors)
          for (uint64_t i = 0; i < t.bytes; ++i) sum += static_cast<uint64_t>(t.data[i]);
      }
  }
  EXPECT_GT(sum, 0u);
}

// ---- what a sidecar says of itself ----

std::string described(const std::string& path, const Model* model) {
  const Result<std::string> text = describe_heads(path, model);
  EXPECT_TRUE(text.ok()) << text.status().message();
  return text.ok() ? *text : "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(HeadsInfo, SaysWhatAnImportedFileHolds) {
  const Folder folder;
  const TinyModel tiny;
  const std::string input = folder.write("zap.safetensors", safetensors(mlp_tensors(), "BF16"));
  ASSERT_TRUE(import_heads(*tiny.model, input, "", folder / "o.gguf").ok());
  char fingerprint[20];
  std::snprintf(fingerprint, sizeof fingerprint, "%016llx",
                static_cast<unsigned long long>(tiny.model->fingerprint()));
  const std::string expected =
      R"({"name": "zap", "kind": "mlp", "input": "x", "target": "log_kvzip_plus", "architecture": "llama", )"
      R"("layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 4, "fingerprint": ")" +
      std::string(fingerprint) + R"(", "parameters": )" + std::to_string(2 * (40 + 5 + 5 + 1)) +
      R"(, "file_bytes": )" + std::to_string(fs::file_size(folder / "o.gguf")) +
      R"(, "metadata": {"general.type": "adapter", "adapter.type": "retainer", )";
  const std::string info = described(folder / "o.gguf", nullptr);
  EXPECT_EQ(info.substr(0, expected.size()), expected);
  EXPECT_TRUE(info.ends_with(R"("retainer.act": "gelu_erf", "retainer.hidden": "5"}})")) << info;
}

// The model opens every kind of file that was imported for it, and another model does not.
TEST(HeadsInfo, SaysThatAnImportedFileFitsItsModelAlone) {
  const Folder folder;
  const TinyModel tiny("qwen2"), other("llama");
  const std::string inputs[] = {folder.write("linear", safetensors(linear_tensors(), "F32")),
                                folder.write("mlp", safetensors(mlp_tensors(), "BF16")),
                                project_file("tests/data/locret-legacy.pt"),
                                project_file("tests/data/sink-zip.pt")};
  for (const std::string& input : inputs) {
    const std::string output = folder / (fs::path(input).stem().string() + ".gguf");
    ASSERT_TRUE(import_heads(*tiny.model, input, "", output).ok());
    const std::string info = described(output, tiny.model.get());
    EXPECT_TRUE(contains(info, R"("fits": true)")) << info;
    EXPECT_TRUE(contains(described(output, other.model.get()), R"("fits": false, "misfit": ")")) << input;
  }
}

TEST(HeadsInfo, SaysWhatEachHeadGets) {
  const Folder folder;
  GgufWriter heads = tiny_heads("llama").set("retainer.budget", std::vector<float>{1, 3});
  heads.set("general.name", std::string("quote \" bell \a and \xff")).write(folder / "h.gguf");
  const std::string info = described(folder / "h.gguf", nullptr);
  EXPECT_TRUE(
      info.starts_with("{\"name\": \"quote \\\" bell \\u0007 and \xEF\xBF\xBD\", \"kind\": \"locret\", "))
      << info;
  EXPECT_TRUE(contains(info, R"("fingerprint": "", )")) << info;
  EXPECT_TRUE(contains(info, R"("shares": [[0.5], [1.5]], )")) << info;
}

// As in the loader, heads of layers with a window get no share of the pools. Without the model, the file's
// tensors show which layers these are.
TEST(HeadsInfo, DividesAmongLayersWithoutAWindow) {
  const Folder folder;
  const test::SeededModel m = test::seeded_model(
      {.kind = "linear", .covers_windows = false, .shares = {9, 9, 1, 2}, .window = 20});  // layer 0
  const std::string path = folder / "h.gguf";
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(m.retainer->file.data()),
             static_cast<std::streamsize>(m.retainer->file.size()));
  const char* expected = R"("shares": [[null, null], [0.6667, 1.333]], )";
  EXPECT_NEAR(m.retainer->shares[2], 0.6667, 1e-4);
  EXPECT_NEAR(m.retainer->shares[3], 1.333, 1e-3);
  for (const Model* model : {m.model.get(), static_cast<const Model*>(nullptr)})
    EXPECT_TRUE(contains(described(path, model), expected)) << described(path, model);
}

TEST(HeadsInfo, RefusesOtherFiles) {
  const Folder folder;
  const auto refused = [&](const GgufWriter& w) {
    w.write(folder / "h.gguf");
    return describe_heads(folder / "h.gguf", nullptr).status();
  };
  expect_sentence(refused(tiny_model("llama")), Code::kFormat, "holds no retainer");
  expect_sentence(refused(tiny_heads("llama").set("adapter.type", "lora")), Code::kFormat, "'lora'");
  expect_sentence(refused(tiny_heads("llama").set("retainer.budget", std::vector<float>{1, 2, 3})),
                  Code::kFormat, "3 shares");
  expect_sentence(refused(tiny_heads("llama").set("retainer.budget", std::vector<float>{1, NAN})),
                  Code::kFormat, "a share of nan");
  expect_sentence(refused(tiny_heads("llama").erase("locret.base.block_count")), Code::kFormat,
                  "lacks the key");
  expect_sentence(describe_heads(folder / "none", nullptr).status(), Code::kIo, "cannot be opened");
}

}  // namespace
}  // namespace thimble
