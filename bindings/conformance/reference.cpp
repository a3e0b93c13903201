// reference SCRIPT.json ROOT [write]: runs the steps of a conformance script through the C interface,
// the reference for every binding. Reports each step whose result differs from the script's; with "write",
// writes its results into the script. README.md explains the steps.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "thimble/thimble.h"

namespace {

using Json = nlohmann::ordered_json;
using Tokens = std::vector<int32_t>;

struct Error : thimble_error {
  Error() : thimble_error{} { struct_size = sizeof(thimble_error); }
};

// The result of a step whose call fails.
struct Failure {
  std::string code;
};

void check(thimble_status status) {
  if (status != THIMBLE_OK) throw Failure{thimble_status_name(status)};
}

class Runner {
 public:
  explicit Runner(std::string root) : root_(std::move(root)) {}
  ~Runner() {
    for (auto& [name, session] : sessions_) thimble_session_free(session);
    thimble_heads_free(heads_);
    thimble_model_free(model_);
    std::remove(kFile);
  }

  Json run(const Json& step) {
    try {
      return result(step);
    } catch (const Failure& failure) {
      return {{"error", failure.code}};
    }
  }

  float smallest_margin() const { return smallest_margin_; }

 private:
  static constexpr const char* kFile = "conformance-reference.session";

  Json result(const Json& step) {
    const std::string verb = step.at("do");
    if (verb == "open") return open(step);
    if (verb == "info") return info();
    if (verb == "tokenize") return {{"ids", tokenize(step.at("text"), flags(step))}};
    if (verb == "detokenize") return {{"text", detokenize(step.at("ids"), step.value("special", false))}};
    if (verb == "ends") return {{"ends", thimble_token_ends(model_, step.at("token")) == 1}};
    if (verb == "chat") return {{"text", chat(step)}};
    if (verb == "plan") return plan(step.at("options"));
    if (verb == "refused") return refused(step.at("options"));
    if (verb == "largest_pool") return largest_pool(step.at("options"));
    if (verb == "create") return create(step);
    if (verb == "close_model")
      return {{"closed", true}};  // bindings keep it alive for its sessions; here it is freed at the end
    if (verb == "saved") return saved();
    return of_session(verb, step, sessions_.at(step.at("session")));
  }

  Json of_session(const std::string& verb, const Json& step, thimble_session* session) {
    if (verb == "read") return read(session, step);
    if (verb == "step") return steps(session, step.at("count"));
    if (verb == "accept")
      return check(thimble_session_accept(session, step.at("token"), nullptr)), position(session);
    if (verb == "flush") return check(thimble_session_flush(session, nullptr)), position(session);
    if (verb == "reset") return check(thimble_session_reset(session, nullptr)), position(session);
    if (verb == "rewind")
      return check(thimble_session_rewind(session, step.at("position"), nullptr)), position(session);
    if (verb == "interrupt") return thimble_session_interrupt(session), Json{{"asked", true}};
    if (verb == "score") return score(session, step.at("ids"));
    if (verb == "logits") return logits(session);
    if (verb == "sample") return sample(session, step);
    if (verb == "grammar") return grammar(session, step);
    if (verb == "clone") return clone(session, step);
    if (verb == "save") return save(session, step);
    if (verb == "restore") return check(thimble_session_restore(session, kFile, nullptr)), position(session);
    if (verb == "kept") return kept(session, step);
    if (verb == "stored_by_position") return stored_by_position(session);
    if (verb == "kept_by_position") return kept_by_position(session);
    if (verb == "stats") return stats(session);
    if (verb == "memory") return memory(session);
    if (verb == "decided") return decided(session);
    if (verb == "shrink") return shrink(session, step.at("pool"));
    if (verb == "close") {
      sessions_.erase(step.at("session"));
      return thimble_session_free(session), Json{{"closed", true}};
    }
    throw std::runtime_error("no such step: " + verb);
  }

  // ---- model ----

