// Shared by the dispatches of label: where the first one leaves its results, and products of query vectors
// with keys. The vectors of a KV head are numbered marked row * group + query of the group. The includer
// declares `float queries[]`, `uint found[]`, `uint range_words[]`, `uint k[]` (the runs of the window) and a
// push constant with LabelParams p, RunWindow window and max_rows, and defines their first elements
// QUERIES_BASE, FOUND_BASE, RANGE_BASE and K_BASE. It has 128 threads.

layout(local_size_x = 128) in;
layout(constant_id = 0) const uint kHeadDim = 128;
#define KV_FORMAT_ID 2
#include "../kv_format.glsl"

// found: the number of marked rows, their indices, and the logarithms of their lengths.
uint marked_rows() { return found[FOUND_BASE]; }
uint marked_row(uint i) { return found[FOUND_BASE + 1 + i]; }
float log_length(uint i) { return uintBitsToFloat(found[FOUND_BASE + 1 + push.max_rows + i]); }

// queries: [KV head][vector][head_dim].
uint query_start(uint head, uint vector) {
  return QUERIES_BASE + (head * push.max_rows * push.p.group + vector) * kHeadDim;
}

// Ranges of the pool's entries: the sinks, the labelled entries, and those after the text.
struct Range {
  uint sinks, first, end, own;
};
Range range_of(HeadState state) {
  Range r;
  r.own = min(range_words[RANGE_BASE + 3], state.n_entries);
  r.end = min(min(range_words[RANGE_BASE + 2], r.own), push.p.label_capacity);
  r.first = min(range_words[RANGE_BASE + 1], r.end);
  r.sinks = min(range_words[RANGE_BASE], r.first);
  return r;
}

// A workgroup multiplies 32 vectors with 64 keys, 32 channels at a time. Thread i has the four vectors from 4
// * (i / 16) on, and every 16th key from i % 16 on. Rows in shared memory are padded to avoid bank conflicts.
const uint kVectors = 32, kKeys = 64, kSlab = 32, kRow = kSlab + 1;
shared float of_vectors[kVectors * kRow], of_keys[kKeys * kRow];

uint own_vector(uint j) { return gl_LocalInvocationIndex / 16 * 4 + j; }
uint own_key(uint i) { return gl_LocalInvocationIndex % 16 + 16 * i; }

void load_vectors(uint head, uint first, uint count, uint slab) {
  for (uint i = gl_LocalInvocationIndex; i < kVectors * kSlab; i += 128) {
    const uint vector = first + i / kSlab, c = slab + i % kSlab;
    const bool there = vector < count && c < kHeadDim;
    of_vectors[i / kSlab * kRow + i % kSlab] = there ? queries[query_start(head, vector) + c] : 0;
  }
}
void put_two(uint i, vec2 x) {
  const uint at = i / (kSlab / 2) * kRow + i % (kSlab / 2) * 2;
  of_keys[at] = x.x;
  of_keys[at + 1] = x.y;
}
#ifdef BLOCKS
KV_READER(pool, k, kKvFormat)
#else
vec2 pool_two(uint row, uint c) { return kv_two(k[row + c / 2]); }
#endif
// Loads n keys of the pool from the head's entry on.
void load_keys(HeadState state, uint entry, uint n, uint slab) {
  const uint start = K_BASE + (run_start(state, push.window) + entry) * KV_ROW_WORDS(kHeadDim);
  for (uint i = gl_LocalInvocationIndex; i < kKeys * kSlab / 2; i += 128) {
    const uint key = i / (kSlab / 2), word = slab / 2 + i % (kSlab / 2);
    const bool there = key < n && word < kHeadDim / 2;
    put_two(i, there ? pool_two(start + key * KV_ROW_WORDS(kHeadDim), 2 * word) : vec2(0));
  }
}
// Adds the slab's products to z, for vector j with the keys i.
void multiply_slab(inout vec4 z[4]) {
  barrier();
  const uint vectors = own_vector(0) * kRow, keys = own_key(0) * kRow;
  for (uint c = 0; c < kSlab; ++c) {
    vec4 x;
    [[unroll]] for (uint i = 0; i < 4; ++i) x[i] = of_keys[keys + i * 16 * kRow + c];
    [[unroll]] for (uint j = 0; j < 4; ++j) z[j] += of_vectors[vectors + j * kRow + c] * x;
  }
  barrier();
}
void cap_logits(inout vec4 z[4]) {
  if (push.p.cap == 0) return;
  [[unroll]] for (uint j = 0; j < 4; ++j)
    [[unroll]] for (uint i = 0; i < 4; ++i) z[j][i] = soft_cap(z[j][i], push.p.cap);
}
