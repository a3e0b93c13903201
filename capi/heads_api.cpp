// Entry points for files of retainers: importing published files, and reading the contents of a sidecar.
#include "capi/handles.h"
#include "runtime/heads/import.h"
#include "runtime/heads/info.h"

using namespace thimble;
using namespace thimble::capi;

thimble_status thimble_heads_import(const thimble_model* model, const char* input, const char* kind,
                                    const char* output, thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(model, "model"));
    THIMBLE_TRY(need(input, "input"));
    THIMBLE_TRY(need(output, "output"));
    return import_heads(*model->model, input, kind ? kind : "", output);
  });
}

thimble_status thimble_heads_info(const char* path, const thimble_model* model, char* json, uint64_t capacity,
                                  uint64_t* length, thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(path, "path"));
    THIMBLE_TRY(need_buffer(json, capacity, length, "json"));
    THIMBLE_LET(text, describe_heads(path, model ? model->model.get() : nullptr));
    return give_text(text, json, capacity, length);
  });
}