  Json open(const Json& step) {
    int warnings = 0;
    thimble_model_options options;
    thimble_model_options_init(&options, sizeof options);
    options.log = [](void* user, const char*) { ++*static_cast<int*>(user); };
    options.log_user = &warnings;
    check(thimble_model_open(path(step.at("model")).c_str(), &options, &model_, nullptr));
    check(thimble_heads_open(model_, path(step.at("heads")).c_str(), &heads_, nullptr));
    return {{"warnings", warnings}};
  }

  Json info() {
    thimble_model_info info = {};
    info.struct_size = sizeof info;
    check(thimble_model_get_info(model_, &info, nullptr));
    layers_ = info.layers;
    kv_heads_ = info.kv_heads;
    return {{"layers", info.layers},
            {"kv_heads", info.kv_heads},
            {"vocab", info.vocab},
            {"context_length", info.context_length},
            {"eos", info.eos},
            {"parameters", info.parameters},
            {"architecture", info.architecture},
            {"quantization", info.quantization},
            {"chat_format", info.chat_format},
            {"window_layers", info.window_layers}};
  }

  static uint32_t flags(const Json& step) {
    return (step.value("bos", false) ? THIMBLE_TOKENIZE_ADD_BOS : 0) |
           (step.value("special", false) ? THIMBLE_TOKENIZE_PARSE_SPECIAL : 0);
  }

  Tokens tokenize(const std::string& text, uint32_t flags) {
    uint64_t count = 0;
    thimble_tokenize(model_, text.data(), text.size(), flags, nullptr, nullptr, 0, &count, nullptr);
    Tokens ids(count);
    check(thimble_tokenize(model_, text.data(), text.size(), flags, ids.data(), nullptr, count, &count,
                           nullptr));
    return ids;
  }

  std::string detokenize(const Tokens& ids, bool special) {
    const uint32_t flags = special ? THIMBLE_DETOKENIZE_SPECIAL : 0;
    uint64_t length = 0;
    thimble_detokenize(model_, ids.data(), ids.size(), flags, nullptr, 0, &length, nullptr);
    std::string text(length, '\0');
    check(thimble_detokenize(model_, ids.data(), ids.size(), flags, text.data(), length, &length, nullptr));
    return text;
  }

  std::string chat(const Json& step) {
    const std::string messages = step.at("messages").dump();
    thimble_chat_options options;
    thimble_chat_options_init(&options, sizeof options);
    options.flags = THIMBLE_CHAT_ADD_ASSISTANT;
    options.messages_json = messages.data();
    options.messages_json_length = messages.size();
    uint64_t length = 0;
    thimble_chat_render(model_, &options, nullptr, 0, &length, nullptr);
    std::string text(length, '\0');
    check(thimble_chat_render(model_, &options, text.data(), length, &length, nullptr));
    return text;
  }

  // ---- sessions ----

  thimble_session_options read_options(const Json& given) {
    using Options = thimble_session_options;
    static const std::map<std::string, uint32_t Options::*> kNumbers = {
        {"threads", &Options::threads},          {"pool", &Options::pool},         {"chunk", &Options::chunk},
        {"max_new", &Options::max_new},          {"select_k", &Options::select_k}, {"watch", &Options::watch},
        {"draft_tokens", &Options::draft_tokens}};
    Options o;
    thimble_session_options_init(&o, sizeof o);
    o.device = "cpu";
    for (const auto& [key, value] : given.items()) {
      if (const auto number = kNumbers.find(key); number != kNumbers.end()) {
        o.*number->second = value;
      } else if (key == "budget_bytes") {
        o.budget_bytes = value;
      } else if (key == "heads") {
        o.heads = value ? heads_ : nullptr;
      } else if (key == "draft_model") {
        o.draft_model = value ? model_ : nullptr;
      } else if (key == "draft" && value == "model") {
        o.draft = THIMBLE_DRAFT_MODEL;
      } else if (key == "retention") {
        o.retention = number_of(thimble_retention_name, value);
      } else if (key == "selection") {
        o.selection = number_of(thimble_selection_name, value);
      } else {
        throw std::runtime_error("no such option: " + key);
      }
    }
    return o;
  }

  static int32_t number_of(const char* (*name)(int32_t), const std::string& wanted) {
    int32_t number = 0;
    while (name(number) && name(number) != wanted) ++number;
    return number;
  }

