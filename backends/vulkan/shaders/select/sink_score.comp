// sink_score: the softmax weight of a token's key among sink logits, averaged over the queries of its KV
// head. A subgroup processes one KV head of a row; its lanes divide the channels of a norm and the sinks.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_basic : require
#include "../step.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint kThreads = 128;  // a multiple of kLanes
layout(constant_id = 1) const uint kLanes = 32;     // lanes per subgroup
#include "../lanes.glsl"
#include "../exp.glsl"

layout(set = 0, binding = 1, std430) readonly buffer Q { float q[]; };
layout(set = 0, binding = 2, std430) readonly buffer K { float k[]; };
layout(set = 0, binding = 3, std430) readonly buffer QNorm { float q_norm[]; };
layout(set = 0, binding = 4, std430) readonly buffer KNorm { float k_norm[]; };
layout(set = 0, binding = 5, std430) readonly buffer Sinks { float sinks[]; };
layout(set = 0, binding = 6, std430) readonly buffer Bias { float bias[]; };
layout(set = 0, binding = 7, std430) writeonly buffer Score { float score[]; };
layout(push_constant) uniform Push {
  SinkScoreParams p;
  uint base[7];
} push;

// A channel of the query that begins at `at`, times the weight of its norm.
float weighted(uint at, uint channel) { return q[at + channel] * q_norm[push.base[2] + channel]; }

// The factor that scales a root mean square to 1.
float norm_scale(float squares) { return 1 / sqrt(sum_of_lanes(squares) / float(push.p.width) + push.p.eps); }

// The product of the query at `at` and a sink.
float product(uint at, uint head, uint sink) {
  const uint from = push.base[4] + (head * push.p.sinks + sink) * push.p.width;
  float sum = 0;
  for (uint c = 0; c < push.p.width; ++c) sum += weighted(at, c) * sinks[from + c];
  return sum;
}

void main() {
  const uint head = gl_WorkGroupID.y, row = gl_WorkGroupID.x * (kThreads / kLanes) + gl_SubgroupID;
  const uint lane = gl_SubgroupInvocationID;
  if (row >= step.n_rows) return;  // returns for the whole subgroup
  const uint width = push.p.width, group = push.p.group, i = row * push.p.heads + head, of_k = push.base[1] + i * width;
  float squares = 0;
  for (uint c = lane; c < width; c += kLanes) squares += k[of_k + c] * k[of_k + c];
  const float k_scale = norm_scale(squares);
  float sum = 0;
  for (uint g = 0; g < group; ++g) {
    const uint of_q = push.base[0] + (i * group + g) * width;
    float own = 0;
    squares = 0;
    for (uint c = lane; c < width; c += kLanes) {
      squares += q[of_q + c] * q[of_q + c];
      own += weighted(of_q, c) * (k[of_k + c] * k_norm[push.base[3] + c]);
    }
    const float scale = norm_scale(squares) * push.p.scale;
    own = sum_of_lanes(own) * scale * k_scale + bias[push.base[5] + head * group + g];
    float peak = own;
    for (uint s = lane; s < push.p.sinks; s += kLanes) peak = max(peak, product(of_q, head, s) * scale);
    peak = max_of_lanes(peak);
    const float weight = exp_ulp(own - peak);
    float others = 0;
    for (uint s = lane; s < push.p.sinks; s += kLanes) others += exp_ulp(product(of_q, head, s) * scale - peak);
    sum += weight / (weight + sum_of_lanes(others));
  }
  if (lane == 0) score[push.base[6] + i] = sum / float(group);
}
