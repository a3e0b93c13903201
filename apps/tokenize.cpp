// Implements `thimble tokenize`, which converts text to token ids and back.
#include <cstdio>

#include "apps/generation.h"
#include "apps/options.h"

namespace app {

namespace {

struct TokenizeFlags {
  std::string file, prompt, ids;
  bool no_bos = false, no_special = false, decode = false;
};

int tokenize_command(const Settings& s, const TokenizeFlags& flags) {
  const Model model = open_model(s.model);
  if (flags.decode) {
    const std::string text =
        detokenize(model, parse_ids(flags.ids), flags.no_special ? 0 : THIMBLE_DETOKENIZE_SPECIAL);
    if (s.json) {
      print_json({{"text", text}});
    } else {
      write_answer(text);
      std::printf("\n");
    }
    return 0;
  }
  const std::string text = flags.file.empty() ? flags.prompt : read_file(flags.file);
  const uint32_t how =
      (flags.no_bos ? 0 : THIMBLE_TOKENIZE_ADD_BOS) | (flags.no_special ? 0 : THIMBLE_TOKENIZE_PARSE_SPECIAL);
  if (s.json) {
    const Tokens tokens = tokenize(model, text, how);
    print_json({{"ids", tokens.ids}, {"offsets", tokens.offsets}});
    return 0;
  }
  const std::vector<int32_t> ids = token_ids(model, text, how);
  for (size_t i = 0; i < ids.size(); ++i) std::printf("%s%d", i ? " " : "", ids[i]);
  std::printf("\n");
  return 0;
}

}  // namespace

Command add_tokenize(CLI::App& root) {
  static Settings settings;
  static TokenizeFlags flags;
  CLI::App* app = root.add_subcommand("tokenize", "Turn text into token ids, or token ids into text");
  add_model_flag(*app, settings);
  auto* prompt = app->add_option("-p,--prompt", flags.prompt, "The text")->type_name("TEXT");
  auto* file = app->add_option("-f,--file", flags.file, "The text, - for standard input")
                   ->type_name("FILE")
                   ->excludes(prompt);
  auto* decode = app->add_option("--decode", flags.ids, "Print the text of these ids: \"1 2 3\"")
                     ->type_name("IDS")
                     ->excludes(prompt)
                     ->excludes(file);
  app->add_flag("--no-bos", flags.no_bos, "Do not put BOS before the text")->excludes(decode);
  app->add_flag("--no-special", flags.no_special,
                "Text like <|end|> is text, not a control token; --decode leaves those out");
  add_json_flag(*app, settings);
  app->footer(
      "A file that holds only a vocabulary is enough. With --json the output also has the byte offset of\n"
      "each token.\n\n"
      "Examples:\n"
      "  thimble tokenize -m model.gguf -p \"Once upon a time\"\n"
      "  thimble tokenize -m model.gguf --decode \"57 1024 9\"");
  return {app, [=] {
            flags.decode = decode->count() > 0;
            if (!flags.decode && !prompt->count() && !file->count()) {
              throw UsageError("there is nothing to tokenise; give -p TEXT, -f FILE or --decode IDS");
            }
            return tokenize_command(settings, flags);
          }};
}

}  // namespace app
