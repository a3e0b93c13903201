// The syntax tree of a template. The parser creates it and the machine runs it.
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
    kSlice,      // parts[0] [ parts[1] : parts[2] : parts[3] ]; omitted parts are null
    kList,       // parts
    kTuple,      // parts
    kDict,       // parts: key, value, key, value
    kUnary,      // operators[0] ("not", "-", "+") parts[0]
    kBinary,     // parts[0] operators[0] parts[1]
    kCompare,    // parts[0] operators[0] parts[1] operators[1] parts[2] ...
    kAnd,        // parts[0] and parts[1]
    kOr,
    kIf,      // parts[1] if parts[0] else parts[2], which may be null
    kFilter,  // parts[0] | text(arguments); builtin is null if unknown
    kTest,    // parts[0] is text(arguments); builtin as for kFilter
    kCall     // parts[0](arguments)
  };
  Kind kind;
  uint32_t line;
  uint32_t depth = 1;  // of the tree below, including this node
  std::string text;
  Value constant;
  std::vector<std::string> operators;
  std::vector<ExpressionPtr> parts, arguments;
  std::vector<std::pair<std::string, ExpressionPtr>> keywords;
  ExpressionPtr more, more_keywords;  // f(*more, **more_keywords), or null
  const Builtin* builtin = nullptr;
};

// What a set or for statement assigns to: a name, an attribute of a namespace, or several targets that the
// value is unpacked into.
struct Target {
  std::string name, attribute;
  std::vector<Target> parts;  // targets to unpack into; then there is no name
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
    kWith,      // assignments, body; {% generation %} is a kWith without assignments, only a scope
    kMacro,     // macro
    kCall,      // value, a call that gets `macro` as its caller
    kFilter,    // filters, body
    kBreak,
    kContinue
  };
  Kind kind = Kind::kText;
  uint32_t line = 0;
  std::string text;
  Target target;
  // `filters` is a chain of kFilter. Its innermost subject is a constant that stands for the text of the
  // body.
  ExpressionPtr value, condition, filters;
  Block body, otherwise;
  bool recursive = false;
  std::vector<std::pair<Target, ExpressionPtr>> assignments;
  std::vector<std::pair<ExpressionPtr, Block>> branches;  // a null condition in the last one means else
  std::shared_ptr<Macro> macro;
};

struct Macro {
  std::string name;
  std::vector<std::pair<std::string, ExpressionPtr>> parameters;  // name and default, which may be null
  // Whether the body uses `varargs`, `kwargs` and `caller`.
  bool takes_more = false, takes_keywords = false, takes_caller = false;
  Block body;
};

}  // namespace thimble::jinja
