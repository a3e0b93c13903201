// How a subgroup chooses a row's experts. A lane has kEach neighbours in registers, because a single row has
// no other work to hide the latency of memory. The includer has declared kLanes, kExperts, kRouted (how many
// are chosen per row), kGroups (1: without groups), kGroupsUsed, kHasRouteBias, kHasEach and these functions:
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_ballot : require

float logit(uint expert);
float route_bias(uint expert);
float route_each(uint expert);  // the factor of its weight
RouteParams route_params();

const float kNoPeak = -3e38;  // below every logit; finite, because not every device supports infinities
const uint kMinusInfinity = 0xff800000;

bool is_nan(float x) { return (floatBitsToUint(x) & 0x7fffffff) > 0x7f800000; }
// Keys order like numbers; NaN is -inf, and -0 is 0.
uint key_of(float x) {
  const uint bits = is_nan(x) ? kMinusInfinity : x == 0 ? 0 : floatBitsToUint(x);
  return (bits & 0x80000000) != 0 ? ~bits : bits | 0x80000000;
}
float value_of(uint key) { return uintBitsToFloat((key & 0x80000000) != 0 ? key & 0x7fffffff : ~key); }

// log(1 + e^x). GLSL's logarithm is inexact near 1: with z = e / (2 + e), log(1 + e) is 2 (z + z^3 / 3 + ...).
float softplus(float x) {
  const float e = exp_ulp(-abs(x)), z = e / (2 + e), square = z * z;  // at most 1 / 9
  float sum = 1.0 / 13;
  sum = fma(sum, square, 1.0 / 11);
  sum = fma(sum, square, 1.0 / 9);
  sum = fma(sum, square, 1.0 / 7);
  sum = fma(sum, square, 1.0 / 5);
  sum = fma(sum, square, 1.0 / 3);
  return max(x, 0) + 2 * fma(sum * square, z, z);
}

const uint kEach = (kExperts + kLanes - 1) / kLanes;
uint expert_of(uint i) { return gl_SubgroupInvocationID * kEach + i; }
float shares[kEach];  // an expert's weight before normalization; its logit until weigh_experts()
bool chosen[kEach];

void load_logits() {
  [[unroll]] for (uint i = 0; i < kEach; ++i) shares[i] = logit(min(expert_of(i), kExperts - 1));
}
void weigh_experts() {
  const uint kind = route_params().kind;
  float peak = kNoPeak, sum = 0;
  if (kind == kRouteSoftmax) {
    [[unroll]] for (uint i = 0; i < kEach; ++i)
      if (!is_nan(shares[i])) peak = max(peak, shares[i]);
    peak = subgroupMax(peak);
    [[unroll]] for (uint i = 0; i < kEach; ++i) sum += expert_of(i) < kExperts ? exp_ulp(shares[i] - peak) : 0;
    sum = subgroupAdd(sum);
  }
  [[unroll]] for (uint i = 0; i < kEach; ++i) {
    if (is_nan(shares[i])) continue;  // exp_ulp() would make it a number
    if (kind == kRouteSoftmax) shares[i] = exp_ulp(shares[i] - peak) / sum;
    if (kind == kRouteSigmoid) shares[i] = 1 / (1 + exp_ulp(-shares[i]));
    if (kind == kRouteSqrtSoftplus) shares[i] = sqrt(softplus(shares[i]));
  }
}

// Whether shares plus bias decide, and not logits, which have the order of shares.
const bool kChoosesByShares = kHasRouteBias || kGroups > 1;

