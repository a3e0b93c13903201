// The chunk form of delta_net. The rows of a chunk see each other through products of their keys, and the
// state before the chunk through one product with it. With G_i the sum of gamma up to row i,
// R_ij = e^(G_i - G_j) for j <= i, and A_ij = beta_i R_ij (k_i k_j) for j < i (others are 0):
//   N = (I + A)^-1 diag(beta) (V - diag(e^G) K M)
//   Y = diag(e^G) Q M + (R * Q K^T) N
//   M = e^G_last M + K^T diag(e^(G_last - G)) N
// delta_prepare computes what does not depend on M, for many chunks at once. delta_chunks goes from chunk to
// chunk.
const uint kChunk = 32;  // rows

// What delta_prepare leaves for a chunk and a head, in floats:
// [2 kChunk][kChunk], lower triangles: (I + A)^-1 diag(beta), and R * Q K^T times that
const uint kPairs = 0;
// [2 kChunk]: for the chunk's keys and then its queries, e^G divided by the vector's length
const uint kScales = 2 * kChunk * kChunk;
const uint kNewScales = kScales + 2 * kChunk;  // [kChunk]: e^(G_last - G) divided by the key's length
const uint kDecay = kNewScales + kChunk;       // e^G_last
const uint kPrepared = kDecay + kChunk;

layout(local_size_x_id = 0) in;
const uint kThreads = gl_WorkGroupSize.x;
layout(constant_id = 1) const uint kWidth = 128;      // a multiple of 32
layout(constant_id = 2) const bool kInQuads = false;  // all vectors of qkv begin at whole quads

layout(set = 0, binding = 1, std430) readonly buffer Qkv { float qkv[]; };
layout(set = 0, binding = 1, std430) readonly buffer QkvQuads { vec4 qkv_quads[]; };

vec4 read_quad(uint at) {
  return kInQuads ? qkv_quads[at / 4] : vec4(qkv[at], qkv[at + 1], qkv[at + 2], qkv[at + 3]);
}
