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
// What a text begins with, a sentence or nothing.
std::string make_introduction(Random&);

}  // namespace thimble
