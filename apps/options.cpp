// Flags that subcommands share (see options.h).
#include "apps/options.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <random>
#include <sstream>

#include "apps/sizes.h"
#include "apps/terminal.h"

namespace app {

namespace {

struct Choice {
  const char* name;
  int32_t value;
};

// All policies of a kind, with the names of the library, so that a new policy is a choice without changes
// here.
std::vector<Choice> policies(const char* (*name_of)(int32_t)) {
  std::vector<Choice> all;
  for (int32_t i = 0; const char* name = name_of(i); ++i) all.push_back({name, i});
  return all;
}

constexpr Choice kKvFormats[] = {
    {"f16", THIMBLE_KV_F16}, {"q8_0", THIMBLE_KV_Q8_0}, {"q4_0", THIMBLE_KV_Q4_0}};

// The retentions, and "auto", for which choose_retention() chooses.
std::vector<Choice> retentions() {
  std::vector<Choice> all = policies(thimble_retention_name);
  all.push_back({"auto", THIMBLE_RETENTION_DEFAULT});
  return all;
}

// The choices of a flag as one text: "none|window".
std::string join(const std::vector<Choice>& choices) {
  std::string words;
  for (const Choice& c : choices) words += (words.empty() ? "" : "|") + std::string(c.name);
  return words;
}

// Adds a flag that takes one of a few words and sets an enum of the library.
CLI::Option* add_choice(CLI::App& app, const std::string& name, int32_t& field, std::vector<Choice> choices,
                        const std::string& help) {
  const std::string words = join(choices);
  auto set = [=, &field](const std::string& word) {
    for (const Choice& c : choices) {
      if (word == c.name) {
        field = c.value;
        return;
      }
    }
    throw CLI::ValidationError(name, "'" + word + "' is not one of " + words);
  };
  return app.add_option_function<std::string>(name, set, help)->type_name(words);
}

// Reads --kv: one format for keys and values, or KEYS:VALUES.
void read_kv(const std::string& text, thimble_session_options& o) {
  const auto format = [&](const std::string& word) -> int32_t {
    for (const Choice& c : kKvFormats)
      if (word == c.name) return c.value;
    throw CLI::ValidationError("--kv", "'" + text + "' is not a format of keys and values; write " +
                                           join({std::begin(kKvFormats), std::end(kKvFormats)}) +
                                           ", or two of them as q8_0:q4_0");
  };
  const size_t colon = text.find(':');
  o.key_format = format(text.substr(0, colon));
  o.value_format = colon == text.npos ? o.key_format : format(text.substr(colon + 1));
}

}  // namespace

Settings::Settings() {
  thimble_session_options_init(&session, sizeof session);
  thimble_sampler_options_init(&sampler, sizeof sampler);
}

const char* kv_format_name(int32_t format) { return kKvFormats[format].name; }

void add_model_flag(CLI::App& app, Settings& s) {
  app.add_option("-m,--model", s.model, "The model, a GGUF file")->required()->type_name("FILE");
}

void add_json_flag(CLI::App& app, Settings& s) {
  app.add_flag("--json", s.json, "Print JSON on standard output, including errors");
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
                                        "'" + text + "' is not a size; write 64MiB, 1.5GiB or 8GB");
           }
           o.budget_bytes = *bytes;
         },
         "Limit for all allocated memory: 64MiB, 1.5GiB, 8GB (default: none)")
      ->type_name("SIZE")
      ->group(memory);
  app.add_option(
         "-c,--ctx-size", o.context,
         "Limit on positions (default: none; with original positions, what the model was trained for)")
      ->type_name("N")
      ->group(memory);
  app.add_option("--pool", o.pool,
                 "Entries that a head keeps, on average (default: without retention the whole text, "
                 "otherwise what the heads were trained for, or what fits the budget)")
      ->type_name("N")
      ->group(memory);
  app.add_option("--chunk", o.chunk,
                 "Tokens read at a time (default: what the heads were trained for, or 1024)")
      ->type_name("N")
      ->group(memory);

  app.add_option_function<std::string>(
         "--kv",
         [&s](const std::string& text) {
           read_kv(text, s.session);
           s.kv_given = true;
         },
         "Format of keys and values in the pool: f16, q8_0 (about half the bytes) or q4_0 (about a quarter); "
         "KEYS:VALUES for two formats, as in q8_0:q4_0 (default: f16; with --retention auto and a budget "
         "that has no room for the whole text in f16, but neither --pool nor a store, q8_0)")
      ->type_name("FORMAT[:FORMAT]")
      ->group(memory);

  const char* retention = "Retention (what stays when the pool is full)";
  add_choice(
      app, "--retention", o.retention, retentions(),
      "none: all entries; window: the first and the most recent; random: random ones; locret: those that the "
      "heads score highest; keydiff: those whose keys are least like the others; mix: by the sum of both "
      "scores; tova: those that the last "
      "token attends to most; reread: those that a second reading of each chunk attends to most, which takes "
      "twice the time; adore: those that one small network scores highest for all heads; auto: with --heads "
      "what the heads are for; without, if --pool or --mem-budget may not hold the text, or there is a "
      "store, the "
      "heads in MODEL.heads.gguf or MODEL.locret.gguf next to MODEL.gguf, or keydiff; otherwise none "
      "(default: auto)")
      ->group(retention);
  auto* heads_flag = app.add_option("--heads", s.heads, "Retainer of this model, a GGUF file")
                         ->type_name("FILE")
                         ->group(retention);
  add_choice(
      app, "--retain-scope", o.retain_scope,
      {{"head", THIMBLE_RETAIN_PER_HEAD}, {"layer", THIMBLE_RETAIN_LAYER}},
      "head: each KV head keeps its own entries; layer: all heads of a layer keep the same (default: head)")
      ->group(retention);
  app.add_option("--stabilizers", o.stabilizers,
                 "Most recent entries to keep between chunks (default: as the retainer was trained; 16 with "
                 "adore, which always keeps them; otherwise 0)")
      ->type_name("N")
      ->group(retention);
  app.add_option("--local", o.local,
                 "Last tokens of a prompt, which are not evicted with it (default: 100; 0 with adore and "
                 "without retention)")
      ->type_name("N")
      ->group(retention);
  app.add_option("--protect-init", o.protect_init,
                 "First entries, which are never evicted (default: as the retainer's file says, otherwise 4)")
      ->type_name("N")
      ->group(retention);

  const char* store = "Store (keeps evicted entries, which may come back)";
  const auto add_size = [&](const char* name, uint64_t& field, const char* help) {
    app.add_option_function<std::string>(
           name,
           [name, &field](const std::string& text) {
             const auto bytes = parse_size(text);
             if (!bytes)
               throw CLI::ValidationError(name, "'" + text + "' is not a size; write 64MiB, 1.5GiB or 8GB");
             field = *bytes;
           },
           help)
        ->type_name("SIZE")
        ->group(store);
  };
  add_size("--recall-mem", o.recall_mem_bytes,
           "Keep evicted entries in so much memory for each session or slot, in addition to --mem-budget; a "
           "question calls back those that it needs. Not with --local 0 or latent attention (default: none)");
  add_size("--recall-disk", o.recall_disk_bytes,
           "Keep them in a temporary file of at most this size instead, in $TMPDIR; on a tmpfs it takes "
           "memory (default: none)");
  app.add_option_function<std::string>(
         "--recall",
         [&o](const std::string& text) {
           if (text == "all")
             o.recall = THIMBLE_RECALL_ALL;
           else if (!CLI::detail::lexical_cast(text, o.recall) || o.recall > INT32_MAX)
             throw CLI::ValidationError("--recall", "'" + text + "' is neither a number nor all");
         },
         "Maximum number of entries of each head that come back. all: no entry comes back, and the end "
         "of the prompt and all generated tokens attend to the whole store, which is exact up to its format; "
         "`thimble plan` says how many bytes a token then reads. A selection does not allow all "
         "(default: 512)")
      ->type_name("N|all")
      ->group(store);
  app.add_flag("--recall-prefill", o.recall_prefill,
               "With --recall all, attend to the whole store while a text is read, too: as exact as dense "
               "attention, and as slow")
      ->group(store);
  app.add_option("--recall-every", o.recall_every,
                 "Choose again what comes back after every N generated tokens; not with --recall all "
                 "(default: 128)")
      ->type_name("N")
      ->group(store);
  add_choice(app, "--recall-format", o.recall_format, {std::begin(kKvFormats), std::end(kKvFormats)},
             "Format in the store of keys and values that the pool has in f16 (default: f16)")
      ->group(store);

  auto* rebuild = app.add_option("--rebuild", o.rebuild,
                                 "With adore: evicted tokens that a generated token reads again (default: 0)")
                      ->type_name("N")
                      ->group(retention);
  app.add_option("--rebuild-every", o.rebuild_every,
                 "Generated tokens from one such reading to the next (default: 1)")
      ->type_name("N")
      ->needs(rebuild)
      ->group(retention);

  const char* selection = "Selection (what a generated token attends to)";
  add_choice(app, "--selection", o.selection, policies(thimble_selection_name),
             "dense: the whole pool; tokenselect: the tokens that the heads vote for; quest: the pages whose "
             "keys may match best (default: dense)")
      ->group(selection);
  // Collects the flags that belong to one selection only, or to all selections but dense.
  constexpr int32_t kChoosing = -1;
  struct Belongs {
    const CLI::Option* option;
    int32_t selection;
  };
  std::vector<Belongs> selecting;
  auto belongs = [&](CLI::Option* option, int32_t to) {
    selecting.push_back({option->group(selection), to});
  };
  auto number = [&](const char* name, uint32_t& field, int32_t to, const char* help) {
    belongs(app.add_option(name, field, help)->type_name("N"), to);
  };
  constexpr int32_t kVoting = THIMBLE_SELECTION_TOKENSELECT, kPaging = THIMBLE_SELECTION_QUEST;
  number("--select-k", o.select_k, kChoosing, "Entries to select (default: 2048)");
  number("--select-init", o.select_init, kVoting,
         "First entries, which are always attended to (default: 128)");
  number("--select-local", o.select_local, kVoting,
         "Most recent entries, which are always attended to (default: 512)");
  belongs(
      app.add_option("--select-theta", o.select_theta,
                     "Reuse the last selection if the cosine of the queries is above X (default: 1, never)")
          ->type_name("X"),
      kVoting);
  number("--select-window", o.vote_window, kVoting,
         "Width of the max-pool over votes, in tokens (default: 0, none)");
  belongs(
      add_choice(
          app, "--select-scale", o.vote_scale, {{"none", THIMBLE_SCALE_NONE}, {"sqrt", THIMBLE_SCALE_SQRT}},
          "none: votes as published; sqrt: scores divided by the root of the head size (default: none)"),
      kVoting);
  auto* reading = app.add_flag_callback(
      "--select-prefill", [&o] { o.select_prefill = 1; },
      "Also select while reading, at most --select-local tokens at a time (default without a retention)");
  auto* not_reading = app.add_flag_callback(
      "--no-select-prefill", [&o] { o.select_prefill = 0; }, "Read densely (default with a retention)");
  belongs(reading, kVoting);
  belongs(not_reading->excludes(reading), kVoting);
  belongs(
      add_choice(app, "--vote", o.vote,
                 {{"auto", THIMBLE_VOTE_AUTO}, {"layer", THIMBLE_VOTE_LAYER}, {"group", THIMBLE_VOTE_GROUP}},
                 "Heads that vote together: layer, all heads of a layer; group, those of one KV head "
                 "(default: auto, group with a retention, otherwise layer)"),
      kVoting);
  number("--select-page", o.select_page, kPaging, "Entries per page (default: 16)");
  number("--dense-layers", o.dense_layers, kPaging, "First layers, which attend to all entries (default: 2)");
  auto* positions_flag =
      add_choice(app, "--positions", o.positions,
                 {{"list", THIMBLE_POSITIONS_LIST}, {"original", THIMBLE_POSITIONS_ORIGINAL}},
                 "Rotary position of an entry: list, its index among the attended entries; original, its "
                 "position in the text (default: list; original for quest)")
          ->group(selection);

  app.parse_complete_callback([&s, heads_flag, selecting, positions_flag] {
    const int32_t asked = s.session.retention;
    if (needs_heads(asked) && s.heads.empty()) {
      throw UsageError("--retention " + std::string(thimble_retention_name(asked)) + " needs --heads FILE");
    }
    const bool shares = thimble_retention_traits(asked) & THIMBLE_TRAIT_SHARES;
    if (asked != THIMBLE_RETENTION_DEFAULT && !needs_heads(asked) && !shares && heads_flag->count()) {
      throw UsageError(
          "--heads is for --retention locret, mix and adore, and keydiff takes its shares; leave one of the "
          "two out");
    }
    for (const Belongs& flag : selecting) {
      const bool fits = flag.selection == kChoosing ? s.session.selection != THIMBLE_SELECTION_DENSE
                                                    : s.session.selection == flag.selection;
      if (!flag.option->count() || fits) continue;
      std::vector<Choice> choosing = policies(thimble_selection_name);
      choosing.erase(choosing.begin() + THIMBLE_SELECTION_DENSE);
      throw UsageError(
          flag.option->get_name() + " needs --selection " +
          (flag.selection == kChoosing ? join(choosing) : thimble_selection_name(flag.selection)));
    }
    if (s.session.selection == kPaging && positions_flag->count() &&
        s.session.positions == THIMBLE_POSITIONS_LIST) {
      throw UsageError("--selection quest uses positions in the text; leave --positions list out");
    }
  });
}

