// Implements `thimble chat`, a conversation in a terminal.
#include <algorithm>
#include <cstdio>
#include <sstream>

#include "apps/generation.h"
#include "apps/options.h"
#include "apps/sizes.h"

namespace app {

namespace {

const char* kCommands =
    "/open FILE          read a file; your next message is put after its text\n"
    "/memory             show the memory that the session uses\n"
    "/policy             show the policies in use\n"
    "/policy NAME=VALUE  change them, by the names of the flags: /policy retention=window pool=1024\n"
    "                    (this makes a new session and starts a new conversation)\n"
    "/save FILE          save the conversation to a file\n"
    "/load FILE          continue a saved conversation; the model and the policies must be the same\n"
    "/reset              start a new conversation\n"
    "/help               show this list\n"
    "/quit               quit; the end of the input quits too\n"
    "Ctrl-C stops an answer or a prefill. At the prompt, press it twice to quit.\n";

class Chat {
 public:
  explicit Chat(const Settings& settings)
      : settings_(settings),
        model_(open_model(settings.model)),
        retention_(choose_retention(settings_, model_, 0)) {
    need_tokenizer(model_);
    if (continues_text(settings_, model_))
      throw Failure(THIMBLE_UNSUPPORTED,
                    "the model's file has no chat template, as base models have none: 'thimble run -p TEXT' "
                    "continues text with it, and --chat-template NAME converses in a format that you name");
    settle_seed(settings_);
    grammar_ = make_grammar(settings_, model_);
    end_of_turn_ = end_of_turn(model_, settings_.chat);
    create();
  }

  void loop();

 private:
  void create();
  void start_afresh();
  // Executes a command line. Returns false if the loop is to end.
  bool obey(const std::string& line);
  void open(const std::string& path);
  void say(const std::string& line);
  void save(const std::string& path);
  void load(const std::string& path);
  void show_memory();
  void show_policy();
  void change_policy(const std::string& words);

  // The text of the user's next message, as the session is to read it.
  std::string message_text(const std::string& content) const;
  Tokens message_tokens(const std::string& text) const;
  // Feeds the message's first `count` tokens, except those that were fed before. With `flush`, reads all of
  // them. Returns false after Ctrl-C; place_.fed then has the tokens that the session took.
  bool read(const Tokens& tokens, size_t count, bool flush);
  // Ends an answer that was cut off, so that the next message follows a complete one.
  void end_turn();
  // Called when the session holds the whole message, so that an answer comes next.
  void message_is_over(const std::string& content);

  Settings settings_;
  Model model_;
  Retention retention_;
  Progress progress_;
  Grammar grammar_;
  Session session_;
  int32_t end_of_turn_ = -1;

