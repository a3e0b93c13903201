// The training entry points of a library that was built without training (THIMBLE_TRAINING=OFF). No training
// can be created, so the other functions never receive one.
#include "capi/handles.h"

using namespace thimble;
using namespace thimble::capi;

namespace {

Status is_left_out() {
  return error(
      Code::kUnsupported,
      "this library was built without training; train with a library that has it, and use the file here");
}

}  // namespace

void thimble_training_options_init(thimble_training_options* options, uint32_t struct_size) {
  init_struct(options, struct_size, thimble_training_options{});
}

thimble_status thimble_training_create(const thimble_model*, const thimble_training_options*,
                                       thimble_training**, thimble_error* out) {
  return guard(out, is_left_out);
}

thimble_status thimble_training_step(thimble_training*, thimble_training_progress*, thimble_error* out) {
  return guard(out, is_left_out);
}

thimble_status thimble_training_save(thimble_training*, thimble_error* out) {
  return guard(out, is_left_out);
}

thimble_status thimble_training_report(const thimble_training*, char*, uint64_t, uint64_t*,
                                       thimble_error* out) {
  return guard(out, is_left_out);
}

void thimble_training_free(thimble_training*) {}