void change_policies(Settings& s, std::vector<std::string> words) {
  CLI::App flags;
  flags.set_help_flag();
  add_policy_flags(flags, s);
  std::reverse(words.begin(), words.end());  // CLI11 expects the last word first
  flags.parse(words);
}

void add_session_flags(CLI::App& app, Settings& s) {
  app.add_option("--device", s.device, "Device to compute on, see 'thimble devices' (default: auto)")
      ->type_name("NAME");
  app.add_option("-t,--threads", s.session.threads,
                 "Worker threads of the CPU, with a card only for its store of evicted entries (default: one "
                 "for each core that this process may use, for a card at most 16)")
      ->type_name("N");
  app.add_option("-s,--seed", s.seed,
                 "Seed of sampling and of --retention random; -1: a random one (default: 0)")
      ->type_name("N")
      ->check(CLI::Range(int64_t{-1}, int64_t{UINT32_MAX}).description(""));
  add_policy_flags(app, s);
}

void add_predict_flag(CLI::App& app, Settings& s) {
  app.add_option("-n,--predict", s.predict,
                 "Maximum number of tokens to generate; -1: until the model ends its answer (default: " +
                     std::to_string(s.predict) + ")")
      ->type_name("N")
      ->check(CLI::Range(int64_t{-1}, int64_t{1} << 30).description(""));
}

