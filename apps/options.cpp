// Flags that subcommands share (see options.h).
#include "apps/options.h"

#include <random>
#include <sstream>

#include "apps/sizes.h"

namespace app {

namespace {

struct Choice {
  const char* name;
  int32_t value;
};

// A flag that takes one of a few words and sets an enum of the library.
CLI::Option* add_choice(CLI::App& app, const std::string& name, int32_t& field, std::vector<Choice> choices,
                        const std::string& help) {
  std::string words;
  for (const Choice& c : choices) words += (words.empty() ? "" : "|") + std::string(c.name);
  auto set = [=, &field](const std::string& word) {
    for (const Choice& c : choices) {
      if (word == c.name) {
        field = c.value;
        return;
      }
    }
    throw CLI::ValidationError(name, "'" + word + "' is none of " + words);
  };
  return app.add_option_function<std::string>(name, set, help)->type_name(words);
}

}  // namespace

Settings::Settings() {
  thimble_session_options_init(&session, sizeof session);
  thimble_sampler_options_init(&sampler, sizeof sampler);
}

void add_model_flag(CLI::App& app, Settings& s) {
  app.add_option("-m,--model", s.model, "The model, a GGUF file")->required()->type_name("FILE");
}

void add_json_flag(CLI::App& app, Settings& s) {
  app.add_flag("--json", s.json, "Print JSON on standard output, errors too");
}

void add_policy_flags(CLI::App& app, Settings& s) {
  thimble_session_options& o = s.session;
  const char* memory = "Memory";
  app.add_option_function<std::string>(
         "--mem-budget",
         [&o](const std::string& text) {
           const auto bytes = parse_size(text);
           if (!bytes) {
             throw CLI::ValidationError("--mem-budget",
                                        "'" + text + "' is no size; write 64MiB, 1.5GiB or 8GB");
           }
           o.budget_bytes = *bytes;
         },
         "All that may be allocated: 64MiB, 1.5GiB, 8GB (default: no limit)")
      ->type_name("SIZE")
      ->group(memory);
  app.add_option("-c,--ctx-size", o.context, "Bound on positions (default: what the text needs)")
      ->type_name("N")
      ->group(memory);
  app.add_option(
         "--pool", o.pool,
         "Entries that a head keeps (default: what the heads were trained for, or what fits the budget)")
      ->type_name("N")
      ->group(memory);
  app.add_option("--chunk", o.chunk,
                 "Tokens read at a time (default: what the heads were trained for, or 1024)")
      ->type_name("N")
      ->group(memory);

  const char* retention = "Retention (what stays when the pool is full)";
  auto* retention_flag =
      add_choice(app, "--retention", o.retention,
                 {{"none", THIMBLE_RETENTION_NONE},
                  {"window", THIMBLE_RETENTION_WINDOW},
                  {"random", THIMBLE_RETENTION_RANDOM},
                  {"locret", THIMBLE_RETENTION_LOCRET}},
                 "Everything, the first and the most recent, random entries, or what the heads score highest "
                 "(default: locret with --heads, else none)")
          ->group(retention);
  auto* heads_flag = app.add_option("--heads", s.heads, "Retaining heads of this model, a GGUF file")
                         ->type_name("FILE")
                         ->group(retention);
  add_choice(app, "--retain-scope", o.retain_scope,
             {{"head", THIMBLE_RETAIN_PER_HEAD}, {"layer", THIMBLE_RETAIN_LAYER}},
             "Each KV head keeps its own entries, or all of a layer the same (default: head)")
      ->group(retention);
  app.add_option(
         "--stabilizers", o.stabilizers,
         "Most recent entries kept between chunks (default: a quarter of the pool with heads, else 0)")
      ->type_name("N")
      ->group(retention);
  app.add_option("--local", o.local,
                 "Last tokens of a prompt, never evicted with it (default: 100, 0 without retention)")
      ->type_name("N")
      ->group(retention);
  app.add_option("--protect-init", o.protect_init,
                 "First entries, never evicted (default: 4 for window, else 0)")
      ->type_name("N")
      ->group(retention);

  const char* selection = "Selection (what a new token attends to)";
  add_choice(app, "--selection", o.selection,
             {{"dense", THIMBLE_SELECTION_DENSE}, {"tokenselect", THIMBLE_SELECTION_TOKENSELECT}},
             "All of the pool, or the tokens that the heads vote for (default: dense)")
      ->group(selection);
  std::vector<CLI::Option*> selecting;
  auto number = [&](const char* name, uint32_t& field, const char* help) {
    selecting.push_back(app.add_option(name, field, help)->type_name("N")->group(selection));
  };
  number("--select-k", o.select_k, "Entries that the heads vote for (default: 2048)");
  number("--select-init", o.select_init, "First entries, always attended to (default: 128)");
  number("--select-local", o.select_local, "Most recent entries, always attended to (default: 512)");
  selecting.push_back(
      app.add_option("--select-theta", o.select_theta,
                     "Reuse the last selection above this cosine of the queries (default: 1, never)")
          ->type_name("X")
          ->group(selection));
  number("--select-window", o.vote_window, "Max-pool over the votes, in tokens (default: 0, none)");
  selecting.push_back(
      add_choice(app, "--select-scale", o.vote_scale,
                 {{"none", THIMBLE_SCALE_NONE}, {"sqrt", THIMBLE_SCALE_SQRT}},
                 "Votes as published, or divided by the root of the head size (default: none)")
          ->group(selection));
  selecting.push_back(app.add_flag_callback(
                             "--select-prefill", [&o] { o.select_prefill = 1; },
                             "Select while reading too; then --chunk is at most --select-local")
                          ->group(selection));
  selecting.push_back(
      add_choice(
          app, "--vote", o.vote,
          {{"auto", THIMBLE_VOTE_AUTO}, {"layer", THIMBLE_VOTE_LAYER}, {"group", THIMBLE_VOTE_GROUP}},
          "Who votes together: all heads of a layer, or those of one KV head (default: auto, layer until "
          "something was evicted)")
          ->group(selection));
  add_choice(
      app, "--positions", o.positions,
      {{"list", THIMBLE_POSITIONS_LIST}, {"original", THIMBLE_POSITIONS_ORIGINAL}},
      "Rotary position of an entry: its index among the attended, or its place in the text (default: list)")
      ->group(selection);

  app.parse_complete_callback([&s, retention_flag, heads_flag, selecting] {
    if (retention_flag->count()) s.retention_given = true;
    if (s.retention_given && s.session.retention == THIMBLE_RETENTION_LOCRET && s.heads.empty()) {
      throw UsageError("--retention locret needs --heads FILE");
    }
    if (s.retention_given && s.session.retention != THIMBLE_RETENTION_LOCRET && heads_flag->count()) {
      throw UsageError("--heads is for --retention locret alone; leave one of the two out");
    }
    for (const CLI::Option* option : selecting) {
      if (option->count() && s.session.selection != THIMBLE_SELECTION_TOKENSELECT) {
        throw UsageError(option->get_name() + " needs --selection tokenselect");
      }
    }
  });
}

void add_session_flags(CLI::App& app, Settings& s) {
  app.add_option("--device", s.device, "Where to compute, see 'thimble devices' (default: auto)")
      ->type_name("NAME");
  app.add_option("-t,--threads", s.session.threads, "Worker threads of the CPU (default: one a core)")
      ->type_name("N");
  app.add_option("-s,--seed", s.seed,
                 "Seed of sampling and of --retention random; -1: a random one (default: 0)")
      ->type_name("N")
      ->check(CLI::Range(int64_t{-1}, int64_t{UINT32_MAX}).description(""));
  add_policy_flags(app, s);
}

void add_predict_flag(CLI::App& app, Settings& s) {
  app.add_option(
         "-n,--predict", s.predict,
         "Tokens to generate at most; -1: until the model ends (default: " + std::to_string(s.predict) + ")")
      ->type_name("N")
      ->check(CLI::Range(int64_t{-1}, int64_t{1} << 30).description(""));
}

void add_sampling_flags(CLI::App& app, Settings& s) {
  const char* group = "Sampling";
  app.add_option("--temp", s.sampler.temperature, "Temperature; 0: always the most likely token (default: 0)")
      ->type_name("X")
      ->group(group);
  app.add_option("--top-k", s.sampler.top_k, "Sample from the N most likely; 0: all (default: 40)")
      ->type_name("N")
      ->group(group);
  app.add_option("--top-p", s.sampler.top_p,
                 "Sample from the most likely that make up X; 1: all (default: 0.95)")
      ->type_name("X")
      ->group(group);
  app.add_option("--min-p", s.sampler.min_p,
                 "Leave out what is less likely than X times the best (default: 0.05)")
      ->type_name("X")
      ->group(group);
  app.add_option("--repeat-penalty", s.sampler.repeat_penalty,
                 "Penalty for repeated tokens; 1: none (default: 1)")
      ->type_name("X")
      ->group(group);
  app.add_option("--repeat-last-n", s.sampler.repeat_last, "Tokens that the penalty looks at (default: 64)")
      ->type_name("N")
      ->group(group);
}

void add_chat_flags(CLI::App& app, Settings& s) {
  app.add_option("--system-prompt", s.system, "System prompt; also written -sys")->type_name("TEXT");
  app.add_option(
         "--chat-template", s.chat_template,
         "Chat format: chatml, llama3, llama2, phi3, mistral, zephyr or thimble (default: the model's own)")
      ->type_name("NAME");
}

thimble_session_options session_options(const Settings& s, const Model& model, const Heads& heads,
                                        uint64_t tokens) {
  thimble_session_options o = s.session;
  o.device = s.device.c_str();
  const bool wants_heads = !s.retention_given || o.retention == THIMBLE_RETENTION_LOCRET;
  o.heads = wants_heads ? heads.get() : nullptr;
  o.seed = static_cast<uint32_t>(s.seed);
  // -n 0 still needs room: 0 would mean the default.
  if (s.predict >= 0) o.max_new = static_cast<uint32_t>(std::max<int64_t>(s.predict, 1));
  const bool evicts = s.retention_given ? o.retention != THIMBLE_RETENTION_NONE : heads != nullptr;
  if (!evicts && o.context == 0 && o.positions == THIMBLE_POSITIONS_LIST) {
    const uint64_t trained = model_info(model).context_length;
    uint64_t bound = tokens + o.max_new;
    if (s.predict < 0 || tokens == 0) bound = std::max(bound + 256, trained);
    o.context = static_cast<uint32_t>(std::min<uint64_t>(bound, INT32_MAX));
  }
  return o;
}

Heads heads_of(const Settings& s, const Model& model) {
  return s.heads.empty() ? Heads() : open_heads(model, s.heads);
}

void settle_seed(Settings& s) {
  if (s.seed < 0) s.seed = std::random_device()();
  s.sampler.seed = static_cast<uint64_t>(s.seed);
}

std::string prompt_text(const Settings& s, const Model& model, std::string_view content) {
  std::vector<thimble_message> messages;
  if (!s.system.empty()) messages.push_back(message("system", s.system));
  messages.push_back(message("user", content));
  return chat_text(model, s.chat_template, messages, THIMBLE_CHAT_ADD_ASSISTANT);
}

std::string join_question(std::string_view text, std::string_view question) {
  if (text.empty() || question.empty()) return std::string(text) + std::string(question);
  return std::string(text) + "\n\n" + std::string(question);
}

std::string HelpFormatter::make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const {
  std::string help = app->get_description() + "\n" + make_usage(app, name) + make_positionals(app);
  for (const std::string& group : app->get_groups()) {
    const auto options =
        app->get_options([&](const CLI::Option* o) { return o->nonpositional() && o->get_group() == group; });
    if (!options.empty()) help += make_group(group, false, options);
  }
  return help + make_subcommands(app, mode) + "\n" + make_footer(app);
}

std::string HelpFormatter::make_option(const CLI::Option* option, bool positional) const {
  constexpr size_t kColumn = 30, kWidth = 100;
  std::string line = "  ";
  for (char c : option->get_name(positional, !positional)) line += c == ',' ? ", " : std::string(1, c);
  if (option->get_type_size() != 0 && !positional) line += " " + option->get_type_name();
  if (line.size() + 2 > kColumn)
    line += "\n" + std::string(kColumn, ' ');
  else
    line.resize(kColumn, ' ');
  std::istringstream words(option->get_description() + (option->get_required() ? " (required)" : ""));
  size_t column = kColumn;
  for (std::string word; words >> word;) {
    if (column > kColumn && column + 1 + word.size() > kWidth) {
      line += "\n" + std::string(kColumn, ' ');
      column = kColumn;
    } else if (column > kColumn) {
      line += ' ';
      ++column;
    }
    line += word;
    column += word.size();
  }
  return line + "\n";
}

std::string HelpFormatter::make_usage(const CLI::App* app, std::string name) const {
  std::string usage = "\nUsage: " + (name.empty() ? "thimble" : name);
  if (!app->get_subcommands({}).empty()) return usage + " COMMAND [flags]\n";
  for (const CLI::Option* option :
       app->get_options([](const CLI::Option* o) { return o->get_positional(); })) {
    usage += " " + option->get_name(true, false);
  }
  return usage + " [flags]\n";
}

}  // namespace app
