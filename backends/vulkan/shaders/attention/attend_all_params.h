// Parameters of the shaders of attend_all: for C++ and GLSL.
#ifndef THIMBLE_VULKAN_ATTEND_ALL_PARAMS_H
#define THIMBLE_VULKAN_ATTEND_ALL_PARAMS_H

// Vectors of queries that a workgroup works for, and entries that it reads at a time: those of a page.
#define kAllVectors 16u
#define kAllEntries 16u

#ifdef __cplusplus
#include "backends/op_params.h"
namespace thimble::vulkan {
#endif

struct AttendAllPagesParams {
  uint heads;          // of the layer
  uint page_capacity;  // as in AttendAllParams
  uint stored_stride;
};

struct AttendAllQueryParams {
  uint heads, group, head_dim;
  uint row_stride, page_capacity, head_state;
  float scale;
  RopeParams rope;
};

struct AttendAllPartParams {
  uint first_head;  // of the dispatch
  uint heads, group;  // of the layer
  uint first_block;        // of kAllVectors vectors
  uint chunk_capacity, head_state, page_capacity, rows_stride, if_stored;
  float cap;
  RopeParams rope;
};

struct AttendAllJoinParams {
  uint heads;  // of the layer
  uint parts, y_stride, if_stored;
};

#ifdef __cplusplus
}  // namespace thimble::vulkan
#endif

#endif