void add_draft_flags(CLI::App& app, Settings& s) {
  const char* group = "Drafts (guesses of the next tokens, read in one step)";
  const auto choose = [&s](const std::string& word) {
    thimble_session_options& o = s.session;
    o.draft = THIMBLE_DRAFT_NONE;
    s.draft_model.reset();
    if (word == "lookup") {
      o.draft = THIMBLE_DRAFT_LOOKUP;
    } else if (word == "mtp") {
      o.draft = THIMBLE_DRAFT_MTP;
    } else if (word != "none") {
      o.draft = THIMBLE_DRAFT_MODEL;
      s.draft_model = open_model(word);
    }
    o.draft_model = s.draft_model.get();
  };
  app.add_option_function<std::string>(
         "--draft", choose,
         "lookup: guess what followed the last tokens earlier in the text, which is faster if the answer "
         "repeats parts of it, as in editing code; mtp: guess with the model file's layer "
         "for multi-token prediction; FILE: guess with this smaller model of the same vocabulary (default: "
         "none)")
      ->type_name("none|lookup|mtp|FILE")
      ->group(group);
  app.add_option("--draft-max", s.session.draft_tokens,
                 "Tokens of a draft, at most 15 (default: the number that generates fastest, by measurement)")
      ->type_name("N")
      ->group(group);
}