// Sets the keys of experts outside the best groups to 0.
void keep_best_groups(inout uint keys[kEach]) {
  const uint size = kExperts / kGroups;
  uint of_groups[kGroups];
  [[unroll]] for (uint g = 0; g < kGroups; ++g) {
    uint first = 0, second = 0;
    [[unroll]] for (uint i = 0; i < kEach; ++i) {
      const uint key = expert_of(i) / size == g ? keys[i] : 0;
      second = max(second, min(first, key));
      first = max(first, key);
    }
    const uint best = subgroupMax(first), owner = subgroupBallotFindLSB(subgroupBallot(first == best));
    const uint other = subgroupMax(gl_SubgroupInvocationID == owner ? second : first);
    of_groups[g] = key_of(value_of(best) + (other != 0 ? value_of(other) : 0));
  }
  [[unroll]] for (uint i = 0; i < kEach; ++i) {
    const uint own = min(expert_of(i) / size, kGroups - 1);
    uint before = 0;
    [[unroll]] for (uint g = 0; g < kGroups; ++g) before += of_groups[g] >= of_groups[own] + (g >= own ? 1 : 0) ? 1 : 0;
    if (before >= kGroupsUsed) keys[i] = 0;
  }
}

// The highest remaining key, of equal ones that of the lowest expert.
void choose() {
  uint keys[kEach];  // 0: the expert is chosen, or does not exist
  [[unroll]] for (uint i = 0; i < kEach; ++i) {
    const float share = kHasRouteBias ? shares[i] + route_bias(min(expert_of(i), kExperts - 1)) : shares[i];
    keys[i] = expert_of(i) < kExperts ? key_of(share) : 0;
    chosen[i] = false;
  }
  if (kGroups > 1) keep_best_groups(keys);
  [[dont_unroll]] for (uint c = 0; c < kRouted; ++c) {
    uint best = 0;
    [[unroll]] for (uint i = 0; i < kEach; ++i) best = max(best, keys[i]);
    const bool highest = best == subgroupMax(best);
    const uint first = subgroupBallotFindLSB(subgroupBallot(highest));
    bool takes = first == gl_SubgroupInvocationID;
    [[unroll]] for (uint i = 0; i < kEach; ++i)
      if (takes && keys[i] == best) {
        keys[i] = 0;
        chosen[i] = true;
        takes = false;
      }
  }
}
// Loads, weighs and chooses; computes the shares if `weighed`.
void route_row(bool weighed) {
  load_logits();
  if (kChoosesByShares) weigh_experts();
  choose();
  if (!kChoosesByShares && weighed) weigh_experts();
}

// How many experts before the lane's are chosen.
uint chosen_before() {
  uint before = 0;
  [[unroll]] for (uint i = 0; i < kEach; ++i) before += subgroupBallotExclusiveBitCount(subgroupBallot(chosen[i]));
  return before;
}
// The chosen expert of a slot.
uint chosen_expert(uint slot) {
  uint place = chosen_before(), expert = 0;
  [[unroll]] for (uint i = 0; i < kEach; ++i) {
    if (!chosen[i]) continue;
    if (place == slot) expert = expert_of(i);
    ++place;
  }
  return subgroupMax(expert);
}
// Turns the shares of chosen experts into their weights.
void weigh_chosen() {
  const RouteParams p = route_params();
  const bool of_chosen = p.kind == kRouteSoftmaxOfChosen;
  if (of_chosen) {
    float highest = kNoPeak;
    [[unroll]] for (uint i = 0; i < kEach; ++i)
      if (chosen[i] && !is_nan(shares[i])) highest = max(highest, shares[i]);
    highest = subgroupMax(highest);
    [[unroll]] for (uint i = 0; i < kEach; ++i)
      if (chosen[i]) shares[i] = exp_ulp(shares[i] - highest);
  }
  float total = 0;
  [[unroll]] for (uint i = 0; i < kEach; ++i)
    if (chosen[i]) total += shares[i];
  total = subgroupAdd(total);
  // As in the models' own code, the divisor is at least f16's smallest normal number.
  const float by = p.share != 0 || of_chosen ? max(total, 6.103515625e-5) : 1;
  [[unroll]] for (uint i = 0; i < kEach; ++i) {
    shares[i] = shares[i] / by * p.scale;
    if (kHasEach) shares[i] *= route_each(min(expert_of(i), kExperts - 1));
  }
}