  Json plan(const Json& given) {
    const thimble_session_options options = read_options(given);
    thimble_memory memory = {};
    memory.struct_size = sizeof memory;
    check(thimble_session_plan(model_, &options, &memory, nullptr));
    return {{"pool", memory.pool},
            {"capacity", memory.capacity},
            {"chunk", memory.chunk},
            {"budget", memory.budget},
            {"dense_bytes_per_token", memory.dense_bytes_per_token},
            {"fits", memory.budget == 0 || memory.total <= memory.budget}};
  }

  // Tests a budget that is too small: with bytes_missing more it must suffice, and with one byte less it must
  // not.
  Json refused(const Json& given) {
    thimble_session_options options = read_options(given);
    thimble_session* session = nullptr;
    Error error;
    if (thimble_session_create(model_, &options, &session, &error) == THIMBLE_OK)
      return thimble_session_free(session), Json{};
    const auto fits = [&](uint64_t budget) {
      thimble_memory memory = {};
      memory.struct_size = sizeof memory;
      options.budget_bytes = budget;
      return thimble_session_plan(model_, &options, &memory, nullptr) == THIMBLE_OK;
    };
    const uint64_t enough = options.budget_bytes + error.bytes_missing;
    return {{"code", error.code},
            {"name", thimble_status_name(error.code)},
            {"says_why", error.message[0] != '\0'},
            {"bytes_missing_is_enough", fits(enough)},
            {"a_byte_less_is_not", !fits(enough - 1)}};
  }

  // Whether the largest pool fits, and a pool with one more entry does not.
  Json largest_pool(const Json& given) {
    thimble_session_options options = read_options(given);
    uint32_t pool = 0;
    check(thimble_session_largest_pool(model_, &options, &pool, nullptr));
    const auto fits = [&](uint32_t entries) {
      thimble_memory memory = {};
      memory.struct_size = sizeof memory;
      options.pool = entries;
      return thimble_session_plan(model_, &options, &memory, nullptr) == THIMBLE_OK;
    };
    return {{"fits", fits(pool)}, {"one_more_does_not", !fits(pool + 1)}};
  }

  Json create(const Json& step) {
    const thimble_session_options options = read_options(step.at("options"));
    thimble_session* session = nullptr;
    check(thimble_session_create(model_, &options, &session, nullptr));
    sessions_[step.at("session")] = session;
    return position(session);
  }

  Json clone(thimble_session* session, const Json& step) {
    thimble_session* twin = nullptr;
    check(thimble_session_clone(session, &twin, nullptr));
    sessions_[step.at("as")] = twin;
    return position(twin);
  }

  thimble_stats get_stats(thimble_session* session) {
    thimble_stats stats = {};
    stats.struct_size = sizeof stats;
    check(thimble_session_stats(session, &stats, nullptr));
    return stats;
  }

  Json position(thimble_session* session) { return {{"position", get_stats(session).position}}; }

  Json read(thimble_session* session, const Json& step) {
    std::string text;
    if (step.contains("text")) {
      text = step.at("text");
    } else {
      std::ifstream file(path(step.at("file")), std::ios::binary);
      text.resize(step.at("bytes"));
      file.read(text.data(), static_cast<std::streamsize>(text.size()));
    }
    const Tokens ids = tokenize(text, flags(step));
    const size_t piece = step.value("piece", ids.size());
    for (size_t at = 0; at < ids.size(); at += piece)
      check(thimble_session_feed(session, ids.data() + at, std::min(piece, ids.size() - at), nullptr));
    return position(session);
  }

  Json steps(thimble_session* session, int count) {
    Tokens tokens;
    std::string all;
    for (int i = 0; i < count; ++i) {
      check(thimble_session_flush(session, nullptr));
      if (!constrained_) note_margin(session);
      int32_t token = 0;
      char text[256];
      uint64_t length = 0;
      check(thimble_session_step(session, &token, nullptr));
      check(thimble_session_text(session, token, text, sizeof text, &length, nullptr));
      tokens.push_back(token);
      all.append(text, length);
    }
    return {{"tokens", tokens}, {"text", all}};
  }

