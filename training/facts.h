// Facts that are hidden in training texts: sentences, and a question about them.
#pragma once

#include <string>
#include <vector>

#include "training/random.h"

namespace thimble {

struct Fact {
  std::string subject;                 // identifies the fact; unique within one text
  std::vector<std::string> sentences;  // hidden in this order, each at a different place
  std::string question, answer;
  // Strings that a right answer must contain, in any wording. Empty if many models cannot answer the question
  // even with the full text; a check then does not ask it.
  std::vector<std::string> expected;
  bool listed = false;  // facts of this kind may also stand together as a list
};

// A fact about a person, place or thing.
Fact make_fact(Random&);
// A pass key or a sequence of digits.
Fact make_key(Random&, bool sequence);
// A line of a list of pairs. `hex`: eight hexadecimal digits each; else words and a number.
Fact make_pair(Random&, bool hex);
// A name that gets several values at different places. The question asks for all of them.
Fact make_values(Random&);
// Variables that copy their value from one another, at different places. The question asks which of them have
// it.
Fact make_chain(Random&);
// A list of at least `words` words. The question asks for the most frequent ones.
Fact make_count(Random&, uint32_t words);
// A function or a constant of a program. The question asks for its result or value.
constexpr uint32_t kLanguages = 3;
Fact make_code(Random&, uint32_t language);
// The beginning of a text: one sentence, or nothing.
std::string make_introduction(Random&);

}  // namespace thimble