void add_sampling_flags(CLI::App& app, Settings& s) {
  const char* group = "Sampling";
  app.add_option("--temp", s.sampler.temperature, "Temperature; 0: always the most likely token (default: 0)")
      ->type_name("X")
      ->group(group);
  app.add_option("--top-k", s.sampler.top_k, "Sample from the N most likely tokens; 0: all (default: 40)")
      ->type_name("N")
      ->group(group);
  app.add_option("--top-p", s.sampler.top_p,
                 "Sample from the most likely tokens with a total probability of X; 1: all (default: 0.95)")
      ->type_name("X")
      ->group(group);
  app.add_option("--min-p", s.sampler.min_p,
                 "Leave out tokens less likely than X times the most likely one (default: 0.05)")
      ->type_name("X")
      ->group(group);
  app.add_option("--repeat-penalty", s.sampler.repeat_penalty,
                 "Penalty for repeated tokens; 1: none (default: 1)")
      ->type_name("X")
      ->group(group);
  app.add_option("--repeat-last-n", s.sampler.repeat_last,
                 "Last tokens that the penalty applies to (default: 64)")
      ->type_name("N")
      ->group(group);
  app.add_option("--presence-penalty", s.sampler.presence_penalty,
                 "Subtracted from the logits of tokens that the answer has (default: 0)")
      ->type_name("X")
      ->group(group);
  app.add_option("--frequency-penalty", s.sampler.frequency_penalty,
                 "Subtracted for each time that the answer has the token (default: 0)")
      ->type_name("X")
      ->group(group);
}

