// Messages rewritten for chat templates that do not take them as they are.
#pragma once

#include "base/status.h"
#include "templates/jinja/value.h"

namespace thimble {

// Puts each system message in front of the next message of the user, for templates without system messages.
// One that no such message follows stays.
Status fold_system(jinja::Heap&, jinja::List& messages);
// Ids of tool calls as nine letters and digits, which is what Mistral's templates take: equal ids stay equal.
Status shorten_ids(jinja::Heap&, jinja::List& messages);
// What an answer says next to its calls becomes part of its thoughts where it has both: gpt-oss' template
// writes one of the two.
Status join_thoughts(jinja::Heap&, jinja::List& messages);
// Arguments of calls as JSON text, for templates that do not write objects.
Status write_arguments(jinja::Heap&, jinja::List& messages);

}  // namespace thimble
