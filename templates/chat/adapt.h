// Rewrites messages for chat templates that do not accept them as they are.
#pragma once

#include "base/status.h"
#include "templates/jinja/value.h"

namespace thimble {

// Prepends each system message to the next user message, for templates without system messages. A system
// message that no user message follows stays.
Status fold_system(jinja::Heap&, jinja::List& messages);
// Replaces ids of tool calls by nine letters and digits, the form that Mistral's templates accept. Equal ids
// stay equal.
Status shorten_ids(jinja::Heap&, jinja::List& messages);
// If an answer with calls has both content and thoughts, appends the content to the thoughts: gpt-oss'
// template writes only one of the two.
Status join_thoughts(jinja::Heap&, jinja::List& messages);
// Where a template reads the thoughts of an answer.
enum class ThoughtPlace {
  kFields,  // in fields of the message
  kChunks,  // Ministral: the content is a list of chunks, of which some are thoughts
  kBlocks   // Apertus: the content is an object with a list of blocks, in every answer
};
// Puts thoughts where a template reads them.
Status place_thoughts(jinja::Heap&, jinja::List& messages, ThoughtPlace);
// Makes the content of an answer with calls none if it is empty: some templates write calls only then.
Status drop_empty_content(jinja::Heap&, jinja::List& messages);
// Writes arguments of calls as JSON text, for templates that do not write objects.
Status write_arguments(jinja::Heap&, jinja::List& messages);

}  // namespace thimble
