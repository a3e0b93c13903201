// Implements `thimble inspect`, which shows the contents of a model file.
#include <cstdio>
#include <map>

#include "apps/generation.h"
#include "apps/options.h"
#include "apps/sizes.h"

namespace app {

namespace {

// The name in the key of a named chat template, such as "tool_use"; else empty.
std::string template_name(const std::string& key) {
  constexpr std::string_view kNamed = "tokenizer.chat_template.";
  return key.starts_with(kNamed) ? key.substr(kNamed.size()) : "";
}

// A metadata value shortened to one line that fits a terminal.
std::string shortened(const std::string& value) {
  constexpr size_t kLongest = 160;
  std::string line;
  for (char c : value) {
    if (line.size() > kLongest && (static_cast<unsigned char>(c) & 0xC0) != 0x80)
      return visible(line) + "...";
    line += c == '\n' ? "\\n" : std::string(1, c);
  }
  return visible(line);
}

int inspect(const Settings& s) {
  std::vector<std::string> warnings;
  const Model model = open_model(s.model, &warnings);
  const thimble_model_info info = model_info(model);
  struct OfType {
    uint64_t count = 0, bytes = 0;
  };
  std::map<std::string, OfType> types;
  uint64_t count = 0;
  call(thimble_model_tensor_count, model.get(), &count);
  for (uint64_t i = 0; i < count; ++i) {
    thimble_tensor_info tensor = {};
    tensor.struct_size = sizeof tensor;
    call(thimble_model_tensor_get, model.get(), i, &tensor);
    OfType& type = types[tensor.type];
    ++type.count;
    type.bytes += tensor.bytes;
  }
  call(thimble_model_metadata_count, model.get(), &count);

  if (s.json) {
    Json keys = Json::object(), by_type = Json::array(), templates = Json::array();
    for (uint64_t i = 0; i < count; ++i) {
      const auto [key, value] = model_metadata(model, i);
      keys[key] = value;
      if (const std::string name = template_name(key); !name.empty()) templates.push_back(name);
    }
    for (const auto& [name, type] : types) {
      by_type.push_back({{"type", name}, {"tensors", type.count}, {"bytes", type.bytes}});
    }
    print_json({{"name", info.name},
                {"architecture", info.architecture},
                {"parameters", info.parameters},
                {"file_bytes", info.file_bytes},
                {"files", info.files},
                {"quantization", info.quantization},
                {"layers", info.layers},
                {"d_model", info.d_model},
                {"heads", info.heads},
                {"kv_heads", info.kv_heads},
                {"head_dim", info.head_dim},
                {"d_ff", info.d_ff},
                {"experts", info.experts},
                {"experts_per_token", info.experts_per_token},
                {"window", info.window},
                {"window_layers", info.window_layers},
                {"vocab", info.vocab},
                {"context_length", info.context_length},
                {"kv_bytes_per_token", info.kv_bytes_per_token},
                {"bos", info.bos},
                {"eos", info.eos},
                {"has_weights", info.has_weights != 0},
                {"has_tokenizer", info.has_tokenizer != 0},
                {"tokenizer_problem", tokenizer_problem(model)},
                {"chat_format", info.chat_format},
                {"chat_templates", templates},
                {"warnings", warnings},
                {"chat_problem", info.chat_problem},
                {"tensors", by_type},
                {"metadata", keys}});
    return 0;
  }

  std::printf("name          %s\narchitecture  %s\n", info.name, info.architecture);
  if (info.has_weights) {
    std::printf("size          %s parameters, %s, mostly %s\n", format_count(info.parameters).c_str(),
                format_size(info.file_bytes).c_str(), info.quantization);
    std::printf("shape         %u layers, d_model %u, %u heads of %u, %u KV heads, d_ff %u\n", info.layers,
                info.d_model, info.heads, info.head_dim, info.kv_heads, info.d_ff);
    if (info.experts)
      std::printf("experts       %u a layer, %u for each token\n", info.experts, info.experts_per_token);
    if (info.window_layers)
      std::printf("windows       %u of %u layers attend only to the last %s tokens\n", info.window_layers,
                  info.layers, format_count(info.window).c_str());
    std::printf("context       trained for %s positions, %s of keys and values a token when dense\n",
                format_count(info.context_length).c_str(), format_size(info.kv_bytes_per_token).c_str());
  } else {
    std::printf("size          %s, a vocabulary without weights\n", format_size(info.file_bytes).c_str());
  }
  if (info.files > 1) std::printf("parts         %u files\n", info.files);
  std::printf("vocabulary    %u tokens%s\n", info.vocab, info.has_tokenizer ? "" : ", as ids only");
  if (const std::string problem = tokenizer_problem(model); !problem.empty())
    std::printf("tokenizer     none: %s\n", problem.c_str());

  const std::string format = info.chat_format;
  std::printf("chat format   %s%s%s\n",
              format == "jinja" ? "the template in the file"
              : format.empty()  ? "none; use --chat-template"
                                : (format + ", recognised").c_str(),
              info.chat_problem[0] ? ": " : "", info.chat_problem);
  std::string templates;
  for (uint64_t i = 0; i < count; ++i)
    if (const std::string name = template_name(model_metadata(model, i).first); !name.empty())
      templates += (templates.empty() ? "" : ", ") + name;
  if (!templates.empty()) std::printf("              by --chat-template: %s\n", visible(templates).c_str());
  for (const std::string& warning : warnings) std::printf("warning       %s\n", warning.c_str());
  std::printf("\n");
  for (const auto& [name, type] : types) {
    std::printf("%-8s %6s tensors %12s\n", name.c_str(), format_count(type.count).c_str(),
                format_size(type.bytes).c_str());
  }
  std::printf("\n");
  for (uint64_t i = 0; i < count; ++i) {
    const auto [key, value] = model_metadata(model, i);
    std::printf("%s = %s\n", visible(key).c_str(), shortened(value).c_str());
  }
  return 0;
}

// Prints the information in a saved session.
int inspect_session(const std::string& path, bool json) {
  const Json info = Json::parse(session_info(path));
  if (json) {
    print_json(info);
    return 0;
  }
  const auto number = [&](const char* key) { return info[key].get<uint64_t>(); };
  std::printf("file          a saved session, version %llu, %s\n",
              static_cast<unsigned long long>(number("version")), format_size(number("bytes")).c_str());
  std::printf("tokens        %s read, %s waiting, %s of them generated\n",
              format_count(number("read")).c_str(), format_count(number("waiting")).c_str(),
              format_count(number("generated")).c_str());
  std::printf("entries       %s at most in one of %s heads, %s in all\n",
              format_count(number("entries")).c_str(), format_count(number("heads")).c_str(),
              format_count(number("entries_of_all_heads")).c_str());
  std::printf("note          %s\n\n", format_size(number("note_bytes")).c_str());
  for (const auto& [name, value] : info["settings"].items())
    std::printf("%s = %s\n", visible(name).c_str(), visible(value.get<std::string>()).c_str());
  return 0;
}

}  // namespace

Command add_inspect(CLI::App& root) {
  static Settings settings;
  static std::string saved;
  CLI::App* app = root.add_subcommand("inspect", "Show the contents of a model file or of a saved session");
  add_model_flag(*app, settings);
  CLI::Option* model = app->get_option("--model")->required(false);
  CLI::Option* session = app->add_option("SESSION", saved, "A file of 'thimble run --session' or /save");
  session->excludes(model);
  add_json_flag(*app, settings);
  app->footer(
      "Examples:\n  thimble inspect -m model.gguf\n  thimble inspect -m model.gguf --json | jq .chat_format\n"
      "  thimble inspect book.session");
  return {app, [model, session] {
            if (session->count()) return inspect_session(saved, settings.json);
            if (!model->count()) throw CLI::RequiredError(model->get_name());
            return inspect(settings);
          }};
}

}  // namespace app
