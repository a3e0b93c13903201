// A template as a tree: what the parser makes and the machine runs.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "templates/jinja/value.h"

namespace thimble::jinja {

struct Builtin;
struct Expression;
using ExpressionPtr = std::unique_ptr<Expression>;

struct Expression {
  enum class Kind {
    kConstant,   // constant
    kName,       // text
    kAttribute,  // parts[0] . text
    kItem,       // parts[0] [ parts[1] ]
    kSlice,      // parts[0] [ parts[1] : parts[2] : parts[3] ], null where left out
    kList,       // parts
    kTuple,      // parts
    kDict,       // parts: key, value, key, value
    kUnary,      // operators[0] ("not", "-", "+") parts[0]
    kBinary,     // parts[0] operators[0] parts[1]
    kCompare,    // parts[0] operators[0] parts[1] operators[1] parts[2] ...
    kAnd,        // parts[0] and parts[1]
    kOr,
    kIf,      // parts[1] if parts[0] else parts[2], which may be null
    kFilter,  // parts[0] | text(arguments), builtin null where it is not known
    kTest,    // parts[0] is text(arguments), the same
    kCall     // parts[0](arguments)
  };
  Kind kind;
  uint32_t line;
  uint32_t depth = 1;  // of the tree below, itself counted
  std::string text;
  Value constant;
  std::vector<std::string> operators;
  std::vector<ExpressionPtr> parts, arguments;
  std::vector<std::pair<std::string, ExpressionPtr>> keywords;
  ExpressionPtr more, more_keywords;  // f(*more, **more_keywords), or null
  const Builtin* builtin = nullptr;
};

// What a set or a for statement assigns: one name, a namespace's attribute, or several that a value is spread
// over.
struct Target {
  std::string name, attribute;
  std::vector<Target> parts;  // where it is spread; then there is no name
};

struct Statement;
using Block = std::vector<Statement>;

struct Macro;

struct Statement {
  enum class Kind {
    kText,      // text
    kPrint,     // value
    kIf,        // branches
    kFor,       // target, value, condition (may be null), body, otherwise, recursive
    kSet,       // target, value
    kSetBlock,  // target, body, filters (may be null)
    kWith,      // assignments, body; without any it is a scope of its own: generation
    kMacro,     // macro
    kCall,      // value, a call that is given `macro` as its caller
    kFilter,    // filters, body
    kBreak,
    kContinue
  };
  Kind kind = Kind::kText;
  uint32_t line = 0;
  std::string text;
  Target target;
  // `filters` is a chain of kFilter whose innermost subject, a constant, stands for the text of the body.
  ExpressionPtr value, condition, filters;
  Block body, otherwise;
  bool recursive = false;
  std::vector<std::pair<Target, ExpressionPtr>> assignments;
  std::vector<std::pair<ExpressionPtr, Block>> branches;  // the condition of the last is null for else
  std::shared_ptr<Macro> macro;
};

struct Macro {
  std::string name;
  std::vector<std::pair<std::string, ExpressionPtr>> parameters;  // with a default, or null
  // Whether the body asks for what its parameters do not take, and for the body of a call statement.
  bool takes_more = false, takes_keywords = false, takes_caller = false;
  Block body;
};

}  // namespace thimble::jinja
