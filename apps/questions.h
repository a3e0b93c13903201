// thimble run --questions: one reading serves many questions.
#pragma once

#include <string>

#include "apps/options.h"

namespace app {

// Reads `book` once, asks each question of the JSON file on a clone of that reading, and prints what came.
// Gives the exit code.
int ask_questions(const Settings& settings, const Model& model, const std::string& book,
                  const std::string& questions_path);

}  // namespace app
