// Compares real models with llama.cpp, if scripts/real-models has fetched them: the tokens of texts, and the
// tokens that follow these. The software driver and the sanitizers are too slow for this.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <tuple>
#include <vector>

#include "tests/support/data.h"
#include "tests/support/device_test_name.h"
#include "tests/support/goldens.h"
#include "tests/support/sessions.h"
#include "tests/support/shared_devices.h"
#include "tests/support/vulkan_messages.h"

namespace thimble::test {
namespace {

// The models of scripts/real-models, which has checked the hash of every file with this size.
struct RealModel {
  std::string name, file;
  uint64_t size;  // bytes
  std::string sha256;
};
const std::vector<RealModel> kRealModels = {
    {"qwen-0.5b", "Qwen2.5-Coder-0.5B-Instruct-Q4_K_M.gguf", 491400064,
     "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"},
    {"gemma-270m", "gemma-3-270m-Q4_K_M.gguf", 253113024,
     "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"},
    {"qwen-1.5b", "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf", 1117320768,
     "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"}};

// The folder that scripts/real-models writes to.
std::filesystem::path models_folder() {
  const auto value = [](const char* variable) {
    const char* found = std::getenv(variable);
    return std::filesystem::path(found ? found : "");
  };
  if (!value("THIMBLE_MODELS").empty()) return value("THIMBLE_MODELS");
  const auto cache = value("XDG_CACHE_HOME");
  return (cache.empty() ? value("HOME") / ".cache" : cache) / "thimble" / "models";
}

std::vector<int32_t> ids_of(const Tokenizer& tokenizer, const std::string& text) {
  std::vector<int32_t> ids;
  for (const Token& token : tokenizer.tokenize(text, true, true)) ids.push_back(token.id);
  return ids;
}

// The file has only the beginning of a long text, which ends with an ellipsis. The ids give the whole text.
std::string whole_text(const Tokenizer& tokenizer, const nlohmann::json& golden) {
  const std::string text = golden.at("text"), ellipsis = "…";
  if (!text.ends_with(ellipsis)) return text;
  auto ids = golden.at("ids").get<std::vector<int32_t>>();
  if (tokenizer.adds_bos()) ids.erase(ids.begin());
  const std::string whole = tokenizer.detokenize(ids.data(), ids.size(), true);
  EXPECT_TRUE(whole.starts_with(text.substr(0, text.size() - ellipsis.size()))) << whole.substr(0, 80);
  return whole;
}

// llama.cpp rounds activations to 8 bit with quantised weights. This mainly shifts all logits, and
// probabilities do not depend on such a shift: after 712 tokens, Gemma's 16 largest logits are 0.17 standard
// deviations (`sd`) away from a computation in double, which ours equal to 0.01. So the mean difference is
// subtracted first. The rest may be 0.1 sd on average, and was at most 0.06. A greedy token may differ if
// llama.cpp's two best logits are closer than 0.3.
void expect_golden(const std::shared_ptr<const Model>& model, const nlohmann::json& golden,
                   const std::shared_ptr<Device>& device) {
  const auto ids = golden.at("ids").get<std::vector<int32_t>>();
  EXPECT_EQ(ids_of(model->tokenizer, whole_text(model->tokenizer, golden)), ids);

  const auto session =
      open_session(model, {.pool = static_cast<uint32_t>(ids.size()), .max_new = 32}, device);
  std::vector<float> logits = read(*session, ids);
  const Top top = golden.at("top").get<Top>();
  float shift = 0, difference = 0;  // averages over the logits
  for (const auto& [token, logit] : top) shift += (logits.at(token) - logit) / top.size();
  for (const auto& [token, logit] : top) difference += std::abs(logits[token] - logit - shift) / top.size();
  EXPECT_LE(difference, 0.1f * golden.at("sd").get<float>());

  // The session is fed llama.cpp's tokens, so that both have the same text after a doubtful token.
  const auto greedy = golden.at("greedy").get<std::vector<int32_t>>();
  const auto gaps = golden.at("gaps").get<std::vector<float>>();
  for (size_t i = 0; i < greedy.size(); ++i) {
    const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
    if (gaps.at(i) >= 0.3f) {
      EXPECT_EQ(best, greedy[i]) << "token " << i;
    }
    logits = accept(*session, greedy[i]);
  }
}

class RealModels : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(RealModels, ContinueTextsAsLlamaCppDoes) {
  const std::string device_name = std::get<0>(GetParam()), name = std::get<1>(GetParam());
  const RealModel& real = *std::find_if(kRealModels.begin(), kRealModels.end(),
                                        [&](const RealModel& known) { return known.name == name; });
  const std::string goldens = shared_file("data/golden/real.json");
  THIMBLE_NEEDS(goldens);
  const std::filesystem::path path = models_folder() / real.file;
  if (!std::filesystem::exists(path) || std::filesystem::file_size(path) != real.size) {
    const std::string missing =
        path.string() + " is missing or has another size: scripts/real-models fetches it";
    const char* required = std::getenv("THIMBLE_REQUIRE_MODELS");
    if (required && std::string(required).find(name) != std::string::npos) FAIL() << missing;
    GTEST_SKIP() << missing;
  }
  const auto model = open_model(path.string());
  const auto device =
      shared_device(device_name, [&] { return must(open_device(device_name, strictly({.threads = 2}))); });
  const nlohmann::json all = load_json(goldens);
  size_t compared = 0;
  for (const nlohmann::json& golden : all.at("cases")) {
    if (golden.at("model_sha256") != real.sha256) continue;
    SCOPED_TRACE(golden.at("text").get<std::string>());
    expect_golden(model, golden, device);
    ++compared;
  }
  EXPECT_GT(compared, 0u);
}

// The CPU runs only the smaller models, because CI has two slow cores.
std::vector<std::tuple<std::string, std::string>> models_on_devices() {
  std::vector<std::tuple<std::string, std::string>> all;
  for (const DeviceInfo& info : list_devices())
    if (info.usable && !info.software)
      for (const RealModel& real : kRealModels)
        if (info.name != "cpu" || real.name != "qwen-1.5b") all.emplace_back(info.name, real.name);
  return all;
}

INSTANTIATE_TEST_SUITE_P(On, RealModels, ::testing::ValuesIn(models_on_devices()), [](const auto& test) {
  return device_test_name({std::get<0>(test.param) + "_" + std::get<1>(test.param), 0});
});

}  // namespace
}  // namespace thimble::test
