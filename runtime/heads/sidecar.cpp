#include "runtime/heads/sidecar.h"

namespace thimble {

void begin_sidecar(NewGguf& file, const Model& model, const std::string& name, Retainer::Kind kind) {
  const std::string type = kind == Retainer::Kind::kAdore ? "adore" : "retainer", base = type + ".base.";
  file.set("general.type", "adapter");
  file.set("adapter.type", type);
  file.set("general.architecture", model.info.architecture);
  file.set("general.name", name);
  if (type == "retainer") file.set("retainer.kind", name_of(kind));
  file.set(base + "block_count", model.shape.layers);
  file.set(base + "head_count", model.shape.heads);
  file.set(base + "head_count_kv", model.shape.kv_heads);
  file.set(base + "key_length", model.shape.head_dim);
  file.set(base + "fingerprint", model.fingerprint());
}

}  // namespace thimble