void add_chat_flags(CLI::App& app, Settings& s) {
  app.add_option("--system-prompt", s.system, "System prompt; also written -sys")->type_name("TEXT");
  const auto choose = [&s](const std::string& word) {
    // A path contains a dot or a slash. The names of formats and of the model's templates contain neither,
    // and the library knows them.
    if (word.find_first_of("./\\") == std::string::npos)
      s.chat.format = word;
    else
      s.chat.source = read_file(word);
  };
  app.add_option_function<std::string>(
         "--chat-template", choose,
         "Chat format: chatml, llama3, llama2, phi3, mistral, zephyr or thimble; the name of a further "
         "template in the model's file, such as tool_use; or the path of a Jinja file, ./FILE or FILE.jinja "
         "(default: the model's own template)")
      ->type_name("NAME|FILE");
  app.add_flag("--parse-special", s.chat.parses_content,
               "Read text that spells a control token, such as <|im_end|>, as that token (default: as text)");
  app.add_option("--chat-vars", s.chat.variables,
                 "Further variables for the template, a JSON object: '{\"enable_thinking\": false}', tools")
      ->type_name("JSON");
}

void add_grammar_flags(CLI::App& app, Settings& s) {
  auto* schema = app.add_option("--json-schema", s.json_schema,
                                "Answer with JSON that this JSON schema allows (docs/grammars.md)")
                     ->type_name("FILE");
  app.add_option("--grammar", s.grammar, "Answer with a text of this grammar, in llama.cpp's notation (GBNF)")
      ->type_name("FILE")
      ->excludes(schema);
}

