// Finds the place in an answer from which a grammar holds (see gate.h).
#include "apps/serve/gate.h"

#include <algorithm>
#include <utility>

#include "apps/serve/call_format.h"
#include "apps/serve/call_grammar.h"
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

MakeGrammar language_of(Form::Kind kind) {
  return kind == Form::Kind::kSchema  ? thimble_grammar_create_json_schema
         : kind == Form::Kind::kRegex ? thimble_grammar_create_regex
                                      : thimble_grammar_create_gbnf;
}

// What a call is in gpt-oss' format, before and after the function's name.
const std::string kHarmonyCall = "<|channel|>commentary to=functions.",
                  kHarmonyBody = "<|constrain|>json<|message|>";

// A grammar of the names of tools, with a space after them.
std::string name_rule(const Json& tools) {
  std::string rule = "root ::= (";
  for (const Json& tool : tools)
    rule += (rule.back() == '(' ? "" : " | ") + write_json(tool["function"]["name"]);
  return rule + ") \" \"";
}

Grammar schema_grammar(const Model& model, const Json& schema) {
  return make_grammar(model, thimble_grammar_create_json_schema, write_json(schema));
}

// A mark in a grammar: its control tokens by number, and everything else as text. Tokens that end an answer
// are left out, because they are allowed where a grammar ends.
std::string spelled(const Model& model, std::string_view mark) {
  std::string expression, words, read;
  const auto add_words = [&] {
    if (!words.empty()) expression += " " + write_json(std::exchange(words, {}));
  };
  for (const int32_t token : token_ids(model, mark, THIMBLE_TOKENIZE_PARSE_SPECIAL)) {
    const std::string bytes = token_bytes(model, token);
    read += bytes;
    if (thimble_token_ends(model.get(), token)) continue;
    if (!detokenize(model, {token}, 0).empty()) {
      words += bytes;
      continue;
    }
    add_words();
    expression += " <[" + std::to_string(token) + "]>";
  }
  add_words();
  return read == mark ? "(" + expression + ")" : write_json(std::string(mark));
}

// The grammars of calls that are not in JSON. If a call must be made, it is that of the chat template's
// style. Otherwise the model may write any format whose mark is a token.
void add_styles(const Model& model, const Task& task, const Json& tools, Grammars& grammars) {
  CallRules rules = {task.must_call, !task.must_call && !task.one_call,
                     [&](std::string_view mark) { return spelled(model, mark); }};
  for (const CallFormat* format : call_formats()) {
    const bool native = format == task.call_style.format;
    const std::string mark(open_mark(*format));
    // Other texts have Functionary's mark, too.
    const bool sure = usual_notation(*format) != CallNotation::kRecipient &&
                      token_ids(model, mark, THIMBLE_TOKENIZE_PARSE_SPECIAL).size() == 1;
    if (!native && (task.must_call || !sure)) continue;
    const CallStyle style = native ? task.call_style : CallStyle{format, usual_notation(*format)};
    rules.native = native;
    const std::string grammar = call_grammar(style, tools, rules);
    if (!grammar.empty()) grammars.styles[format] = make_grammar(model, thimble_grammar_create_gbnf, grammar);
  }
}

}  // namespace

Grammars make_grammars(const Model& model, const Task& task) {
  Grammars grammars;
  const bool harmony = task.opening.kind == Opening::Kind::kHarmony;
  if (task.opening.goes_on && (task.must_call || task.form.kind != Form::Kind::kAny))
    throw Refusal(400, "an answer that was begun cannot have a format, and cannot be a tool call");
  if (task.ignores_end && (task.must_call || task.form.kind != Form::Kind::kAny))
    throw Refusal(400, "an answer whose end is ignored cannot have a format, and cannot be a tool call");
  Json checked = Json::array();  // the tools whose arguments are checked
  for (const Json& tool : task.tools) {
    const bool may = task.only_tool.empty() || tool["function"]["name"] == task.only_tool;
    if (may && (task.must_call || is_strict(tool))) checked.push_back(tool);
  }
  std::string mark = task.call_mark;
  if (harmony) {
    for (const Json& tool : checked)
      grammars.arguments[tool["function"]["name"]] = schema_grammar(model, arguments_schema(tool));
    mark = kHarmonyCall;
    if (task.must_call && checked.size() == 1)
      mark += checked[0]["function"]["name"].get<std::string>() + " " + kHarmonyBody;
    else if (task.must_call)
      grammars.name = make_grammar(model, thimble_grammar_create_gbnf, name_rule(checked));
  } else if (!checked.empty()) {
    for (const Json& tool : checked) schema_grammar(model, arguments_schema(tool));  // or says what is wrong
    const Json& tools = task.must_call ? checked : task.tools;
    add_styles(model, task, tools, grammars);
    if (task.must_call && !grammars.styles.empty())
      mark = task.opening.kind == Opening::Kind::kRecipient ? "" : open_mark(*task.call_style.format);
    else
      grammars.call = schema_grammar(model, call_schema(tools, "", task.must_call));
    grammars.bare = task.call_style.notation == CallNotation::kJson;
  }
  if (task.must_call) {
    if (!mark.empty()) grammars.mark = token_ids(model, mark, THIMBLE_TOKENIZE_PARSE_SPECIAL);
    return grammars;
  }
  if (task.form.kind != Form::Kind::kAny)
    grammars.form = make_grammar(model, language_of(task.form.kind), task.form.text);
  return grammars;
}

