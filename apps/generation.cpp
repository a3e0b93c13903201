// Reading a prompt and generating its answer (see generation.h).
#include "apps/generation.h"

#include <algorithm>
#include <cstdio>

#include "apps/sizes.h"

namespace app {

const char* finish_name(Finish finish) {
  switch (finish) {
    case Finish::kStop:
      return "stop";
    case Finish::kLength:
      return "length";
    case Finish::kInterrupted:
      return "interrupted";
    case Finish::kContext:
      return "context";
  }
  return "";
}

namespace {

// Removes the bar from the screen when reading ends, also after an exception.
struct ClearedProgress {
  Progress& progress;
  ~ClearedProgress() { progress.clear(); }
};

}  // namespace

bool read_prompt(const Session& session, std::span<const int32_t> tokens, Progress& progress) {
  const ClearedProgress cleared{progress};
  return call_unless_interrupted(thimble_session_feed, session.get(), tokens.data(), tokens.size()) &&
         call_unless_interrupted(thimble_session_flush, session.get());
}

bool feed_prompt(const Session& session, const Prompt& prompt, uint64_t first, uint64_t last,
                 Progress& progress) {
  const ClearedProgress cleared{progress};
  progress.expect(prompt.size());
  bool interrupted = false;
  prompt.each(first, [&](std::span<const int32_t> ids) {
    ids = ids.first(std::min<uint64_t>(ids.size(), last - first));
    first += ids.size();
    interrupted = !call_unless_interrupted(thimble_session_feed, session.get(), ids.data(), ids.size());
    return !interrupted && first < last;
  });
  return !interrupted;
}

bool read_prompt(const Session& session, const Prompt& prompt, uint64_t first, Progress& progress) {
  return feed_prompt(session, prompt, first, prompt.size(), progress) && read_prompt(session, {}, progress);
}

void check_room(const Session& session, const thimble_session_options& options, uint64_t tokens) {
  const thimble_memory held = memory(session);
  const std::string count = "context_length_exceeded: the prompt's " + format_count(tokens) + " tokens ";
  if (!(thimble_retention_traits(options.retention) & THIMBLE_TRAIT_EVICTS) && tokens > held.capacity)
    throw Failure(THIMBLE_CONTEXT_FULL, count + "do not fit in a pool of " + format_count(held.pool) +
                                            ", which has room for " + format_count(held.capacity) +
                                            " with an answer; make the pool larger, or choose a retention "
                                            "policy that evicts");
  if (options.context && tokens > options.context)
    throw Failure(THIMBLE_CONTEXT_FULL, count + "exceed the limit of " + format_count(options.context) +
                                            " positions; raise the context");
}

namespace {

struct ThoughtMarks {
  std::string_view begin, end;
};
constexpr ThoughtMarks kThoughts[] = {{"<think>", "</think>"},
                                      {"[THINK]", "[/THINK]"},
                                      {"<seed:think>", "</seed:think>"},
                                      {"<mm:think>", "</mm:think>"},
                                      {"<|START_THINKING|>", "<|END_THINKING|>"}};

constexpr std::string_view kSpace = " \t\r\n";

// The token that a mark is, or -1.
int32_t mark_token(const Model& model, std::string_view mark) {
  const std::vector<int32_t> ids = token_ids(model, mark, THIMBLE_TOKENIZE_PARSE_SPECIAL);
  return ids.size() == 1 ? ids[0] : -1;
}

int32_t most_likely(const Session& session) {
  const std::vector<float> values = logits(session);
  return static_cast<int32_t>(std::max_element(values.begin(), values.end()) - values.begin());
}

// The mark that ends the thought which the model is about to begin, or an empty text.
std::string_view next_thought(const Model& model, const Session& session) {
  const int32_t next = most_likely(session);
  for (const ThoughtMarks& marks : kThoughts)
    if (next == mark_token(model, marks.begin)) return marks.end;
  return {};
}

// Writes the white space that most models put after a thought, as far as it is the most likely. Returns false
// after Ctrl-C.
bool write_space(const Model& model, const Session& session, Answer& answer, const Sink& sink) {
  constexpr int kMost = 2;  // tokens
  for (int n = 0; n < kMost; ++n) {
    const int32_t next = most_likely(session);
    const std::string text = detokenize(model, {next}, 0);
    if (text.empty() || text.find_first_not_of(kSpace) != std::string::npos) break;
    if (!call_unless_interrupted(thimble_session_accept, session.get(), next)) return false;
    answer.tokens.push_back(next);
    answer.text += text;
    sink(text);
  }
  return true;
}

}  // namespace

std::string_view opened_thought(std::string_view prompt) {
  prompt = prompt.substr(0, prompt.find_last_not_of(kSpace) + 1);
  for (const ThoughtMarks& marks : kThoughts)
    if (prompt.ends_with(marks.begin)) return marks.end;
  return {};
}

Answer generate(const Model& model, const Session& session, int64_t limit, const Sink& sink,
                const AnswerGrammar& grammar) {
  Answer answer;
  std::string_view thought_end = grammar.thought_end;
  int32_t thought_end_token = -1;
  if (grammar.grammar) {
    if (thought_end.empty()) thought_end = next_thought(model, session);
    if (thought_end.empty())
      call(thimble_session_set_grammar, session.get(), grammar.grammar);
    else
      thought_end_token = mark_token(model, thought_end);
  }
  const bool has_text = model_info(model).has_tokenizer;
  for (int64_t n = 0; limit < 0 || n < limit; ++n) {
    thimble_error error = {};
    error.struct_size = sizeof error;
    int32_t token = -1;
    const thimble_status status = thimble_session_step(session.get(), &token, &error);
    if (status == THIMBLE_INTERRUPTED || status == THIMBLE_CONTEXT_FULL) {
      answer.finish = status == THIMBLE_INTERRUPTED ? Finish::kInterrupted : Finish::kContext;
      return answer;
    }
    if (status != THIMBLE_OK) raise(error);
    answer.tokens.push_back(token);
    if (thimble_token_ends(model.get(), token)) {
      answer.finish = Finish::kStop;
      return answer;
    }
    if (!has_text) continue;
    const std::string text = token_text(session, token);
    answer.text += text;
    sink(text);
    if (thought_end.empty()) continue;
    // A mark may consist of several tokens. The last of them may also contain white space.
    if (token != thought_end_token && answer.text.find(thought_end) == std::string::npos) continue;
    thought_end = {};
    if (!write_space(model, session, answer, sink)) {
      answer.finish = Finish::kInterrupted;
      return answer;
    }
    call(thimble_session_set_grammar, session.get(), grammar.grammar);
  }
  return answer;
}

void warn_of_saturated(uint64_t numbers) {
  if (!numbers) return;
  std::fprintf(stderr,
               "thimble: warning: %s numbers of keys and values were beyond what 16 bits hold and became the "
               "largest that do, so answers may be wrong\n",
               format_count(numbers).c_str());
}

Json memory_json(const thimble_memory& m) {
  return {{"weights", m.weights},
          {"shared", m.shared},
          {"pool", m.pool_bytes},
          {"states", m.states},
          {"view", m.view},
          {"workspace", m.workspace},
          {"io", m.io},
          {"fixed", m.fixed},
          {"draft", m.draft},
          {"total", m.total},
          {"store", m.store},
          {"store_file", m.store_file},
          {"recall_bytes", m.recall_bytes},
          {"mapped", m.mapped},
          {"mapped_resident", m.mapped_resident},
          {"streamed", m.streamed},
          {"host_tables", m.host_tables}};
}

void print_json(const Json& json) {
  // visible() writes the same escapes as JSON, so the value stays the same.
  const std::string text = visible(json.dump(-1, ' ', false, Json::error_handler_t::replace)) + "\n";
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

std::string memory_table(const thimble_memory& m) {
  std::string table;
  auto row = [&table](const char* name, uint64_t bytes, const char* note) {
    char line[160];
    std::snprintf(line, sizeof line, "%-18s %18s %12s%s%s\n", name, format_count(bytes).c_str(),
                  format_size(bytes).c_str(), *note ? "  " : "", note);
    table += line;
  };
  row("weights", m.weights, m.weights ? "on the device" : "read from the mapped file");
  if (m.shared) row("  of it shared", m.shared, "placed by other sessions, not counted again");
  row("pool", m.pool_bytes, "keys, values, positions, scores");
  if (m.states) row("  of it states", m.states, "of recurrent layers, whatever the length of the text");
  row("view", m.view, "one layer as prefill attention reads it");
  row("workspace", m.workspace, "activations and scratch");
  row("io", m.io, "tokens, logits, sampler");
  row("fixed", m.fixed, "the device's own");
  if (m.draft) row("draft", m.draft, "what drafts: weights on the device, pool, workspace, io");
  row("total", m.total, "what the budget covers");
  if (m.budget) row("budget", m.budget, "");
  if (m.store) row("store", m.store, "evicted entries in host memory, not in the total");
  if (m.store_file) row("store", m.store_file, "evicted entries in a temporary file, not in the total");
  if (m.allocated) row("allocated", m.allocated, "held now");
  row("model mapping", m.mapped, "not allocated, shared with the page cache");
  row("  of it resident", m.mapped_resident, "");
  if (m.streamed)
    row("  of it streamed", m.streamed,
        m.weights ? "copied to host memory, read by the card over the bus"
                  : "does not fit in memory, read again for each token");
  row("host tables", m.host_tables, "vocabulary and tensor tables");
  return table;
}

}  // namespace app