Grammar make_grammar(const Settings& s, const Model& model) {
  if (s.json_schema.empty() && s.grammar.empty()) return {};
  const bool is_schema = !s.json_schema.empty();
  const std::string text = read_file(is_schema ? s.json_schema : s.grammar);
  thimble_grammar* grammar = nullptr;
  call(is_schema ? thimble_grammar_create_json_schema : thimble_grammar_create_gbnf, model.get(), text.data(),
       text.size(), &grammar);
  return Grammar(grammar);
}

thimble_session_options session_options(const Settings& s, const Model& model, const Retention& retention,
                                        uint64_t tokens) {
  thimble_session_options o = s.session;
  o.device = s.device.c_str();
  o.retention = retention.policy;
  o.heads = retention.heads.get();
  if (retention.kv_format != THIMBLE_KV_F16) o.key_format = o.value_format = retention.kv_format;
  o.seed = static_cast<uint32_t>(s.seed);
  constexpr uint64_t kOpenEnd = 256;  // tokens assumed for an answer without a limit
  // Even for -n 0, max_new must be at least 1, because 0 means the default.
  if (s.predict >= 0) o.max_new = static_cast<uint32_t>(std::max<int64_t>(s.predict, 1));
  const uint32_t traits = thimble_retention_traits(o.retention);
  // A record of every token grows with the context, so the context is set to hold the known text.
  if (traits & THIMBLE_TRAIT_REMEMBERS && !o.context && tokens) {
    const uint64_t generated = s.predict >= 0 ? static_cast<uint64_t>(s.predict) : kOpenEnd;
    o.context = static_cast<uint32_t>(std::min<uint64_t>(
        std::max<uint64_t>(tokens + generated, model_info(model).context_length), INT32_MAX));
  }
  // If nothing is evicted, the pool must hold the text; the room for the answer is added to it. The length is
  // not set as the context, because that is the user's limit on positions, the same for every policy. If the
  // text is not known, or the answer has no limit, the library chooses a pool for all tokens that the model
  // was trained for.
  const bool as_trained =
      tokens == 0 || (s.predict < 0 && tokens + kOpenEnd < model_info(model).context_length);
  if (!(traits & THIMBLE_TRAIT_EVICTS) && !o.pool && !o.context && !as_trained)
    o.pool = static_cast<uint32_t>(std::min<uint64_t>(tokens, INT32_MAX));
  return o;
}

namespace {

// Whether the user asked for a pool or a budget that may not hold the whole text with entries of this format.
bool may_not_fit(const Settings& s, const Model& model, uint64_t tokens, int32_t kv_format) {
  if (!s.session.pool && !s.session.budget_bytes) return false;
  if (tokens == 0) return true;
  if (s.session.pool) return s.session.pool < tokens;
  thimble_session_options whole = session_options(s, model, {THIMBLE_RETENTION_NONE, {}, kv_format}, tokens);
  whole.pool = static_cast<uint32_t>(std::min<uint64_t>(tokens, INT32_MAX));
  try {
    plan(model, whole);
  } catch (const Failure& failure) {
    return failure.status == THIMBLE_BUDGET || kv_format != THIMBLE_KV_F16;  // which the model may lack
  }
  return false;
}

constexpr const char* kHeadsEndings[] = {".heads.gguf", ".locret.gguf"};

std::filesystem::path beside(const std::string& model_path, const char* ending) {
  return native_path(model_path).replace_extension(ending);
}

// Opens the heads stored next to the model, if they belong to it; else returns null.
Heads heads_beside(const std::string& model_path, const Model& model, std::string& name) {
  for (const char* ending : kHeadsEndings) {
    const std::filesystem::path path = beside(model_path, ending);
    if (!std::filesystem::exists(path)) continue;
    try {
      name = utf8_path(path.filename());
      return open_heads(model, utf8_path(path));
    } catch (const Failure& failure) {
      std::fprintf(stderr, "thimble: warning: %s is ignored: %s\n", visible(name).c_str(), failure.what());
    }
  }
  return {};
}

}  // namespace