  // The distance between the best two logits. If it is small, processors that round differently may choose
  // different tokens, and the script cannot be used.
  void note_margin(thimble_session* session) {
    const float* logits = nullptr;
    uint32_t count = 0;
    check(thimble_session_logits(session, &logits, &count, nullptr));
    std::vector<float> values(logits, logits + count);
    std::nth_element(values.begin(), values.begin() + 1, values.end(), std::greater<>());
    smallest_margin_ = std::min(smallest_margin_, values[0] - values[1]);
  }

  Json score(thimble_session* session, const Tokens& ids) {
    std::vector<float> logprobs(ids.size());
    check(thimble_session_score(session, ids.data(), ids.size(), logprobs.data(), nullptr));
    return {{"logprobs", logprobs}};
  }

  Json logits(thimble_session* session) {
    const float* values = nullptr;
    uint32_t count = 0;
    check(thimble_session_logits(session, &values, &count, nullptr));
    return {{"count", count}, {"best", std::max_element(values, values + count) - values}};
  }

  Json sample(thimble_session* session, const Json& step) {
    thimble_sampler_options options;
    thimble_sampler_options_init(&options, sizeof options);
    options.temperature = step.at("temperature");
    options.top_k = step.at("top_k");
    options.seed = step.at("seed");
    check(thimble_session_set_sampler(session, &options, nullptr));
    return {{"set", true}};
  }

  Json grammar(thimble_session* session, const Json& step) {
    const std::string kind = step.at("kind"), text = step.value("text", "");
    thimble_grammar* made = nullptr;
    if (kind != "none")
      check((kind == "json_schema" ? thimble_grammar_create_json_schema
             : kind == "regex"
                 ? thimble_grammar_create_regex
                 : thimble_grammar_create_gbnf)(model_, text.data(), text.size(), &made, nullptr));
    const thimble_status status = thimble_session_set_grammar(session, made, nullptr);
    thimble_grammar_free(made);
    check(status);
    constrained_ = made;
    return {{"set", true}};
  }

  Json stats(thimble_session* session) {
    const thimble_stats stats = get_stats(session);
    return {{"position", stats.position},   {"waiting", stats.waiting},
            {"entries", stats.entries},     {"evictions", stats.evictions},
            {"generated", stats.generated}, {"prefill_tokens", stats.prefill_tokens}};
  }

  Json memory(thimble_session* session) {
    thimble_memory memory = {};
    memory.struct_size = sizeof memory;
    check(thimble_session_memory(session, &memory, nullptr));
    return {{"pool", memory.pool},
            {"capacity", memory.capacity},
            {"holds_some", memory.allocated > 0},
            {"within_the_budget", memory.allocated <= memory.budget}};
  }

  Json decided(thimble_session* session) {
    thimble_session_options options = {};
    options.struct_size = sizeof options;
    check(thimble_session_get_options(session, &options, nullptr));
    return {{"pool", options.pool},
            {"chunk", options.chunk},
            {"stabilizers", options.stabilizers},
            {"local", options.local},
            {"protect_init", options.protect_init},
            {"max_new", options.max_new},
            {"select_prefill", options.select_prefill}};
  }

  Json kept(thimble_session* session, const Json& step) {
    const uint32_t layer = step.at("layer"), kv_head = step.at("kv_head");
    uint64_t count = 0;
    thimble_session_kept(session, layer, kv_head, nullptr, 0, &count, nullptr);
    Tokens positions(count);
    check(thimble_session_kept(session, layer, kv_head, positions.data(), count, &count, nullptr));
    // Which entries heads keep may differ by one between processors; how many may not.
    if (step.value("only_count", false)) return {{"count", count}};
    return {{"positions", positions}};
  }

  // The sum over positions of the share held, times the number of (layer, KV head) pairs, is the total number
  // of entries.
  Json kept_by_position(thimble_session* session) {
    uint64_t count = 0;
    thimble_session_kept_by_position(session, nullptr, nullptr, 0, &count, nullptr);
    std::vector<float> kept(count), attended(count);
    check(thimble_session_kept_by_position(session, kept.data(), attended.data(), count, &count, nullptr));
    double held = 0, attention = 0;
    for (const float share : kept) held += share;
    for (const float share : attended) attention += share;
    return {{"count", count},
            {"entries", std::lround(held * layers_ * kv_heads_)},
            {"attention_in_thousandths", std::lround(attention * 1000)}};
  }

