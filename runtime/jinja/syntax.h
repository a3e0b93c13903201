// A template as a tree: what the parser makes and the machine runs.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/jinja/value.h"

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
    kFilter,  // parts[0] | builtin(arguments)
    kTest,    // parts[0] is builtin(arguments)
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
  const Builtin* builtin = nullptr;
};

// What a set or a for statement assigns: one name, several that a value is spread over, or a namespace's
// attribute.
struct Target {
  std::vector<std::string> names;
  bool spread = false;
  std::string attribute;  // of names[0]
};

struct Statement;
using Block = std::vector<Statement>;

struct Macro;

struct Statement {
  enum class Kind {
    kText,      // text
    kPrint,     // value
    kIf,        // branches
    kFor,       // target, value, condition (may be null), body, otherwise
    kSet,       // target, value
    kSetBlock,  // target, body, filters (may be null)
    kMacro,     // macro
    kFilter,    // filters, body
    kBreak,
    kContinue,
    kScope  // body in a scope of its own: generation
  };
  Kind kind = Kind::kText;
  uint32_t line = 0;
  std::string text;
  Target target;
  // `filters` is a chain of kFilter whose innermost subject, a constant, stands for the text of the body.
  ExpressionPtr value, condition, filters;
  Block body, otherwise;
  std::vector<std::pair<ExpressionPtr, Block>> branches;  // the condition of the last is null for else
  std::shared_ptr<Macro> macro;
};

struct Macro {
  std::string name;
  std::vector<std::pair<std::string, ExpressionPtr>> parameters;  // with a default, or null
  Block body;
};

}  // namespace thimble::jinja