std::string heads_path(const std::string& model_path) {
  return utf8_path(beside(model_path, kHeadsEndings[0]));
}

bool needs_heads(int32_t retention) {
  return thimble_retention_traits(retention) & (THIMBLE_TRAIT_RETAINER | THIMBLE_TRAIT_CONTROLLER);
}

bool can_score(int32_t heads, int32_t retention) {
  if (heads == THIMBLE_RETENTION_DEFAULT) return false;
  const bool controller = thimble_retention_traits(heads) & THIMBLE_TRAIT_CONTROLLER;
  return thimble_retention_traits(retention) &
         (controller ? THIMBLE_TRAIT_CONTROLLER : THIMBLE_TRAIT_RETAINER);
}

namespace {

// Retention by the heads next to the model, or without such heads by KeyDiff.
Retention evicting(const Settings& s, const Model& model) {
  std::string chosen;
  Retention retention{THIMBLE_RETENTION_LOCRET, heads_beside(s.model, model, chosen)};
  if (retention.heads) {
    retention.policy = thimble_heads_retention(retention.heads.get());
  } else {
    // KeyDiff compares the keys of one head, so it cannot keep the same entries in all heads.
    retention.policy =
        s.session.retain_scope == THIMBLE_RETAIN_LAYER ? THIMBLE_RETENTION_WINDOW : THIMBLE_RETENTION_KEYDIFF;
    chosen = thimble_retention_name(retention.policy);
  }
  std::fprintf(
      stderr,
      "thimble: retention by %s, as the text may be longer than the pool; --retention chooses another\n",
      chosen.c_str());
  return retention;
}

bool has_store(const thimble_session_options& o) { return o.recall_mem_bytes || o.recall_disk_bytes; }

// A store gets its entries as the pool has them, and is to be exact unless the user says otherwise.
bool chooses_format(const Settings& s) {
  const thimble_session_options& o = s.session;
  return o.retention == THIMBLE_RETENTION_DEFAULT && o.budget_bytes && !o.pool && !s.kv_given &&
         !has_store(o);
}

// Changes the format to q8_0 if the budget has no room for the whole text in f16, and the model and the
// device can store it.
void choose_format(const Settings& s, const Model& model, uint64_t tokens, uint32_t clones,
                   Retention& retention) {
  const auto pool_with = [&](int32_t kv_format) -> uint64_t {
    retention.kv_format = kv_format;
    try {
      thimble_session_options o = session_options(s, model, retention, tokens);
      leave_room_for_clones(model, o, clones);
      return plan(model, o).pool;
    } catch (const Failure&) {
      return 0;
    }
  };
  const uint64_t limit = s.session.context ? s.session.context : model_info(model).context_length,
                 in_f16 = pool_with(THIMBLE_KV_F16);
  if (in_f16 < (tokens ? tokens : limit) && pool_with(THIMBLE_KV_Q8_0) > in_f16)
    std::fprintf(stderr,
                 "thimble: keys and values as q8_0, so that the budget holds more of them; --kv chooses "
                 "another format\n");
  else
    retention.kv_format = THIMBLE_KV_F16;
}

}  // namespace