  Json stored_by_position(thimble_session* session) {
    uint64_t count = 0;
    thimble_session_stored_by_position(session, nullptr, 0, &count, nullptr);
    std::vector<float> stored(count);
    check(thimble_session_stored_by_position(session, stored.data(), count, &count, nullptr));
    double entries = 0;
    for (const float share : stored) entries += share;
    return {{"count", count}, {"entries", std::lround(entries * layers_ * kv_heads_)}};
  }

  Json save(thimble_session* session, const Json& step) {
    const std::string note = step.at("note");
    check(thimble_session_save(session, kFile, note.data(), note.size(), nullptr));
    return {{"saved", true}};
  }

  Json saved() {
    uint64_t length = 0;
    thimble_session_file_info(kFile, nullptr, 0, &length, nullptr);
    std::string json(length, '\0');
    check(thimble_session_file_info(kFile, json.data(), length, &length, nullptr));
    thimble_session_file_note(kFile, nullptr, 0, &length, nullptr);
    std::string note(length, '\0');
    check(thimble_session_file_note(kFile, note.data(), length, &length, nullptr));
    return {{"position", Json::parse(json).at("position")}, {"note", note}};
  }

  Json shrink(thimble_session* session, uint32_t pool) {
    uint64_t freed = 0;
    check(thimble_session_shrink(session, pool, &freed, nullptr));
    return {{"freed_some", freed > 0}};
  }

  std::string path(const std::string& name) const { return root_ + "/" + name; }

  std::string root_;
  thimble_model* model_ = nullptr;
  thimble_heads* heads_ = nullptr;
  uint32_t layers_ = 0, kv_heads_ = 0;
  float smallest_margin_ = 1e9f;
  // A grammar is set, so most tokens do not take part, and their logits say nothing about the margin.
  bool constrained_ = false;
  std::map<std::string, thimble_session*> sessions_;
};

// Numbers with a fraction may differ by a hundredth, because processors round differently; everything else
// must be equal.
bool same(const Json& a, const Json& b) {
  if (a.is_number_float() || b.is_number_float())
    return a.is_number() && b.is_number() && std::abs(a.get<double>() - b.get<double>()) <= 0.01;
  if (a.is_array() && b.is_array()) {
    bool equal = a.size() == b.size();
    for (size_t i = 0; equal && i < a.size(); ++i) equal = same(a[i], b[i]);
    return equal;
  }
  if (!a.is_object() || !b.is_object()) return a == b;
  bool equal = a.size() == b.size();
  for (const auto& [key, value] : a.items()) equal = equal && b.contains(key) && same(value, b.at(key));
  return equal;
}

// One step per line, so that a changed step is one changed line.
std::string written(const Json& script) {
  std::ostringstream out;
  out << "{\n \"about\": " << script.at("about").dump() << ",\n \"steps\": [\n";
  size_t left = script.at("steps").size();
  for (const Json& step : script.at("steps")) out << "  " << step.dump() << (--left ? ",\n" : "\n");
  out << " ]\n}\n";
  return out.str();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return std::fprintf(stderr, "usage: reference SCRIPT.json ROOT [write]\n"), 2;
  const bool write = argc > 3;
  std::ifstream in(argv[1]);
  Json script = Json::parse(in);
  Runner runner(argv[2]);
  int failed = 0, passed = 0;
  for (Json& step : script.at("steps")) {
    const Json given = runner.run(step);
    if (write) {
      step["expect"] = given;
    } else if (!same(given, step.at("expect"))) {
      std::cout << "step " << step.dump() << "\n  gave " << given.dump() << "\n";
      ++failed;
    } else {
      ++passed;
    }
  }
  if (write) {
    std::printf("the smallest margin of a step is %.3f\n", runner.smallest_margin());
    if (runner.smallest_margin() < 0.05f) return std::printf("that is too little: choose other texts\n"), 1;
    std::ofstream(argv[1]) << written(script);
    return 0;
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
