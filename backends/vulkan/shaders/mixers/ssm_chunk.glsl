// The chunk form of ssm. With G_i the sum of gamma = delta a up to row i, and R_ij = e^(G_i - G_j) for
// j <= i:
//   Y = (R * C B^T) diag(delta) X + diag(e^G) C S + d X
//   S = e^G_last S + B^T diag(e^(G_last - G) delta) X
// ssm_prepare computes what does not depend on S and X, for many chunks at once. ssm_chunks goes from chunk to
// chunk.
const uint kChunk = 32;  // rows

// What ssm_prepare leaves for a chunk and a head, in floats:
const uint kPairs = 0;                        // [kChunk][kChunk], a lower triangle: R_ij (c_i b_j) delta_j
const uint kScales = kChunk * kChunk;         // [kChunk]: e^G, the last of which is the state's
const uint kNewScales = kScales + kChunk;     // [kChunk]: e^(G_last - G) delta
const uint kPrepared = kNewScales + kChunk;

layout(local_size_x_id = 0) in;
const uint kThreads = gl_WorkGroupSize.x;
layout(constant_id = 1) const uint kState = 128;      // a multiple of 16
layout(constant_id = 2) const bool kInQuads = false;  // all vectors of B and C begin at whole quads

layout(set = 0, binding = 1, std430) readonly buffer Xbc { float xbc[]; };
layout(set = 0, binding = 1, std430) readonly buffer XbcQuads { vec4 xbc_quads[]; };

vec4 read_quad(uint at) {
  return kInQuads ? xbc_quads[at / 4] : vec4(xbc[at], xbc[at + 1], xbc[at + 2], xbc[at + 3]);
}