  // The state of the conversation, which /save stores with the session.
  struct Place {
    Json messages = Json::array();  // messages that the session holds: {"role", "content"}
    bool first = true;              // the session holds no message yet
    bool cut = false;               // the session's last answer lacks the end-of-turn token
    std::string opened;             // text that precedes the next message
    std::vector<int32_t> fed;       // tokens of the next message that were already fed
    uint64_t message_start = 0;     // where in the stream the next message begins, once any was fed
  } place_;
};

void Chat::create() {
  thimble_session_options options = session_options(settings_, model_, retention_, 0);
  progress_.attach(options);
  session_ = create_session(model_, options);
  call(thimble_session_set_sampler, session_.get(), &settings_.sampler);
  start_afresh();
}

void Chat::start_afresh() { place_ = {}; }

std::string Chat::message_text(const std::string& content) const {
  std::vector<thimble_message> messages;
  if (place_.first && !settings_.system.empty()) messages.push_back(message("system", settings_.system));
  messages.push_back(message("user", content));
  return chat_text(model_, settings_.chat, messages,
                   THIMBLE_CHAT_ADD_ASSISTANT | (place_.first ? 0 : THIMBLE_CHAT_CONTINUE));
}

Tokens Chat::message_tokens(const std::string& text) const {
  return tokenize(model_, text,
                  THIMBLE_TOKENIZE_PARSE_SPECIAL | (place_.first ? THIMBLE_TOKENIZE_ADD_BOS : 0));
}

bool Chat::read(const Tokens& tokens, size_t count, bool flush) {
  if (place_.fed.empty()) place_.message_start = stats(session_).position;
  const std::vector<int32_t> more(tokens.ids.begin() + static_cast<std::ptrdiff_t>(place_.fed.size()),
                                  tokens.ids.begin() + static_cast<std::ptrdiff_t>(count));
  const bool done =
      flush ? read_prompt(session_, more, progress_)
            : call_unless_interrupted(thimble_session_feed, session_.get(), more.data(), more.size());
  progress_.clear();
  // After Ctrl-C, the session may hold only a part of the message.
  const uint64_t held = stats(session_).position - place_.message_start;
  place_.fed.assign(tokens.ids.begin(), tokens.ids.begin() + static_cast<std::ptrdiff_t>(held));
  return done;
}

void Chat::end_turn() {
  call(thimble_session_set_grammar, session_.get(), nullptr);
  if (place_.cut && end_of_turn_ >= 0) call(thimble_session_accept, session_.get(), end_of_turn_);
  place_.cut = false;
}

void Chat::message_is_over(const std::string& content) {
  if (place_.first && !settings_.system.empty())
    place_.messages.push_back({{"role", "system"}, {"content", settings_.system}});
  place_.messages.push_back({{"role", "user"}, {"content", content}});
  place_.first = false;
  place_.opened.clear();
  place_.fed.clear();
}

void Chat::open(const std::string& path) {
  const std::string text = read_file(path);
  const Interruptible interruptible(session_);
  end_turn();
  place_.opened = join_question(place_.opened, text);
  // The message is not known yet, so this feeds only tokens that no message can change: tokens that end at
  // least kMargin bytes before the place where two different messages diverge. In practice, a tokenizer does
  // not look ahead 64 bytes; if one does, say() takes back the tokens that differ.
  constexpr uint64_t kMargin = 64;
  const std::string one = message_text(join_question(place_.opened, "a")),
                    other = message_text(join_question(place_.opened, "1"));
  const auto differs = std::mismatch(one.begin(), one.end(), other.begin(), other.end()).first;
  const uint64_t sure_bytes = static_cast<uint64_t>(differs - one.begin());
  const Tokens tokens = message_tokens(one);
  size_t sure = 0;
  while (sure < tokens.ids.size() && tokens.offsets[sure] + kMargin <= sure_bytes) ++sure;
  const bool goes_on =
      sure > place_.fed.size() && std::equal(place_.fed.begin(), place_.fed.end(), tokens.ids.begin());
  const bool done = !goes_on || read(tokens, sure, false);
  std::fprintf(
      stderr, "(%s: %s tokens%s)\n", path.c_str(), format_count(place_.fed.size()).c_str(),
      done ? " accepted; the last of them are read with your next message"
           : " read before you stopped; the rest is read with your next message, or dropped with /reset");
}

void Chat::say(const std::string& line) {
  const Interruptible interruptible(session_);
  end_turn();
  Tokens tokens = message_tokens(message_text(join_question(place_.opened, line)));
  const auto same =
      std::mismatch(place_.fed.begin(), place_.fed.end(), tokens.ids.begin(), tokens.ids.end()).first;
  if (same != place_.fed.end()) {
    // The fed tokens can differ if a message was stopped while it was read, or if the tokenizer looks far
    // ahead. Takes back the tokens that differ. If their entries were evicted, keeps the stopped message as
    // it is.
    const uint64_t position = place_.message_start + static_cast<uint64_t>(same - place_.fed.begin());
    if (thimble_session_rewind(session_.get(), position, nullptr) == THIMBLE_OK) {
      place_.fed.erase(same, place_.fed.end());
    } else {
      message_is_over(place_.opened);
      place_.cut = true;
      end_turn();
      tokens = message_tokens(message_text(line));
    }
  }
  if (!read(tokens, tokens.ids.size(), true)) {
    std::fprintf(stderr, "(stopped after %s tokens; your next message replaces this one)\n",
                 format_count(place_.fed.size()).c_str());
    return;
  }
  message_is_over(join_question(place_.opened, line));
  Answer answer = generate(model_, session_, settings_.predict, write_answer,
                           {grammar_.get(), opened_thought(message_text("x"))});
  // The token that Ctrl-C stopped is already sampled and will be in the conversation, so it is shown too.
  int32_t token = -1;
  const bool stopped = answer.finish == Finish::kInterrupted;
  const size_t shown = answer.text.size();
  if (stopped && call_unless_interrupted(thimble_session_step, session_.get(), &token)) {
    if (thimble_token_ends(model_.get(), token))
      answer.finish = Finish::kStop;
    else
      write_answer((answer.text += token_text(session_, token)).substr(shown));
  }
  place_.messages.push_back({{"role", "assistant"}, {"content", answer.text}});
  std::printf("\n");
  std::fflush(stdout);
  place_.cut = answer.finish != Finish::kStop;
  if (stopped) std::fprintf(stderr, "(stopped)\n");
  if (answer.finish == Finish::kLength)
    std::fprintf(stderr, "(cut after %zu tokens, see -n)\n", answer.tokens.size());
  if (answer.finish == Finish::kContext)
    std::fprintf(
        stderr,
        "(the pool is full; start a new conversation with /reset, or change the pool with /policy)\n");
}

void Chat::save(const std::string& path) {
  const Interruptible interruptible(session_);
  const Json note = {{"messages", place_.messages}, {"first", place_.first},
                     {"cut", place_.cut},           {"opened", place_.opened},
                     {"fed", place_.fed},           {"message_start", place_.message_start}};
  save_session(session_, path, note.dump(-1, ' ', false, Json::error_handler_t::replace));
  std::fprintf(stderr, "(%s: %zu messages, %s tokens)\n", path.c_str(), place_.messages.size(),
               format_count(stats(session_).position).c_str());
}

void Chat::load(const std::string& path) {
  const Json note = Json::parse(session_note(path), nullptr, false);
  Place place;
  try {
    note.at("messages").get_to(place.messages);
    note.at("first").get_to(place.first);
    note.at("cut").get_to(place.cut);
    note.at("opened").get_to(place.opened);
    note.at("fed").get_to(place.fed);
    note.at("message_start").get_to(place.message_start);
  } catch (const Json::exception&) {
    throw Failure(THIMBLE_FORMAT, path + " was not saved by /save; name another file");
  }
  restore_session(session_, path);
  call(thimble_session_set_sampler, session_.get(), &settings_.sampler);
  place_ = std::move(place);
  std::fprintf(stderr, "(%s: %zu messages loaded, %s tokens)\n", path.c_str(), place_.messages.size(),
               format_count(stats(session_).position).c_str());
}

void Chat::show_memory() {
  const thimble_memory held = memory(session_);
  const thimble_stats seen = stats(session_);
  std::fprintf(stderr, "%s\n%s of %s entries a head, %s tokens so far, %s evicted\n",
               memory_table(held).c_str(), format_count(seen.entries).c_str(),
               format_count(held.capacity).c_str(), format_count(seen.position).c_str(),
               format_count(seen.evicted).c_str());
  warn_of_saturated(seen.saturated);
}

void Chat::show_policy() {
  const thimble_memory held = memory(session_);
  const thimble_session_options o = decided_options(session_);
  std::fprintf(stderr,
               "retention=%s pool=%u chunk=%u retain-scope=%s selection=%s positions=%s mem-budget=%s\n",
               thimble_retention_name(retention_.policy), held.pool, held.chunk,
               o.retain_scope == THIMBLE_RETAIN_LAYER ? "layer" : "head", thimble_selection_name(o.selection),
               o.positions == THIMBLE_POSITIONS_ORIGINAL ? "original" : "list",
               held.budget ? format_size(held.budget).c_str() : "none");
}

void Chat::change_policy(const std::string& words) {
  Settings changed = settings_;
  std::vector<std::string> flags;
  std::istringstream in(words);
  for (std::string word; in >> word;) flags.push_back(word.rfind("--", 0) == 0 ? word : "--" + word);
  change_policies(changed, flags);

  Retention retention = choose_retention(changed, model_, 0);
  plan(model_, session_options(changed, model_, retention, 0));  // throws before the old session is freed
  const Settings old = settings_;
  std::swap(retention, retention_);
  settings_ = changed;
  session_.reset();  // two sessions at a time might not fit the machine
  try {
    create();
  } catch (const Failure&) {
    settings_ = old;
    std::swap(retention, retention_);
    create();
    throw;
  }
  std::fprintf(stderr, "(new session: a new conversation starts)\n");
  show_policy();
}

bool Chat::obey(const std::string& line) {
  const size_t space = std::min(line.find(' '), line.size());
  const std::string name = line.substr(0, space), rest(strip(line.substr(space)));
  if (name == "/quit") return false;
  if (name == "/help") {
    std::fprintf(stderr, "%s", kCommands);
  } else if (name == "/open") {
    if (rest.empty() || rest == "-") throw UsageError("/open needs the name of a file");
    open(rest);
  } else if (name == "/save" || name == "/load") {
    if (rest.empty()) throw UsageError(name + " needs the name of a file");
    name == "/save" ? save(rest) : load(rest);
  } else if (name == "/memory") {
    show_memory();
  } else if (name == "/policy") {
    if (rest.empty())
      show_policy();
    else
      change_policy(rest);
  } else if (name == "/reset") {
    call(thimble_session_reset, session_.get());
    start_afresh();
    std::fprintf(stderr, "(a new conversation starts)\n");
  } else {
    throw UsageError("unknown command " + name + ", /help lists them");
  }
  return true;
}

void Chat::loop() {
  if (is_terminal(stdin)) std::fprintf(stderr, "/help lists commands; Ctrl-C stops an answer.\n");
  while (const auto line = read_line("> ")) {
    // A failure must not end the conversation, except if the model computes invalid numbers, which it would
    // do again.
    try {
      if (strip(*line).empty()) continue;
      if (line->front() != '/')
        say(*line);
      else if (!obey(std::string(strip(*line))))
        return;
    } catch (const Failure& failure) {
      progress_.clear();
      if (failure.status == THIMBLE_NOT_FINITE) throw;
      std::fprintf(stderr, failure.status == THIMBLE_INTERRUPTED ? "(stopped)\n" : "thimble: %s\n",
                   visible(failure.what()).c_str());
    } catch (const UsageError& error) {
      std::fprintf(stderr, "thimble: %s\n", visible(error.what()).c_str());
    } catch (const CLI::ParseError& error) {
      std::fprintf(stderr, "thimble: %s; the names are those of the flags in 'thimble chat --help'\n",
                   error.what());
    }
  }
}

}  // namespace

Command add_chat(CLI::App& root) {
  static Settings settings;
  CLI::App* app = root.add_subcommand("chat", "Talk with a model about texts");
  add_model_flag(*app, settings);
  add_predict_flag(*app, settings);
  add_chat_flags(*app, settings);
  add_grammar_flags(*app, settings);
  add_session_flags(*app, settings);
  add_draft_flags(*app, settings);
  add_sampling_flags(*app, settings);
  app->footer(std::string("In the conversation:\n") + kCommands +
              "\nExamples:\n"
              "  thimble chat -m model.gguf --heads heads.gguf --mem-budget 64MiB\n"
              "  thimble chat -m model.gguf --retention window --pool 4096 -sys \"Answer in one sentence.\" "
              "--temp 0.7");
  return {app, [] {
            Chat(settings).loop();
            return 0;
          }};
}

}  // namespace app
