#include "templates/jinja/parser.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <utility>

#include "templates/jinja/builtins.h"
#include "templates/jinja/lexer.h"
#include "templates/jinja/text.h"

namespace thimble::jinja {
namespace {

using Kind = Expression::Kind;
using Expressions = std::vector<ExpressionPtr>;

constexpr uint32_t kDeepestSource = 100;  // nesting of brackets and statements
constexpr uint32_t kDeepestTree = 200;    // depth of the tree; chains such as a + b + c deepen it too

// Binary operators bind by level; "not" is between "and" and the comparisons.
constexpr int kOr = 1, kAnd = 2, kComparison = 4;
int level_of(const Token& token, const Token& next) {
  if (token.kind == Token::Kind::kName) {
    if (token.text == "or") return kOr;
    if (token.text == "and") return kAnd;
    return token.text == "in" || (token.text == "not" && next.text == "in") ? kComparison : 0;
  }
  if (token.kind != Token::Kind::kOperator) return 0;
  const std::pair<std::string_view, int> levels[] = {{"==", kComparison},
                                                     {"!=", kComparison},
                                                     {"<", kComparison},
                                                     {">", kComparison},
                                                     {"<=", kComparison},
                                                     {">=", kComparison},
                                                     {"+", 5},
                                                     {"-", 5},
                                                     {"~", 6},
                                                     {"*", 7},
                                                     {"/", 7},
                                                     {"//", 7},
                                                     {"%", 7},
                                                     {"**", 8}};
  for (const auto& [text, level] : levels)
    if (token.text == text) return level;
  return 0;
}

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}
  Result<Block> run();

 private:
  // ---- statements ----
  Result<Block> block(std::initializer_list<std::string_view> ends);
  Result<Block> body_until(std::string_view end);
  Result<Statement> statement();
  Result<Statement> print();
  Result<Statement> if_statement(Statement s);
  Result<Statement> for_statement(Statement s);
  Result<Statement> set_statement(Statement s);
  Result<Statement> with_statement(Statement s);
  Result<Statement> macro_statement(Statement s);
  Result<Statement> call_statement(Statement s);
  Status parameters(Macro& macro);
  Status macro_body(Macro& macro, std::string_view end);
  Result<Statement> filter_statement(Statement s);
  Result<Target> target();
  Result<Target> one_target();
  Result<ExpressionPtr> filter_chain(ExpressionPtr subject);

  // ---- expressions ----
  Result<ExpressionPtr> tuple();
  Result<ExpressionPtr> conditional();
  Result<ExpressionPtr> binary(int least);
  Result<ExpressionPtr> comparison(ExpressionPtr left);
  Result<ExpressionPtr> unary(bool with_filters);
  Result<ExpressionPtr> primary();
  Result<ExpressionPtr> name();
  Result<ExpressionPtr> constant();
  Result<ExpressionPtr> integer(const std::string& digits);
  Result<ExpressionPtr> parenthesised();
  Result<ExpressionPtr> dict();
  Result<ExpressionPtr> postfix(ExpressionPtr left);
  Result<ExpressionPtr> attribute(ExpressionPtr left);
  Result<ExpressionPtr> subscript(ExpressionPtr left);
  Result<ExpressionPtr> filters_and_tests(ExpressionPtr left);
  Result<ExpressionPtr> filter(ExpressionPtr subject);
  Result<ExpressionPtr> test(ExpressionPtr subject);
  Result<ExpressionPtr> call(ExpressionPtr callee);
  Status arguments(Expression& of);

  // Creates a node with these children; fails if the tree becomes too deep.
  Result<ExpressionPtr> make(Kind kind, Expressions parts = {}, std::string text = {});
  Result<ExpressionPtr> check_depth(ExpressionPtr node) const;

