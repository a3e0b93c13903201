// What the shaders of dense ops are told, where it is more than the op's own parameters: for C++ and GLSL.
#ifndef THIMBLE_VULKAN_DENSE_PARAMS_H
#define THIMBLE_VULKAN_DENSE_PARAMS_H

#ifdef __cplusplus
#include "backends/op_params.h"
namespace thimble::vulkan {
#endif

// Elements of a sum of squares that matvec leaves for the norm of y.
#define kSquaresEach 4u

// matvec, product, product_cooperative and add_parts. A dispatch sees some rows of x and y and some of the
// matrix: op_params.h's LinearParams, in parts.
struct ProductParams {
  uint in_cols;    // of x; on matrix units: of both in scratch
  uint out_cols;   // rows of the matrix that this dispatch sees
  uint x_stride;   // elements from row to row of x
  uint y_stride;   // elements from row to row of y
  uint row_bytes;  // of the matrix
  uint first_row;  // the step's row that lies in row 0 of x and y
  uint rows;       // kStepRows, kLogitRows
  uint act;        // kActSilu, kActGelu
  uint has_bias;
  uint adds;         // y += W x + bias
  uint up_row;       // on matrix units, of a glu: where in W the other matrix begins
  uint depth_each;   // on matrix units: columns of x and W for a workgroup, a multiple of 32
  uint prepares;     // matvec: the norm of y
  uint scales;       // matvec: x was prepared so
  float eps;         // and what its norm wants
  uint writes_norm;  // and whether the norm is to be written
};

// scale_rows: x as f16, [rows][depth].
struct ScaleRowsParams {
  uint each;  // rows of x for a row of the step
  uint in_cols;
  uint depth;      // in_cols, rounded up to a multiple of 32; zeros behind in_cols
  uint x_stride;   // elements from row to row of x
  uint first_row;  // the step's row that lies in row 0
  uint rows;       // kStepRows, kLogitRows
};
// dequantize: W as f16, [rows][depth].
struct DequantizeParams {
  uint in_cols;
  uint depth;
  uint row_bytes;     // of the matrix
  uint first_expert;  // of experts: the first, and how many rows lie from one to the next in W and in what is
                      // made
  uint from_rows;
  uint to_rows;
};

// Experts: matvec, product and product_cooperative, which for them make rows of y that belong to slots. A
// dispatch makes some columns of y, with the matrices of some experts, which it sees from the first column's
// row of the first one on.
struct ExpertProductParams {
  uint in_cols;      // of x; on matrix units: of both in scratch
  uint out_cols;     // of y, that this dispatch makes
  uint x_stride;     // elements from row to row of x
  uint y_stride;     // elements from row to row of y
  uint row_bytes;    // of the matrices
  uint matrix_rows;  // from an expert to the next; on matrix units, a glu's other matrix is behind all
                     // experts'
  uint bias_rows;    // elements of an expert's bias
  uint experts;
  uint first_expert, seen_experts;  // whose matrices it sees
  uint first_slot, seen_slots;      // whose rows of y it sees
  uint of_tokens;                   // 1: x has a row for each token; 0: for each slot
  uint act;
  uint has_bias, has_up_bias;
  uint route_kind, route_share;  // matvec, where it chooses the experts by itself: of RouteParams
  float route_scale;
};
// add_experts.
struct AddExpertsParams {
  uint cols;      // of y, that this dispatch makes
  uint y_stride;  // elements from row to row of y
};
// slots_of_rows.
struct SlotsOfRowsParams {
  uint experts;
};

// embed. A dispatch sees some rows of the table.
struct TableParams {
  uint cols;
  uint row_bytes;
  uint first_token, tokens;  // it sees the rows of these; it leaves those of other tokens alone
};

#ifdef __cplusplus
}  // namespace thimble::vulkan
#endif

#endif
