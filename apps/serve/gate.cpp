// Finds the place in an answer from which a grammar holds (see gate.h).
#include "apps/serve/gate.h"

#include <algorithm>

#include "apps/serve/calls.h"
#include "apps/serve/json.h"

namespace app::serve {

namespace {

using MakeGrammar = thimble_status (*)(const thimble_model*, const char*, uint64_t, thimble_grammar**,
                                       thimble_error*);

Grammar make_grammar(const Model& model, MakeGrammar make, const std::string& text) {
  thimble_grammar* grammar = nullptr;
  call(make, model.get(), text.data(), text.size(), &grammar);
  return Grammar(grammar);
}

Grammar schema_grammar(const Model& model, const Json& schema) {
  return make_grammar(model, thimble_grammar_create_json_schema, write_json(schema));
}

}  // namespace

Grammars make_grammars(const Model& model, const Task& task) {
  Grammars grammars;
  const bool harmony = task.opening.kind == Opening::Kind::kHarmony;
  if (task.opening.goes_on && (task.must_call || task.form.kind != Form::Kind::kAny))
    throw Refusal(400, "an answer that was begun cannot have a format, and cannot be a tool call");
  if (task.must_call) {
    Json tools = Json::array();
    for (const Json& tool : task.tools)
      if (task.only_tool.empty() || tool["function"]["name"] == task.only_tool) tools.push_back(tool);
    if (harmony && tools.size() > 1)
      throw Refusal(400, "with this model, \"tool_choice\" must name the tool");
    const std::string name = tools[0]["function"]["name"].get<std::string>();
    const std::string mark =
        harmony ? "<|channel|>commentary to=functions." + name + " <|constrain|>json<|message|>"
                : task.call_mark;
    if (!mark.empty()) grammars.mark = token_ids(model, mark, THIMBLE_TOKENIZE_PARSE_SPECIAL);
    grammars.call =
        schema_grammar(model, harmony ? arguments_schema(tools[0]) : call_schema(tools, "", true));
    return grammars;
  }
  if (!harmony && std::any_of(task.tools.begin(), task.tools.end(), is_strict))
    grammars.call = schema_grammar(model, call_schema(task.tools, "", false));
  if (task.form.kind != Form::Kind::kAny)
    grammars.form = make_grammar(model,
                                 task.form.kind == Form::Kind::kSchema ? thimble_grammar_create_json_schema
                                                                       : thimble_grammar_create_gbnf,
                                 task.form.text);
  return grammars;
}

Gate::Gate(const Model& model, const Task& task, const Grammars& grammars)
    : model_(model),
      task_(task),
      grammars_(grammars),
      filter_(task.opening, task.tools),
      waits_(grammars.form || grammars.call),
      mark_(grammars.mark) {}

void Gate::push(std::string_view text) {
  if (waits_) filter_.push(text);
}

int32_t Gate::begin(const Session& session, const Grammar& grammar) {
  waits_ = false;
  call(thimble_session_set_grammar, session.get(), grammar.get());
  return -1;
}

int32_t Gate::before(const Session& session, const Logits& logits) {
  using Place = AnswerFilter::Place;
  if (!waits_) return -1;
  // Messages to functions are not thought about.
  if (task_.must_call && task_.opening.kind == Opening::Kind::kHarmony) marked_ = true;
  if (marked_) return written_ < mark_.size() ? mark_[written_++] : begin(session, grammars_.call);
  const Place place = filter_.place();
  const bool strict = grammars_.call && !task_.must_call;
  if (place == Place::kBefore || (place == Place::kInside && !strict)) return -1;
  if (place == Place::kCall && !grammars_.call) {
    waits_ = false;
    return -1;
  }
  const std::vector<float> next = logits();
  const auto best = static_cast<int32_t>(std::max_element(next.begin(), next.end()) - next.begin());
  const std::string word = token_bytes(model_, best);
  constexpr int kMostSpaces = 2;
  if (place != Place::kInside && !word.empty() && stripped(word).empty() && spaces_++ < kMostSpaces)
    return best;
  if (place == Place::kCall) return begin(session, grammars_.call);
  if (place == Place::kStart && task_.is_chat && !thought_ && opens_thought(word)) {
    thought_ = true;
    return best;
  }
  const OpenMark mark = find_open_mark(word);
  const bool calls = !task_.tools.is_null() && mark.at == 0;
  if (task_.must_call || (calls && strict && takes_json(*mark.format))) {
    if (strict) mark_ = token_ids(model_, std::string(mark.mark), THIMBLE_TOKENIZE_PARSE_SPECIAL);
    marked_ = true;
    return before(session, logits);
  }
  if (place == Place::kInside) return -1;
  if (calls) return best;
  const bool bare = strict && !grammars_.form && (word.starts_with('{') || word.starts_with('['));
  if (bare) return begin(session, grammars_.call);
  return grammars_.form ? begin(session, grammars_.form) : -1;
}

}  // namespace app::serve