  // ---- tokens ----
  const Token& peek(size_t ahead = 0) const { return tokens_[std::min(at_ + ahead, tokens_.size() - 1)]; }
  bool at(Token::Kind kind, std::string_view text) const {
    return peek().kind == kind && peek().text == text;
  }
  bool at_operator(std::string_view text) const { return at(Token::Kind::kOperator, text); }
  bool take(Token::Kind kind, std::string_view text) {
    const bool there = at(kind, text);
    at_ += there;
    return there;
  }
  bool take_operator(std::string_view text) { return take(Token::Kind::kOperator, text); }
  bool take_name(std::string_view text) { return take(Token::Kind::kName, text); }
  Status expect_operator(std::string_view text);
  Status end_of_tag(Token::Kind kind);
  Result<std::string> identifier();
  Status unexpected() const;
  Status fail(uint32_t line, const std::string& what) const {
    return error(Code::kUnsupported, "line %u: %s", line, what.c_str());
  }
  Status unknown(const char* kind, const std::string& name, uint32_t line) const {
    return fail(line, std::string("the ") + kind + " '" + name.substr(0, 64) + "' is not known here");
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  uint32_t depth_ = 0, loops_ = 0;
  const char* stack_ = nullptr;  // address at the start of the parse
  // Inside the branch of a condition. Unknown filters and tests in a branch are errors only when it runs, as
  // in Jinja2.
  bool in_branch_ = false;
  // The first unknown filter or test outside of branches; parsing fails with it
  std::optional<Status> unknown_;
  std::vector<Macro*> macros_;  // the macros around the current place
};

// Sets a member for the lifetime of this object.
template <typename T>
struct During {
  During(T& place, T now) : place_(place), before_(std::exchange(place, now)) {}
  ~During() { place_ = before_; }
  T& place_;
  const T before_;
};

// Counts the nesting depth and fails beyond kDeepestSource.
struct Deeper {
  explicit Deeper(uint32_t& depth_) : depth(depth_) { ++depth; }
  ~Deeper() { --depth; }
  uint32_t& depth;
};
#define THIMBLE_DEEPER()                                 \
  const Deeper deeper(depth_);                           \
  if (depth_ > kDeepestSource || stack_is_short(stack_)) \
  return fail(peek().line, "brackets or statements are nested too deeply")

Status Parser::unexpected() const {
  const Token& token = peek();
  switch (token.kind) {
    case Token::Kind::kEnd:
      return fail(token.line, "the template ends within a statement");
    case Token::Kind::kText:
    case Token::Kind::kPrintBegin:
    case Token::Kind::kPrintEnd:
    case Token::Kind::kBlockBegin:
    case Token::Kind::kBlockEnd:
      return fail(token.line, "a tag ends where more is expected");
    default:
      return fail(token.line, "'" + token.text.substr(0, 64) + "' is not expected here");
  }
}

Status Parser::expect_operator(std::string_view text) {
  return take_operator(text) ? Status() : unexpected();
}

Status Parser::end_of_tag(Token::Kind kind) {
  if (peek().kind != kind) return unexpected();
  ++at_;
  return {};
}

Result<std::string> Parser::identifier() {
  if (peek().kind != Token::Kind::kName) return unexpected();
  return tokens_[at_++].text;
}

Result<ExpressionPtr> Parser::check_depth(ExpressionPtr node) const {
  const auto count = [&](const ExpressionPtr& child) {
    if (child) node->depth = std::max(node->depth, child->depth + 1);
  };
  for (const ExpressionPtr& part : node->parts) count(part);
  for (const ExpressionPtr& argument : node->arguments) count(argument);
  for (const auto& [name, argument] : node->keywords) count(argument);
  count(node->more);
  count(node->more_keywords);
  if (node->depth > kDeepestTree) return fail(node->line, "an expression is too long");
  return node;
}

Result<ExpressionPtr> Parser::make(Kind kind, Expressions parts, std::string text) {
  auto node = std::make_unique<Expression>();
  node->kind = kind;
  node->line = peek().line;
  node->text = std::move(text);
  node->parts = std::move(parts);
  return check_depth(std::move(node));
}

template <typename... Parts>
Expressions list_of(Parts... parts) {
  Expressions all;
  (all.push_back(std::move(parts)), ...);
  return all;
}

// ---- expressions ----

Result<ExpressionPtr> Parser::tuple() {
  THIMBLE_LET(first, conditional());
  if (!at_operator(",")) return std::move(first);
  Expressions parts = list_of(std::move(first));
  while (take_operator(",")) {
    if (peek().kind == Token::Kind::kBlockEnd || peek().kind == Token::Kind::kPrintEnd || at_operator(")"))
      break;
    THIMBLE_LET(next, conditional());
    parts.push_back(std::move(next));
  }
  return make(Kind::kTuple, std::move(parts));
}

Result<ExpressionPtr> Parser::conditional() {
  THIMBLE_DEEPER();
  const bool refused = unknown_.has_value();
  THIMBLE_LET(value, binary(kOr));
  ExpressionPtr left = std::move(value);
  // All parts count as branches, including the one already parsed.
  const bool branches = at(Token::Kind::kName, "if");
  if (branches && !refused) unknown_.reset();
  const During branch(in_branch_, in_branch_ || branches);
  while (take_name("if")) {
    THIMBLE_LET(condition, binary(kOr));
    ExpressionPtr otherwise;
    if (take_name("else")) {
      THIMBLE_LET(other, conditional());
      otherwise = std::move(other);
    }
    THIMBLE_LET(node, make(Kind::kIf, list_of(std::move(condition), std::move(left), std::move(otherwise))));
    left = std::move(node);
  }
  return left;
}

Result<ExpressionPtr> Parser::binary(int least) {
  THIMBLE_DEEPER();
  ExpressionPtr left;
  if (least <= kComparison && at(Token::Kind::kName, "not")) {
    ++at_;
    THIMBLE_LET(operand, binary(kComparison));
    THIMBLE_LET(node, make(Kind::kUnary, list_of(std::move(operand))));
    node->operators = {"not"};
    left = std::move(node);
  } else {
    THIMBLE_LET(node, unary(true));
    left = std::move(node);
  }
  for (int level; (level = level_of(peek(), peek(1))) >= least && level > 0;) {
    if (level == kComparison) {
      THIMBLE_LET(node, comparison(std::move(left)));
      left = std::move(node);
      continue;
    }
    const std::string op = tokens_[at_++].text;
    THIMBLE_LET(right, binary(level + 1));
    const Kind kind = level == kOr ? Kind::kOr : level == kAnd ? Kind::kAnd : Kind::kBinary;
    THIMBLE_LET(node, make(kind, list_of(std::move(left), std::move(right))));
    node->operators = {op};
    left = std::move(node);
  }
  return left;
}

// a < b < c, as in Python.
Result<ExpressionPtr> Parser::comparison(ExpressionPtr left) {
  std::vector<std::string> operators;
  Expressions parts = list_of(std::move(left));
  while (level_of(peek(), peek(1)) == kComparison) {
    std::string op = tokens_[at_++].text;
    if (op == "not") op += " " + tokens_[at_++].text;
    operators.push_back(std::move(op));
    THIMBLE_LET(right, binary(kComparison + 1));
    parts.push_back(std::move(right));
  }
  THIMBLE_LET(node, make(Kind::kCompare, std::move(parts)));
  node->operators = std::move(operators);
  return std::move(node);
}

Result<ExpressionPtr> Parser::unary(bool with_filters) {
  THIMBLE_DEEPER();
  ExpressionPtr left;
  if (at_operator("-") || at_operator("+")) {
    const std::string op = tokens_[at_++].text;
    THIMBLE_LET(operand, unary(false));
    THIMBLE_LET(node, make(Kind::kUnary, list_of(std::move(operand))));
    node->operators = {op};
    left = std::move(node);
  } else {
    THIMBLE_LET(node, primary());
    THIMBLE_LET(whole, postfix(std::move(node)));
    left = std::move(whole);
  }
  if (!with_filters) return left;
  return filters_and_tests(std::move(left));
}

Result<ExpressionPtr> Parser::primary() {
  if (peek().kind == Token::Kind::kName) return name();
  if (peek().kind == Token::Kind::kOperator) {
    if (take_operator("(")) return parenthesised();
    if (take_operator("{")) return dict();
    if (!take_operator("[")) return unexpected();
    Expressions parts;
    while (!take_operator("]")) {
      if (!parts.empty()) THIMBLE_TRY(expect_operator(","));
      if (take_operator("]")) break;
      THIMBLE_LET(part, conditional());
      parts.push_back(std::move(part));
    }
    return make(Kind::kList, std::move(parts));
  }
  return constant();
}

Result<ExpressionPtr> Parser::name() {
  const std::string text = tokens_[at_].text;
  for (const char* word : {"and", "or", "not", "in", "is", "if", "else"})  // keywords, which cannot be names
    if (text == word) return unexpected();
  for (Macro* macro : macros_) {
    macro->takes_more |= text == "varargs";
    macro->takes_keywords |= text == "kwargs";
    macro->takes_caller |= text == "caller";
  }
  THIMBLE_LET(node, make(Kind::kName, {}, text));
  ++at_;
  const std::pair<std::string_view, Value> constants[] = {
      {"true", true}, {"True", true}, {"false", false}, {"False", false}, {"none", None()}, {"None", None()}};
  for (const auto& [word, value] : constants) {
    if (text != word) continue;
    node->kind = Kind::kConstant;
    node->constant = value;
  }
  return std::move(node);
}

Result<ExpressionPtr> Parser::constant() {
  const Token& token = peek();
  if (token.kind == Token::Kind::kInteger) return integer(token.text);
  THIMBLE_LET(node, make(Kind::kConstant));
  if (token.kind == Token::Kind::kFloat) {
    double number = 0;
    const auto read = std::from_chars(token.text.data(), token.text.data() + token.text.size(), number);
    if (read.ec == std::errc::result_out_of_range) number = float_beyond(token.text);
    node->constant = number;
    ++at_;
  } else if (token.kind == Token::Kind::kString) {
    std::string text;  // adjacent strings are joined
    while (peek().kind == Token::Kind::kString) text += tokens_[at_++].text;
    node->constant = make_text(text);
  } else {
    return unexpected();
  }
  return std::move(node);
}

Result<ExpressionPtr> Parser::integer(const std::string& digits) {
  THIMBLE_LET(node, make(Kind::kConstant));
  int64_t number = 0;
  const char kind = digits.size() > 2 && digits[0] == '0' ? digits[1] : '\0';
  const int base = kind == 'x' ? 16 : kind == 'o' ? 8 : kind == 'b' ? 2 : 10;
  const auto read =
      std::from_chars(digits.data() + (base == 10 ? 0 : 2), digits.data() + digits.size(), number, base);
  if (read.ec != std::errc() || read.ptr != digits.data() + digits.size())
    return fail(peek().line, "the number " + digits.substr(0, 32) + " is too large");
  node->constant = number;
  ++at_;
  return std::move(node);
}

Result<ExpressionPtr> Parser::parenthesised() {
  if (take_operator(")")) return make(Kind::kTuple);
  THIMBLE_LET(inner, tuple());
  THIMBLE_TRY(expect_operator(")"));
  return std::move(inner);
}

Result<ExpressionPtr> Parser::dict() {
  Expressions parts;
  while (!take_operator("}")) {
    if (!parts.empty()) THIMBLE_TRY(expect_operator(","));
    if (take_operator("}")) break;
    THIMBLE_LET(key, conditional());
    THIMBLE_TRY(expect_operator(":"));
    THIMBLE_LET(value, conditional());
    parts.push_back(std::move(key));
    parts.push_back(std::move(value));
  }
  return make(Kind::kDict, std::move(parts));
}

Result<ExpressionPtr> Parser::postfix(ExpressionPtr left) {
  for (;;) {
    if (take_operator(".")) {
      THIMBLE_LET(node, attribute(std::move(left)));
      left = std::move(node);
    } else if (take_operator("[")) {
      THIMBLE_LET(node, subscript(std::move(left)));
      left = std::move(node);
    } else if (take_operator("(")) {
      THIMBLE_LET(node, call(std::move(left)));
      left = std::move(node);
    } else {
      return left;
    }
  }
}

Result<ExpressionPtr> Parser::attribute(ExpressionPtr left) {
  if (peek().kind == Token::Kind::kInteger) {
    THIMBLE_LET(index, integer(peek().text));
    return make(Kind::kItem, list_of(std::move(left), std::move(index)));
  }
  THIMBLE_LET(text, identifier());
  return make(Kind::kAttribute, list_of(std::move(left)), text);
}

Result<ExpressionPtr> Parser::subscript(ExpressionPtr left) {
  Expressions bounds;
  bool slice = false;
  for (; !take_operator("]"); slice = true) {
    if (slice) THIMBLE_TRY(expect_operator(":"));
    if (at_operator("]") || at_operator(":")) {
      bounds.emplace_back();
      if (at_operator("]")) continue;
    } else {
      THIMBLE_LET(bound, conditional());
      bounds.push_back(std::move(bound));
    }
    if (at_operator(":") || at_operator("]")) continue;
    return unexpected();
  }
  if (bounds.empty() || bounds.size() > 3) return unexpected();
  if (bounds.size() == 1) return make(Kind::kItem, list_of(std::move(left), std::move(bounds[0])));
  bounds.resize(3);
  return make(Kind::kSlice,
              list_of(std::move(left), std::move(bounds[0]), std::move(bounds[1]), std::move(bounds[2])));
}

Result<ExpressionPtr> Parser::filters_and_tests(ExpressionPtr left) {
  for (;;) {
    if (take_operator("|")) {
      THIMBLE_LET(node, filter(std::move(left)));
      left = std::move(node);
    } else if (take_name("is")) {
      THIMBLE_LET(node, test(std::move(left)));
      left = std::move(node);
    } else if (take_operator("(")) {
      THIMBLE_LET(node, call(std::move(left)));
      left = std::move(node);
    } else {
      return left;
    }
  }
}

Result<ExpressionPtr> Parser::filter(ExpressionPtr subject) {
  const uint32_t line = peek().line;
  THIMBLE_LET(text, identifier());
  const Builtin* builtin = find_filter(text);
  if (!builtin && !in_branch_ && !unknown_) unknown_ = unknown("filter", text, line);
  THIMBLE_LET(node, make(Kind::kFilter, list_of(std::move(subject)), text));
  node->builtin = builtin;
  if (take_operator("(")) THIMBLE_TRY(arguments(*node));
  return check_depth(std::move(node));
}

Result<ExpressionPtr> Parser::test(ExpressionPtr subject) {
  const bool negated = take_name("not");
  const uint32_t line = peek().line;
  THIMBLE_LET(text, identifier());
  const Builtin* builtin = find_test(text);
  if (!builtin && !in_branch_ && !unknown_) unknown_ = unknown("test", text, line);
  THIMBLE_LET(node, make(Kind::kTest, list_of(std::move(subject)), text));
  node->builtin = builtin;
  // An argument may follow without parentheses: x is divisibleby 3.
  static const std::set<std::string_view> kWords = {"else", "or", "and", "if",
                                                    "not",  "in", "is",  "recursive"};
  const Token& next = peek();
  const bool operand = next.kind == Token::Kind::kString || next.kind == Token::Kind::kInteger ||
                       next.kind == Token::Kind::kFloat || at_operator("[") || at_operator("{") ||
                       (next.kind == Token::Kind::kName && !kWords.count(next.text));
  if (take_operator("(")) {
    THIMBLE_TRY(arguments(*node));
  } else if (operand) {
    THIMBLE_LET(first, primary());
    THIMBLE_LET(argument, postfix(std::move(first)));
    node->arguments.push_back(std::move(argument));
  }
  THIMBLE_LET(whole, check_depth(std::move(node)));
  if (!negated) return std::move(whole);
  THIMBLE_LET(inverse, make(Kind::kUnary, list_of(std::move(whole))));
  inverse->operators = {"not"};
  return std::move(inverse);
}

Result<ExpressionPtr> Parser::call(ExpressionPtr callee) {
  THIMBLE_LET(node, make(Kind::kCall, list_of(std::move(callee))));
  THIMBLE_TRY(arguments(*node));
  return check_depth(std::move(node));
}

// Parses arguments; the opening parenthesis was already read.
Status Parser::arguments(Expression& of) {
  for (bool first = true; !take_operator(")"); first = false) {
    if (!first) THIMBLE_TRY(expect_operator(","));
    if (take_operator(")")) break;
    if (at_operator("*") || at_operator("**")) {
      ExpressionPtr& more = at_operator("*") ? of.more : of.more_keywords;
      if (more || of.more_keywords) return unexpected();
      ++at_;
      THIMBLE_LET(value, conditional());
      more = std::move(value);
      continue;
    }
    if (of.more_keywords) return unexpected();
    if (peek().kind == Token::Kind::kName && peek(1).kind == Token::Kind::kOperator && peek(1).text == "=") {
      const std::string text = peek().text;
      at_ += 2;
      THIMBLE_LET(value, conditional());
      of.keywords.emplace_back(text, std::move(value));
      continue;
    }
    if (!of.keywords.empty() || of.more) return unexpected();
    THIMBLE_LET(value, conditional());
    of.arguments.push_back(std::move(value));
  }
  return {};
}

// ---- statements ----

Result<Block> Parser::run() {
  stack_ = static_cast<const char*>(__builtin_frame_address(0));
  THIMBLE_LET(whole, block({}));
  if (unknown_) return *unknown_;
  return std::move(whole);
}

// Parses statements up to a tag with one of these names, and consumes that tag up to its name.
Result<Block> Parser::block(std::initializer_list<std::string_view> ends) {
  THIMBLE_DEEPER();
  const uint32_t line = at_ ? tokens_[at_ - 1].line : 1;  // the line of the opening tag
  Block all;
  for (;;) {
    if (peek().kind == Token::Kind::kEnd) {
      if (ends.size() == 0) return all;
      return fail(line, "the statement that begins here has no {% " + std::string(*(ends.end() - 1)) + " %}");
    }
    if (peek().kind == Token::Kind::kText) {
      all.emplace_back();
      all.back().line = peek().line;
      all.back().text = tokens_[at_++].text;
    } else if (peek().kind == Token::Kind::kPrintBegin) {
      THIMBLE_LET(s, print());
      all.push_back(std::move(s));
    } else {
      ++at_;  // {%
      if (peek().kind == Token::Kind::kName && std::find(ends.begin(), ends.end(), peek().text) != ends.end())
        return all;
      THIMBLE_LET(s, statement());
      all.push_back(std::move(s));
    }
  }
}

// Parses a body and its end tag.
Result<Block> Parser::body_until(std::string_view end) {
  THIMBLE_LET(body, block({end}));
  ++at_;
  THIMBLE_TRY(end_of_tag(Token::Kind::kBlockEnd));
  return std::move(body);
}

Result<Statement> Parser::print() {
  ++at_;
  Statement s;
  s.kind = Statement::Kind::kPrint;
  s.line = peek().line;
  THIMBLE_LET(value, tuple());
  THIMBLE_TRY(end_of_tag(Token::Kind::kPrintEnd));
  s.value = std::move(value);
  return s;
}

Result<Statement> Parser::statement() {
  const uint32_t line = peek().line;
  THIMBLE_LET(word, identifier());
  Statement s;
  s.line = line;
  if (word == "if") return if_statement(std::move(s));
  if (word == "for") return for_statement(std::move(s));
  if (word == "set") return set_statement(std::move(s));
  if (word == "macro") return macro_statement(std::move(s));
  if (word == "call") return call_statement(std::move(s));
  if (word == "filter") return filter_statement(std::move(s));
  if (word == "with") return with_statement(std::move(s));
  if (word == "print") {
    s.kind = Statement::Kind::kPrint;
    THIMBLE_LET(first, conditional());
    s.value = std::move(first);
    while (take_operator(",")) {
      THIMBLE_LET(next, conditional());
      THIMBLE_LET(both, make(Kind::kBinary, list_of(std::move(s.value), std::move(next))));
      both->operators = {"~"};
      s.value = std::move(both);
    }
    THIMBLE_TRY(end_of_tag(Token::Kind::kBlockEnd));
    return s;
  }
  if (word == "generation") {
    s.kind = Statement::Kind::kWith;
    THIMBLE_TRY(end_of_tag(Token::Kind::kBlockEnd));
    const During branch(in_branch_, false);
    THIMBLE_LET(body, body_until("endgeneration"));
    s.body = std::move(body);
    return s;
  }
  if (word == "break" || word == "continue") {
    if (loops_ == 0) return fail(line, "{% " + word + " %} is outside of a loop");
    s.kind = word == "break" ? Statement::Kind::kBreak : Statement::Kind::kContinue;
    THIMBLE_TRY(end_of_tag(Token::Kind::kBlockEnd));
    return s;
  }
  for (const char* other : {"include", "import", "from", "extends", "block"})
    if (word == other) return fail(line, "{% " + word + " %} is not supported: there are no other templates");
  return unknown("statement", word, line);
}

Result<Statement> Parser::if_statement(Statement s) {
  s.kind = Statement::Kind::kIf;
  const During branch(in_branch_, true);
  for (;;) {
    THIMBLE_LET(condition, tuple());
    THIMBLE_TRY(end_of_tag(Token::Kind::kBlockEnd));
    THIMBLE_LET(body, block({"elif", "else", "endif"}));
    s.branches.emplace_back(std::move(condition), std::move(body));
    const std::string word = tokens_[at_++].text;
    if (word == "elif") continue;
    THIMBLE_TRY(end_of_tag(Token::Kind::kBlockEnd));
    if (word == "else") {
      THIMBLE_LET(otherwise, body_until("endif"));
      s.branches.emplace_back(nullptr, std::move(otherwise));
    }
    return s;
  }
}

// Parses a name, or several in parentheses.
Result<Target> Parser::one_target() {
  THIMBLE_DEEPER();
  if (take_operator("(")) {
    THIMBLE_LET(inner, target());
    THIMBLE_TRY(expect_operator(")"));
    return std::move(inner);
  }
  Target t;
  THIMBLE_LET(text, identifier());
  t.name = text;
  return t;
}

Result<Target> Parser::target() {
  THIMBLE_LET(first, one_target());
  if (!at_operator(",")) {
    if (!first.name.empty() && take_operator(".")) {
      THIMBLE_LET(attribute, identifier());
      first.attribute = attribute;
    }
    return std::move(first);
  }
  Target all;
  all.parts.push_back(std::move(first));
  while (take_operator(",")) {
    if (peek().kind != Token::Kind::kName && !at_operator("(")) break;
    if (at(Token::Kind::kName, "in")) break;
    THIMBLE_LET(next, one_target());
    all.parts.push_back(std::move(next));
  }
  return all;
}

Result<Statement> Parser::for_statement(Statement s) {
  s.kind = Statement::Kind::kFor;
  THIMBLE_LET(each, target());
  s.target = std::move(each);
  if (!s.target.attribute.empty() || !take_name("in")) return unexpected();
  // Parse at the level of "or": an "if" after it filters the elements.
  THIMBLE_LET(first, binary(kOr));
  s.value = std::move(first);
  if (at_operator(",")) {
    Expressions parts = list_of(std::move(s.value));
    while (take_operator(",")) {
      if (peek().kind == Token::Kind::kBlockEnd) break;
      THIMBLE_LET(next, binary(kOr));
      parts.push_back(std::move(next));
    }
    THIMBLE_LET(all, make(Kind::kTuple, std::move(parts)));
    s.value = std::move(all);
  }
  if (take_name("if")) {
    THIMBLE_LET(condition, conditional());
    s.condition = std::move(condition);
  }
  s.recursive = take_name("recursive");
  THIMBLE_TRY(end_of_tag(Token::Kind::kBlockEnd));
  const During branch(in_branch_, false);
  ++loops_;
  THIMBLE_LET(body, block({"else", "endfor"}));
  --loops_;
  s.body = std::move(body);
  const bool otherwise = tokens_[at_++].text == "else";
  THIMBLE_TRY(end_of_tag(Token::Kind::kBlockEnd));
  if (otherwise) {
    THIMBLE_LET(other, body_until("endfor"));
    s.otherwise = std::move(other);
  }
  return s;
}

Result<Statement> Parser::set_statement(Statement s) {
  THIMBLE_LET(to, target());
  s.target = std::move(to);
  if (take_operator("=")) {
    s.kind = Statement::Kind::kSet;
    THIMBLE_LET(value, tuple());
    s.value = std::move(value);
    THIMBLE_TRY(end_of_tag(Token::Kind::kBlockEnd));
    return s;
  }
  s.kind = Statement::Kind::kSetBlock;
  if (!s.target.parts.empty()) return unexpected();
  if (at_operator("|")) {
    THIMBLE_LET(subject, make(Kind::kConstant));
    THIMBLE_LET(filters, filter_chain(std::move(subject)));
    s.filters = std::move(filters);
  }
  THIMBLE_TRY(end_of_tag(Token::Kind::kBlockEnd));
  const During branch(in_branch_, false);
  THIMBLE_LET(body, body_until("endset"));
  s.body = std::move(body);
  return s;
}

// Parses |a|b. The machine later replaces `subject` by the text of the body.
Result<ExpressionPtr> Parser::filter_chain(ExpressionPtr subject) {
  while (take_operator("|")) {
    THIMBLE_LET(node, filter(std::move(subject)));
    subject = std::move(node);
  }
  return subject;
}

Result<Statement> Parser::filter_statement(Statement s) {
  s.kind = Statement::Kind::kFilter;
  const During branch(in_branch_, false);
  THIMBLE_LET(subject, make(Kind::kConstant));
  THIMBLE_LET(first, filter(std::move(subject)));
  THIMBLE_LET(filters, filter_chain(std::move(first)));
  s.filters = std::move(filters);
  THIMBLE_TRY(end_of_tag(Token::Kind::kBlockEnd));
  THIMBLE_LET(body, body_until("endfilter"));
  s.body = std::move(body);
  return s;
}

// {% with a=1, b=2 %}: the values are evaluated in the scope around the statement.
Result<Statement> Parser::with_statement(Statement s) {
  s.kind = Statement::Kind::kWith;
  const During branch(in_branch_, false);
  while (peek().kind != Token::Kind::kBlockEnd) {
    if (!s.assignments.empty()) THIMBLE_TRY(expect_operator(","));
    THIMBLE_LET(to, one_target());
    THIMBLE_TRY(expect_operator("="));
    THIMBLE_LET(value, conditional());
    s.assignments.emplace_back(std::move(to), std::move(value));
  }
  ++at_;
  THIMBLE_LET(body, body_until("endwith"));
  s.body = std::move(body);
  return s;
}

// Parses the parameters of a macro or call statement; the opening parenthesis was already read.
Status Parser::parameters(Macro& macro) {
  while (!take_operator(")")) {
    if (!macro.parameters.empty()) THIMBLE_TRY(expect_operator(","));
    THIMBLE_LET(parameter, identifier());
    ExpressionPtr otherwise;
    if (take_operator("=")) {
      THIMBLE_LET(value, conditional());
      otherwise = std::move(value);
    } else if (!macro.parameters.empty() && macro.parameters.back().second) {
      return fail(peek().line, "a parameter without a default follows one with a default");
    }
    macro.parameters.emplace_back(parameter, std::move(otherwise));
  }
  return {};
}

Status Parser::macro_body(Macro& macro, std::string_view end) {
  THIMBLE_TRY(end_of_tag(Token::Kind::kBlockEnd));
  const During<uint32_t> loops(loops_, 0);
  const During branch(in_branch_, false);
  macros_.push_back(&macro);
  THIMBLE_LET(body, body_until(end));
  macros_.pop_back();
  macro.body = std::move(body);
  return {};
}

Result<Statement> Parser::macro_statement(Statement s) {
  s.kind = Statement::Kind::kMacro;
  s.macro = std::make_shared<Macro>();
  THIMBLE_LET(text, identifier());
  s.macro->name = text;
  THIMBLE_TRY(expect_operator("("));
  THIMBLE_TRY(parameters(*s.macro));
  THIMBLE_TRY(macro_body(*s.macro, "endmacro"));
  return s;
}

// {% call(a, b) f(x) %}: the body becomes a macro that f can call as `caller`.
Result<Statement> Parser::call_statement(Statement s) {
  s.kind = Statement::Kind::kCall;
  s.macro = std::make_shared<Macro>();
  s.macro->name = "caller";
  if (take_operator("(")) THIMBLE_TRY(parameters(*s.macro));
  THIMBLE_LET(value, conditional());
  if (value->kind != Kind::kCall) return fail(s.line, "{% call %} needs a call");
  s.value = std::move(value);
  THIMBLE_TRY(macro_body(*s.macro, "endcall"));
  return s;
}

}  // namespace

Result<Block> parse(std::string_view source) {
  THIMBLE_LET(tokens, lex(source));
  return Parser(std::move(tokens)).run();
}

}  // namespace thimble::jinja
