// The main program of the `thimble` command. It runs a subcommand, and turns every failure into one sentence
// and an exit code.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <new>

#include "apps/generation.h"
#include "apps/options.h"
#include "apps/terminal.h"

namespace app {

namespace {

// Reports an error on standard error, and with --json also as an object on standard output.
int report(bool json, const std::string& code, const std::string& message, int exit_code,
           uint64_t bytes_missing = 0) {
  if (json) {
    Json error = {{"code", code}, {"message", message}};
    if (bytes_missing) error["bytes_missing"] = bytes_missing;
    print_json({{"error", error}});
  }
  std::fprintf(stderr, "thimble: %s\n", visible(message).c_str());
  return exit_code;
}

// The part of the command line that was recognised: "thimble run", "thimble heads import", or only "thimble".
std::string recognised(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return app.get_name() + (chosen.empty() ? "" : " " + recognised(*chosen.front()));
}

// Whether the command line names a complete command.
bool is_complete(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return chosen.empty() ? app.get_subcommands({}).empty() : is_complete(*chosen.front());
}

// Rewrites an error message of CLI11 in the style of this program.
std::string explain(const CLI::ParseError& error, const CLI::App& app) {
  std::string message = error.what();
  const std::vector<std::string> extra = app.remaining(true);
  const bool complete = is_complete(app);
  if (dynamic_cast<const CLI::ExtrasError*>(&error) || (!complete && !extra.empty())) {
    const std::string word = extra.empty() ? "" : extra.front();
    message = word.rfind('-', 0) == 0 ? "unknown flag " + word
              : complete              ? "'" + word + "' is not expected here"
                                      : "unknown command '" + word + "'";
  } else if (!complete) {
    message = "a command is missing";
  }
  while (!message.empty() && (message.back() == '\n' || message.back() == '.')) message.pop_back();
  if (message.rfind("Could", 0) == 0) message[0] = 'c';
  return message + "; '" + recognised(app) + " --help' lists the commands and flags";
}

int run(std::vector<std::string> words) {
  const bool json = std::find(words.begin(), words.end(), "--json") != words.end();
  // llama.cpp's only flag with one dash and three letters.
  std::replace(words.begin(), words.end(), std::string("-sys"), std::string("--system-prompt"));
  std::reverse(words.begin(), words.end());  // CLI11 expects the last word first

  CLI::App app("Reads long texts with a language model inside a byte budget.", "thimble");
  app.formatter(std::make_shared<HelpFormatter>());
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::Throw);
  app.set_help_flag("-h,--help", "Print this help");
  app.set_version_flag("--version", std::string(thimble_build_info()),
                       "Print the version and the features of this build");
  app.require_subcommand(1);
  app.footer("'thimble COMMAND --help' explains a command and its flags.");
  const std::vector<Command> commands = {add_run(app),      add_chat(app),   add_serve(app),   add_plan(app),
                                         add_eval(app),     add_bench(app),  add_inspect(app), add_heads(app),
                                         add_tokenize(app), add_devices(app)};
  auto chosen = [&]() -> const Command* {
    for (const Command& c : commands) {
      if (c.app->parsed()) return &c;
    }
    return nullptr;
  };
  try {
    app.parse(words);
    return chosen()->run();
  } catch (const CLI::Success& wish) {  // --help, --version
    return app.exit(wish);
  } catch (const CLI::ParseError& error) {
    return report(json, "INVALID_ARGUMENT", explain(error, app), kExitUsage);
  } catch (const UsageError& error) {
    return report(json, "INVALID_ARGUMENT",
                  std::string(error.what()) + "; see '" + recognised(app) + " --help'", kExitUsage);
  } catch (const Failure& failure) {
    return report(json, thimble_status_name(failure.status), failure.what(), kExitFailure,
                  failure.bytes_missing);
  } catch (const std::bad_alloc&) {
    return report(json, thimble_status_name(THIMBLE_OUT_OF_MEMORY),
                  thimble_status_text(THIMBLE_OUT_OF_MEMORY), kExitFailure);
  }
}

}  // namespace

// `words` are the arguments in UTF-8.
int run_and_flush(std::vector<std::string> words) {
  const int exit_code = run(std::move(words));
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) {
    std::fprintf(stderr, "thimble: standard output could not be written\n");
    return kExitFailure;
  }
  return exit_code;
}

}  // namespace app

#ifdef _WIN32
// Windows passes UTF-16 arguments to wmain. The arguments of main are in a code page that lacks most letters.
int wmain(int argc, wchar_t** argv) {
  app::write_utf8();
  std::vector<std::string> words;
  for (int i = 1; i < argc; ++i) words.push_back(app::utf8_path(argv[i]));
  return app::run_and_flush(std::move(words));
}
#else
int main(int argc, char** argv) { return app::run_and_flush({argv + 1, argv + argc}); }
#endif
