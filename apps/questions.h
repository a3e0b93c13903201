// Implements `thimble run --questions`, which reads a text once for many questions.
#pragma once

#include <string>

#include "apps/options.h"
#include "apps/prompt.h"

namespace app {

// Reads the book once, asks each question of the JSON file on a clone of that session, and prints the
// answers. If `session_path` is not empty, the session is saved there after the reading, and each question
// continues from the file instead of a clone. Returns the exit code.
int ask_questions(const Settings& settings, const Model& model, const LongText& book,
                  const std::string& questions_path, const std::string& session_path);

}  // namespace app
