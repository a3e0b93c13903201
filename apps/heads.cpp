// Implements `thimble heads`, which converts published retainers to files for --heads, and shows the contents
// of such a file.
#include <cstdio>

#include "apps/generation.h"
#include "apps/options.h"
#include "apps/sizes.h"

namespace app {

namespace {

struct HeadsSettings {
  Settings common;  // model, json
  std::string input, kind, output;
};

std::string text_of(const Json& info, const char* key) { return visible(info.at(key).get<std::string>()); }

int import(const HeadsSettings& s) {
  const Model model = open_model(s.common.model);
  const std::string output = s.output.empty() ? heads_path(s.common.model) : s.output;
  call(thimble_heads_import, model.get(), s.input.c_str(), s.kind.empty() ? nullptr : s.kind.c_str(),
       output.c_str());
  const Json info = Json::parse(heads_info(output, nullptr));
  if (s.common.json) {
    print_json({{"output", output},
                {"kind", info.at("kind")},
                {"parameters", info.at("parameters")},
                {"file_bytes", info.at("file_bytes")}});
    return 0;
  }
  std::printf("%s: a retainer of the kind %s, %s parameters, %s\n", output.c_str(),
              text_of(info, "kind").c_str(), format_count(info.at("parameters")).c_str(),
              format_size(info.at("file_bytes")).c_str());
  return 0;
}

// Prints "16 texts, 98,304 tokens, 300 steps, seed 0; from book.txt", as far as the file has these facts.
void print_trained(const Json& trained) {
  std::string said;
  for (const char* unit : {"texts", "tokens", "steps"})
    if (trained.contains(unit)) said += format_count(trained.at(unit)) + " " + unit + ", ";
  if (trained.contains("seed")) said += "seed " + trained.at("seed").dump() + ", ";
  if (trained.contains("data")) said += "from " + text_of(trained, "data") + ", ";
  std::printf("trained on    %s\n", said.substr(0, said.size() - 2).c_str());
}

// Prints a row for each layer and a shade for each KV head.
void print_shares(const Json& shares) {
  struct Shade {
    double below;
    const char* cell;
  };
  constexpr Shade kShades[] = {{0.25, "··"}, {0.5, "░░"}, {1, "▒▒"}, {2, "▓▓"}, {1e30, "██"}};
  std::printf("\nShare of the pools for each KV head (column) of each layer (row); the mean is 1:\n");
  std::printf("  ·· below 1/4   ░░ below 1/2   ▒▒ below 1   ▓▓ below 2   ██ 2 or more   -- has a window\n\n");
  size_t layer = 0;
  for (const Json& row : shares) {
    std::printf("%5zu  ", layer++);
    for (const Json& share : row) {
      const Shade* shade = kShades;
      while (share.is_number() && share.get<double>() >= shade->below) ++shade;
      std::printf("%s", share.is_number() ? shade->cell : "--");
    }
    std::printf("\n");
  }
}

int info(const HeadsSettings& s) {
  const Model model = s.common.model.empty() ? Model() : open_model(s.common.model);
  const Json info = Json::parse(heads_info(s.input, model));
  if (s.common.json) {
    print_json(info);
    return 0;
  }
  const auto count = [&](const char* key) { return info.at(key).get<uint64_t>(); };
  const std::string target = text_of(info, "target"), input = text_of(info, "input");
  const std::string fingerprint = text_of(info, "fingerprint");
  std::printf("name          %s\n", text_of(info, "name").c_str());
  std::printf("kind          %s, reads %s%s\n", text_of(info, "kind").c_str(), input.c_str(),
              target.empty() ? "" : (", estimates " + target).c_str());
  std::printf("size          %s parameters, %s\n", format_count(count("parameters")).c_str(),
              format_size(count("file_bytes")).c_str());
  std::printf("made for      %s, %s layers, %s heads of %s, %s KV heads\n",
              text_of(info, "architecture").c_str(), format_count(count("layers")).c_str(),
              format_count(count("heads")).c_str(), format_count(count("head_dim")).c_str(),
              format_count(count("kv_heads")).c_str());
  if (info.contains("trained")) print_trained(info.at("trained"));
  std::printf("fingerprint   %s\n",
              fingerprint.empty() ? "none: only the shape of the model can be checked" : fingerprint.c_str());
  if (info.contains("fits"))
    std::printf("fits          %s\n", info.at("fits") ? "yes" : ("no: " + text_of(info, "misfit")).c_str());
  std::printf("\n");
  for (const auto& [key, value] : info.at("metadata").items())
    std::printf("%s = %s\n", visible(key).c_str(), visible(value.get<std::string>()).c_str());
  if (info.contains("shares")) print_shares(info.at("shares"));
  return 0;
}

}  // namespace

Command add_heads(CLI::App& root) {
  static HeadsSettings settings;
  CLI::App* app =
      root.add_subcommand("heads", "Train a retainer, import a published one, and show what a file holds");
  app->require_subcommand(1);
  app->footer(
      "Examples:\n  thimble heads import -m Qwen3-8B-Q4_K_M.gguf -i KVzap-mlp-Qwen3-8B\n"
      "  thimble heads info Qwen3-8B-Q4_K_M.heads.gguf");

  CLI::App* importing = app->add_subcommand("import", "Convert a published retainer to a file for --heads");
  add_model_flag(*importing, settings.common);
  importing
      ->add_option("-i,--input", settings.input,
                   "The published file: a checkpoint of torch.save (Locret, Fast KVzip), a file of "
                   "safetensors, or a folder that holds one (KVzap)")
      ->required()
      ->type_name("FILE");
  importing
      ->add_option(
          "-o,--output", settings.output,
          "The file to write (default: MODEL.heads.gguf next to MODEL.gguf, which is found without --heads)")
      ->type_name("FILE");
  importing
      ->add_option("--kind", settings.kind,
                   "Kind of the retainer (default: the kind that the names of the tensors show)")
      ->type_name("locret|linear|mlp|sink");
  add_json_flag(*importing, settings.common);
  importing->footer(
      "Examples:\n  thimble heads import -m llama-3.1-8b.gguf -i locret-llama-3.1-8b.bin\n"
      "  thimble heads import -m qwen3-8b.gguf -i KVzap-mlp-Qwen3-8B -o KVzap-mlp.heads.gguf");

  CLI::App* showing = app->add_subcommand("info", "Show what the file of a retainer holds");
  showing->add_option("FILE", settings.input, "The file, as --heads takes it")->required()->type_name("FILE");
  showing->add_option("-m,--model", settings.common.model, "A model, to check whether the retainer fits it")
      ->type_name("FILE");
  add_json_flag(*showing, settings.common);
  showing->footer(
      "Examples:\n  thimble heads info model.heads.gguf\n"
      "  thimble heads info model.heads.gguf -m model.gguf --json | jq .shares");
  const Command training = add_heads_train(*app), sharing = add_heads_budgets(*app);
  return {app, [importing, training, sharing] {
            if (training.app->parsed()) return training.run();
            if (sharing.app->parsed()) return sharing.run();
            return importing->parsed() ? import(settings) : info(settings);
          }};
}

}  // namespace app
