// What is hidden in the texts that retainers are trained with: sentences, and questions about them.
#pragma once

#include <string>
#include <vector>

#include "training/random.h"

namespace thimble {

struct Fact {
  std::string subject;                 // tells facts of one text apart: no two may share it
  std::vector<std::string> sentences;  // in this order, each somewhere else
  std::string question, answer;
  // What a right answer must contain, however it is put. Empty: many models cannot answer it with all of the
  // text before them, so that a check does not ask it.
  std::vector<std::string> expected;
  bool listed = false;  // its kind may also stand in one place, one behind the other
};

// A fact about a person, place or thing.
Fact make_fact(Random&);
// A pass key or a sequence of digits.
Fact make_key(Random&, bool sequence);
// A line of a list of pairs. `hex`: eight hexadecimal digits each; else words and a number.
Fact make_pair(Random&, bool hex);
// A name that gets several values, each in a place of its own, all of which are asked for.
Fact make_values(Random&);
// Variables that get their value from one another, each in a place of its own; who has it is asked.
Fact make_chain(Random&);
// A list of so many words at least, of which the most frequent are asked for.
Fact make_count(Random&, uint32_t words);
// A function or a constant of a program, and what it gives.
constexpr uint32_t kLanguages = 3;
Fact make_code(Random&, uint32_t language);
// What a text begins with, a sentence or nothing.
std::string make_introduction(Random&);

}  // namespace thimble
