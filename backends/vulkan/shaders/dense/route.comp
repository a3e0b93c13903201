// route, its first part: a subgroup chooses a row's experts. In a program of one row that is all; in others route_slots.comp puts
// every expert's rows side by side.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#include "../exp.glsl"
#include "../step.glsl"

layout(local_size_x_id = 0) in;  // a subgroup
const uint kLanes = gl_WorkGroupSize.x;
layout(constant_id = 1) const uint kExperts = 8;
layout(constant_id = 2) const uint kChosen = 2;
layout(constant_id = 3) const bool kOneRow = false;
layout(constant_id = 4) const bool kHasBias = false;

layout(set = 0, binding = 1, std430) readonly buffer Logits { float logits[]; };
layout(set = 0, binding = 2, std430) readonly buffer Bias { float bias[]; };
// [rows][chosen], the experts of a row ascending; of one row the op's own, as slots are then ordered so.
layout(set = 0, binding = 3, std430) writeonly buffer Experts { uint experts[]; };
layout(set = 0, binding = 4, std430) writeonly buffer Weights { float weights[]; };
layout(set = 0, binding = 5, std430) writeonly buffer First { uint first[]; };  // these two of one row alone
layout(set = 0, binding = 6, std430) writeonly buffer RowOfSlot { uint row_of_slot[]; };
layout(push_constant) uniform Push {
  RouteParams p;
  uint base[6];
} push;

const float kNoPeak = -3e38;  // below every logit; finite, as not every device computes with infinities
const uint kMinusInfinity = 0xff800000;

shared float shares[kExperts];  // what an expert counts before the chosen ones are compared
shared uint chosen[kChosen];    // experts, the best first

bool is_nan(float x) { return (floatBitsToUint(x) & 0x7fffffff) > 0x7f800000; }
// Ordered as numbers are; NaN is -inf, and -0 is 0.
uint key_of(float x) {
  const uint bits = is_nan(x) ? kMinusInfinity : x == 0 ? 0 : floatBitsToUint(x);
  return (bits & 0x80000000) != 0 ? ~bits : bits | 0x80000000;
}

// A lane has every kLanes-th expert, in registers: one row has nothing else to hide the time of memory.
const uint kEach = (kExperts + kLanes - 1) / kLanes;
uint expert_of(uint i) { return i * kLanes + gl_SubgroupInvocationID; }
uint keys[kEach];  // what experts are chosen by; 0: they are chosen, or not there

void weigh_experts(uint from) {
  float own[kEach];
  [[unroll]] for (uint i = 0; i < kEach; ++i) own[i] = logits[from + min(expert_of(i), kExperts - 1)];
  float peak = kNoPeak, sum = 0;
  if (push.p.kind == kRouteSoftmax) {
    [[unroll]] for (uint i = 0; i < kEach; ++i)
      if (!is_nan(own[i])) peak = max(peak, own[i]);
    peak = subgroupMax(peak);
    [[unroll]] for (uint i = 0; i < kEach; ++i) sum += expert_of(i) < kExperts ? exp_ulp(own[i] - peak) : 0;
    sum = subgroupAdd(sum);
  }
  [[unroll]] for (uint i = 0; i < kEach; ++i) {
    const uint e = expert_of(i);
    keys[i] = 0;
    if (e >= kExperts) continue;
    float share = own[i];
    if (push.p.kind == kRouteSoftmax) share = exp_ulp(share - peak) / sum;
    if (push.p.kind == kRouteSigmoid) share = 1 / (1 + exp_ulp(-share));
    shares[e] = share;
    keys[i] = key_of(kHasBias ? share + bias[push.base[1] + e] : own[i]);
  }
}

// The highest key that is left, of equal ones the lowest expert's.
void choose() {
  for (uint c = 0; c < kChosen; ++c) {
    uint best_key = 0, best = kExperts;
    [[unroll]] for (uint i = 0; i < kEach; ++i)
      if (keys[i] > best_key) {
        best_key = keys[i];
        best = expert_of(i);
      }
    const uint highest = subgroupMax(best_key), taken = subgroupMin(best_key == highest ? best : kExperts);
    [[unroll]] for (uint i = 0; i < kEach; ++i)
      if (expert_of(i) == taken) keys[i] = 0;
    if (gl_SubgroupInvocationID == 0) chosen[c] = taken;
  }
}

void main() {
  const uint row = gl_WorkGroupID.x;
  if (row >= step.n_rows) return;
  weigh_experts(push.base[0] + row * kExperts);
  barrier();
  choose();
  barrier();

  float highest = kNoPeak, total = 0;
  for (uint i = gl_SubgroupInvocationID; i < kChosen; i += kLanes)
    if (!is_nan(shares[chosen[i]])) highest = max(highest, shares[chosen[i]]);
  highest = subgroupMax(highest);
  const bool of_chosen = push.p.kind == kRouteSoftmaxOfChosen;
  for (uint i = gl_SubgroupInvocationID; i < kChosen; i += kLanes) {
    const float share = shares[chosen[i]];
    total += of_chosen ? exp_ulp(share - highest) : share;
  }
  // The models' own code divides by no less than f16's smallest normal number.
  const float by = push.p.share != 0 || of_chosen ? max(subgroupAdd(total), 6.103515625e-5) : 1;
  for (uint i = gl_SubgroupInvocationID; i < kChosen; i += kLanes) {
    const uint expert = chosen[i];
    uint place = row * kChosen;
    for (uint j = 0; j < kChosen; ++j) place += chosen[j] < expert ? 1 : 0;
    const float share = shares[expert];
    weights[push.base[3] + place] = (of_chosen ? exp_ulp(share - highest) : share) / by * push.p.scale;
    if (kOneRow)
      row_of_slot[push.base[5] + place] = 0;
    else
      experts[push.base[2] + place] = expert;
  }
  if (!kOneRow) return;
  for (uint e = gl_SubgroupInvocationID; e <= kExperts; e += kLanes) {
    uint before = 0;
    for (uint j = 0; j < kChosen; ++j) before += chosen[j] < e ? 1 : 0;
    first[push.base[4] + e] = before;
  }
}
