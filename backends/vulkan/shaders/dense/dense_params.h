// Parameters of the shaders of dense ops, where they differ from the op's own parameters: for C++ and GLSL.
#ifndef THIMBLE_VULKAN_DENSE_PARAMS_H
#define THIMBLE_VULKAN_DENSE_PARAMS_H

#ifdef __cplusplus
#include "backends/op_params.h"
namespace thimble::vulkan {
#endif

// Elements per sum of squares that matvec leaves for the norm of y.
#define kSquaresEach 4u

// What an expert has besides a matrix: a bias, or a factor of the product.
#define kHasBias 1u
#define kHasScale 2u

// For matvec, product, product_cooperative and add_parts. A dispatch covers some rows of x and y and some
// rows of the matrix, that is, a part of op_params.h's LinearParams.
struct ProductParams {
  uint in_cols;    // of x; on matrix units: of x and W in scratch
  uint out_cols;   // rows of the matrix in this dispatch
  uint x_stride;   // elements between rows of x
  uint y_stride;   // elements between rows of y
  uint row_bytes;  // per row of the matrix
  uint first_row;  // the step's row that is row 0 of x and y
  uint rows;       // kStepRows, kLogitRows
  uint act;        // kActSilu, kActGelu
  uint has_bias;
  uint adds;              // 1: y += W x + bias
  uint up_row;            // on matrix units, for a glu: the row of W at which the other matrix begins
  uint depth_each;        // on matrix units: columns of x and W per workgroup, a multiple of 32
  uint prepares;          // matvec: prepares the norm of y
  uint scales;            // matvec: x is a prepared norm
  float eps;              // of that norm
  uint writes_norm;       // whether the finished norm is written
  float w_scale, up_scale;  // of the matrix, and of a glu's other matrix
};

// For scale_rows: x as f16, [rows][depth].
struct ScaleRowsParams {
  uint each;  // rows of x per row of the step
  uint in_cols;
  uint depth;      // in_cols rounded up to a multiple of 32; zeros from in_cols on
  uint x_stride;   // elements between rows of x
  uint first_row;  // the step's row that is row 0
  uint rows;       // kStepRows, kLogitRows
};
// For dequantize: W as f16, [rows][depth].
struct DequantizeParams {
  uint in_cols;
  uint depth;
  uint row_bytes;  // per row of the matrix
  // For experts: the first one, and the rows between one and the next, in W and in the result
  uint first_expert;
  uint from_rows;
  uint to_rows;
};

// For the experts' variants of matvec, product and product_cooperative, which compute rows of y that belong
// to slots. A dispatch computes some columns of y with the matrices of some experts, which it sees from the
// first column's row of the first one on.
struct ExpertProductParams {
  uint in_cols;    // of x; on matrix units: of x and W in scratch
  uint out_cols;   // columns of y in this dispatch
  uint x_stride;   // elements between rows of x
  uint y_stride;   // elements between rows of y
  uint row_bytes;  // per row of the matrices
  // Between experts; on matrix units, a glu's second matrices follow the first ones of all experts
  uint matrix_rows;
  uint bias_rows;  // elements per expert's bias
  uint experts;
  uint first_expert, seen_experts;  // the experts whose matrices are visible
  uint first_slot, seen_slots;      // the slots whose rows of y are visible
  uint of_tokens;                   // 1: x has a row for each token; 0: for each slot
  uint act;
  uint has_bias, has_up_bias;    // 0, kHasBias or kHasScale
  uint route_kind, route_share;  // of RouteParams, for a matvec that chooses the experts itself
  float route_scale;
};
// For add_experts.
struct AddExpertsParams {
  uint cols;      // columns of y in this dispatch
  uint y_stride;  // elements between rows of y
};
// For slots_of_rows.
struct SlotsOfRowsParams {
  uint experts;
};

// For embed. A dispatch covers some rows of the table.
struct TableParams {
  uint cols;     // elements of a row of x
  uint column;   // the first of them in a row of the table
  uint columns;  // elements of a row of the table
  uint row_bytes;
  uint first_token, tokens;  // the tokens whose rows are visible; other tokens are skipped
  uint by_row;               // 1: there are no tokens, and row r reads row r of the table
  float scale;
};

#ifdef __cplusplus
}  // namespace thimble::vulkan
#endif

#endif