Retention choose_retention(const Settings& s, const Model& model, uint64_t tokens, uint32_t clones) {
  const bool chooses = s.session.retention == THIMBLE_RETENTION_DEFAULT;
  Retention retention{chooses ? THIMBLE_RETENTION_NONE : s.session.retention, {}};
  if (!s.heads.empty()) {
    retention.heads = open_heads(model, s.heads);
    if (chooses) retention.policy = thimble_heads_retention(retention.heads.get());
  } else if (chooses && (has_store(s.session) ||  // which is for what is evicted
                         (may_not_fit(s, model, tokens, THIMBLE_KV_F16) &&
                          (!chooses_format(s) || may_not_fit(s, model, tokens, THIMBLE_KV_Q8_0))))) {
    retention = evicting(s, model);
  }
  if (chooses_format(s)) choose_format(s, model, tokens, clones, retention);
  return retention;
}

// A clone shares the weights of a model that drafts; the plan does not say how much of `draft` they are.
uint64_t clone_bytes(const thimble_memory& m) { return m.pool_bytes + m.view + m.workspace + m.io + m.draft; }

void leave_room_for_clones(const Model& model, thimble_session_options& options, uint32_t clones) {
  const thimble_memory alone = plan(model, options);
  const uint64_t budget = options.budget_bytes;
  auto fits = [=](const thimble_memory& m) { return m.total + clones * clone_bytes(m) <= budget; };
  // Next to weights in the host's memory, one session takes all of the budget.
  if (clones > 0 && alone.streamed && alone.weights)
    throw Failure(
        THIMBLE_BUDGET,
        "the budget of " + format_size(budget) +
            " has no room for all weights, and so none for a second session; choose a larger budget, "
            "or a single slot or question");
  if (budget == 0 || options.pool != 0 || fits(alone)) return;
  thimble_session_options trial = options;
  trial.budget_bytes = 0;
  uint32_t low = 0, high = alone.pool;  // low fits or is 0; high does not fit
  while (high - low > 1) {
    trial.pool = low + (high - low) / 2;
    // The library refuses a pool that is too small for the other options, and reports it when the session is
    // created.
    auto memory = thimble_memory{};
    memory.struct_size = sizeof memory;
    const bool ok = thimble_session_plan(model.get(), &trial, &memory, nullptr) == THIMBLE_OK;
    (ok && !fits(memory) ? high : low) = trial.pool;
  }
  options.pool = std::max(low, 1u);
}

int32_t end_of_turn(const Model& model, const ChatStyle& style) {
  const std::string text = chat_text(model, style, {message("user", "a"), message("assistant", "b")}, 0);
  int32_t last = -1;
  for (int32_t id : tokenize(model, text, THIMBLE_TOKENIZE_PARSE_SPECIAL).ids) {
    if (thimble_token_ends(model.get(), id)) last = id;
  }
  return last < 0 ? model_info(model).eos : last;
}

void settle_seed(Settings& s) {
  if (s.seed < 0) s.seed = std::random_device()();
  s.sampler.seed = static_cast<uint64_t>(s.seed);
}

bool continues_text(const Settings& s, const Model& model) {
  return s.chat.format.empty() && s.chat.source.empty() && !has_chat_template(model);
}

void note_continued_text(const Settings& s, const Model& model) {
  if (!continues_text(s, model)) return;
  std::fprintf(stderr,
               "thimble: the model's file has no chat template, so the text is continued as it is; "
               "--chat-template NAME writes it as a question\n");
}

uint32_t prompt_flags(const Settings& s, const Model& model) {
  return continues_text(s, model) && !s.chat.parses_content ? THIMBLE_TOKENIZE_ADD_BOS : kPromptFlags;
}

std::string prompt_text(const Settings& s, const Model& model, std::string_view content) {
  if (continues_text(s, model)) {
    if (!s.system.empty() || !s.chat.variables.empty())
      throw UsageError(
          "the model's file has no chat template that could take --system-prompt and --chat-vars; name a "
          "format with --chat-template NAME");
    return std::string(content);
  }
  std::vector<thimble_message> messages;
  if (!s.system.empty()) messages.push_back(message("system", s.system));
  messages.push_back(message("user", content));
  return chat_text(model, s.chat, messages, THIMBLE_CHAT_ADD_ASSISTANT);
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