Gate::Gate(const Model& model, const Task& task, const Grammars& grammars)
    : model_(model),
      task_(task),
      grammars_(grammars),
      filter_(task.opening, task.tools),
      waits_(grammars.form || grammars.call || !grammars.styles.empty() || !grammars.arguments.empty()),
      mark_(grammars.mark) {
  if (task.must_call && !grammars.styles.empty())
    after_mark_ = &grammars.styles.begin()->second;
  else if (grammars.call)
    after_mark_ = &grammars.call;
  else if (grammars.arguments.size() == 1)
    after_mark_ = &grammars.arguments.begin()->second;
  else
    after_mark_ = nullptr;
}

void Gate::push(std::string_view text) {
  if (waits_) filter_.push(text);
  if (names_) name_ += text;
}

const Grammar* Gate::grammar_after(const CallFormat* format) const {
  if (!format) return nullptr;
  if (const auto found = grammars_.styles.find(format); found != grammars_.styles.end())
    return &found->second;
  const bool json = grammars_.call && usual_notation(*format) == CallNotation::kJson;
  return json ? &grammars_.call : nullptr;
}

int32_t Gate::begin(const Session& session, const Grammar& grammar) {
  waits_ = false;
  call(thimble_session_set_grammar, session.get(), grammar.get());
  return -1;
}

// Writes the mark of a call, with the name of the function if that is in it, and begins the grammar after it.
int32_t Gate::write_mark(const Session& session) {
  if (written_ < mark_.size()) return mark_[written_++];
  if (after_mark_) return begin(session, *after_mark_);
  if (!std::exchange(names_, true)) {
    call(thimble_session_set_grammar, session.get(), grammars_.name.get());
  } else if (name_.ends_with(' ')) {
    call(thimble_session_set_grammar, session.get(), nullptr);
    names_ = false;
    after_mark_ = &grammars_.arguments.at(name_.substr(0, name_.size() - 1));
    mark_ = token_ids(model_, kHarmonyBody, THIMBLE_TOKENIZE_PARSE_SPECIAL);
    written_ = 0;
    return write_mark(session);
  }
  return -1;
}

int32_t Gate::before(const Session& session, const Logits& logits) {
  using Place = AnswerFilter::Place;
  if (!waits_) return -1;
  // In gpt-oss' format, a call that must be made is not thought about.
  const bool harmony = task_.opening.kind == Opening::Kind::kHarmony;
  if (harmony && task_.must_call) marked_ = true;
  if (marked_) return write_mark(session);
  const Place place = filter_.place();
  const bool strict = grammars_.call && !task_.must_call;
  if (place == Place::kBefore || (place == Place::kInside && !strict)) return -1;
  if (harmony && place == Place::kCall) {
    const auto found = grammars_.arguments.find(filter_.function());
    return found == grammars_.arguments.end() ? -1 : begin(session, found->second);
  }
  if (place == Place::kCall && !grammar_after(filter_.format())) {
    waits_ = false;
    return -1;
  }
  const std::vector<float> next = logits();
  const auto best = static_cast<int32_t>(std::max_element(next.begin(), next.end()) - next.begin());
  const std::string word = token_bytes(model_, best);
  constexpr int kMostSpaces = 2;
  if (place != Place::kInside && !word.empty() && stripped(word).empty() && spaces_++ < kMostSpaces)
    return best;
  if (place == Place::kCall) return begin(session, *grammar_after(filter_.format()));
  if (place == Place::kStart && task_.is_chat && !thought_ && opens_thought(word)) {
    thought_ = true;
    return best;
  }
  if (place == Place::kStart && !task_.must_call && opens_text(task_.opening, word)) return best;
  // After Functionary's mark, anything else is the name of a function.
  if (task_.opening.kind == Opening::Kind::kRecipient && filter_.names() && !task_.must_call &&
      !task_.tools.is_null()) {
    const Grammar* after = grammar_after(task_.call_style.format);
    return after ? begin(session, *after) : best;
  }
  const OpenMark mark = find_open_mark(word == kTagMark ? kNestedOpen : word);
  const bool calls = !task_.tools.is_null() && mark.at == 0;
  const Grammar* after = calls && strict ? grammar_after(mark.format) : nullptr;
  if (task_.must_call || after) {
    if (strict) {
      mark_ = token_ids(model_, std::string(mark.mark), THIMBLE_TOKENIZE_PARSE_SPECIAL);
      after_mark_ = after;
    }
    marked_ = true;
    return write_mark(session);
  }
  if (place == Place::kInside) return -1;
  if (calls) return best;
  const bool bare =
      strict && grammars_.bare && !grammars_.form && (word.starts_with('{') || word.starts_with('['));
  if (bare) return begin(session, grammars_.call);
  return grammars_.form ? begin(session, grammars_.form) : -1;
}

}  // namespace app::serve
