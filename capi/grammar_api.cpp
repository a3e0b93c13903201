// Entry points for grammars.
#include "capi/handles.h"
#include "text/grammar/languages.h"

using namespace thimble;
using namespace thimble::capi;

std::shared_ptr<const grammar::TokenTrie> thimble_model::token_trie() const {
  const std::scoped_lock lock(mutex_);
  if (!token_trie_) token_trie_ = std::make_shared<const grammar::TokenTrie>(model->tokenizer);
  return token_trie_;
}

namespace {

constexpr uint64_t kLongestText = 16 << 20;

using Read = Result<grammar::Syntax> (*)(std::string_view);

thimble_status create(const thimble_model* model, const char* text, uint64_t length, Read read,
                      thimble_grammar** out, thimble_error* failure) {
  return guard(failure, [&]() -> Status {
    THIMBLE_TRY(need(model, "model"));
    THIMBLE_TRY(need(out, "grammar"));
    THIMBLE_TRY(need_array(text, length, "the text of the grammar"));
    THIMBLE_TRY(need_tokenizer(*model->model));
    if (length > kLongestText)
      return error(Code::kInvalidArgument,
                   "the grammar has %" PRIu64 " bytes; at most %" PRIu64 " are supported", length,
                   kLongestText);
    THIMBLE_LET(syntax, read({text, static_cast<size_t>(length)}));
    const auto trie = model->token_trie();
    for (const int32_t token : syntax.controls())
      if (!trie->is_control(token))
        return error(
            Code::kInvalidArgument,
            "the grammar names the token <[%d]>, which is not a control token of this model; write the "
            "text of other tokens in quotes, and leave out tokens that end an answer",
            token);
    THIMBLE_LET(automaton, grammar::Automaton::make(syntax));
    auto handle = std::make_unique<thimble_grammar>();
    handle->grammar = std::make_shared<const grammar::TokenGrammar>(trie, std::move(automaton));
    handle->model = model->model;
    *out = handle.release();
    return {};
  });
}

}  // namespace

thimble_status thimble_grammar_create_json_schema(const thimble_model* model, const char* schema,
                                                  uint64_t length, thimble_grammar** made,
                                                  thimble_error* out) {
  return create(model, schema, length, grammar::read_json_schema, made, out);
}

thimble_status thimble_grammar_create_regex(const thimble_model* model, const char* pattern, uint64_t length,
                                            thimble_grammar** made, thimble_error* out) {
  return create(model, pattern, length, grammar::read_regex, made, out);
}

thimble_status thimble_grammar_create_gbnf(const thimble_model* model, const char* text, uint64_t length,
                                           thimble_grammar** made, thimble_error* out) {
  return create(model, text, length, grammar::read_gbnf, made, out);
}

void thimble_grammar_free(thimble_grammar* grammar) { delete grammar; }
