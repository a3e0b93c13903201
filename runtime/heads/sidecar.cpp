#include "runtime/heads/sidecar.h"

namespace thimble {

static std::string type_of(Retainer::Kind kind) {
  return kind == Retainer::Kind::kAdore ? "adore" : "retainer";
}

void begin_sidecar(NewGguf& file, const Model& model, const std::string& name, Retainer::Kind kind) {
  const std::string type = type_of(kind), base = type + ".base.";
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

void set_trained_on(NewGguf& file, Retainer::Kind kind, const TrainedOn& on) {
  const std::string trained = type_of(kind) + ".trained.";
  std::string names;
  for (const std::string& path : on.data)
    names += (names.empty() ? "" : ", ") + path.substr(path.find_last_of("/\\") + 1);
  file.set(trained + "texts", on.texts);
  file.set(trained + "tokens", on.tokens);
  if (on.steps) file.set(trained + "steps", on.steps);
  file.set(trained + "seed", on.seed);
  file.set(trained + "data", names);
}

}  // namespace thimble
