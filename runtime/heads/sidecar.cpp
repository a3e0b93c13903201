#include "runtime/heads/sidecar.h"

namespace thimble {

void begin_sidecar(NewGguf& file, const Model& model, const std::string& name, Retainer::Kind kind) {
  file.set("general.type", "adapter");
  file.set("adapter.type", "retainer");
  file.set("general.architecture", model.info.architecture);
  file.set("general.name", name);
  file.set("retainer.kind", name_of(kind));
  file.set("retainer.base.block_count", model.shape.layers);
  file.set("retainer.base.head_count", model.shape.heads);
  file.set("retainer.base.head_count_kv", model.shape.kv_heads);
  file.set("retainer.base.key_length", model.shape.head_dim);
  file.set("retainer.base.fingerprint", model.fingerprint());
}

}  // namespace thimble
