#include "templates/jinja/template.h"

#include "templates/jinja/machine.h"
#include "templates/jinja/parser.h"

namespace thimble::jinja {

Result<Template> Template::parse(std::string_view source) {
  // Published templates have at most 17 KB. One byte of source becomes up to 140 bytes of tokens and tree.
  constexpr size_t kLongest = 256 << 10;
  if (source.size() > kLongest) return error(Code::kUnsupported, "the template is longer than 256 KiB");
  THIMBLE_LET(block, jinja::parse(source));
  Template made;
  made.block_ = std::make_shared<const Block>(std::move(block));
  made.host_bytes_ = source.size() / 4 * sizeof(Expression);  // estimate: a node per four characters
  return made;
}

Result<std::string> Template::render(Heap& heap, const Dict& variables, int64_t now) const {
  return Machine(heap, now).render(*block_, variables);
}

}  // namespace thimble::jinja
