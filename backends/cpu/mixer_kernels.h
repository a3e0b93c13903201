// The inner loops of the recurrent mixers. They are compiled once for each instruction set; mixer_kernels()
// returns the best one for this machine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/op_params.h"

namespace thimble::cpu {

// One row of short_conv: y = gate * act(bias + sum over j of w[j] * x[j] * times[j]), for n channels.
struct ConvolvedRow {
  uint32_t n;
  const float* x[kMostTaps];      // null: zeros
  const float* times[kMostTaps];  // null: ones
  uint32_t taps;
  const float* w;  // [taps][w_stride]
  size_t w_stride;
  const float *bias, *gate;  // null: zeros, ones
  bool silu;
  float* y;
};

// Rows that the chunk forms of delta_net and ssm process at a time.
constexpr uint32_t kMixerChunk = 32;

// Consecutive rows of one value head of delta_net.
struct DeltaRows {
  uint32_t rows, width;
  const float *q, *k, *v;  // [rows][stride]; queries and keys before their norms
  size_t stride;
  const float *gamma, *beta;  // [rows]; beta is in (0, 1)
  float eps;
  const float* before;  // [width][width]: the state before these rows; null: zeros
  float* m;             // the state after them; may be `before`
  float* y;             // [rows][y_stride]
  size_t y_stride;
  float* scratch;  // kDeltaScratch floats
};
// The scratch that the chunk form needs.
constexpr uint32_t kDeltaScratch = 6 * kMixerChunk * kMostDeltaWidth + 2 * kMixerChunk * kMixerChunk;

// Consecutive rows of one head of ssm.
struct SsmRows {
  uint32_t rows, width, state;
  const float *x, *b, *c;  // [rows][stride]
  size_t stride;
  const float *delta, *decay;  // [rows]; the state decays by e^decay
  float d;
  const float* before;  // [state][width]: the state before these rows; null: zeros
  float* s;             // the state after them; may be `before`
  float* y;             // [rows][y_stride]
  size_t y_stride;
  float* scratch;  // kSsmScratch floats
};
// The scratch that the chunk form needs. The products of a group's B and C are at its beginning, where all
// heads of the group find them.
constexpr uint32_t kSsmScratch =
    2 * kMixerChunk * kMixerChunk +
    kMixerChunk * (kMostSsmState > kMostSsmWidth ? kMostSsmState : kMostSsmWidth);

struct MixerKernels {
  void (*convolve)(const ConvolvedRow&);
  // Row by row: each row reads and writes the whole state.
  void (*delta_steps)(const DeltaRows&);
  // At most kMixerChunk rows together: the state is read and written once.
  void (*delta_chunk)(const DeltaRows&);
  // Row by row.
  void (*ssm_steps)(const SsmRows&);
  // At most kMixerChunk rows together. ssm_products fills in the beginning of the scratch, for all heads
  // of a group.
  void (*ssm_products)(const SsmRows&);
  void (*ssm_chunk)(const SsmRows&);
  // One group of gated_norm.
  void (*gated_norm)(const GatedNormParams&, const float* x, const float* z, const float* weight, float* y);
  // x = x * sigmoid(g)
  void (*gate)(const float* g, float* x, uint32_t n);
};

// The fastest set of kernels that this processor supports.
const MixerKernels& mixer_kernels();
// One of the sets that this processor supports, in the order of kernel_sets() of kernels.h: for tests.
const MixerKernels& mixer_kernel_set(uint32_t set);

}  // namespace thimble::cpu
