// Rotary positions with the two-level table of backends/backend.h. The includer has declared the table,
// `float rope_table[]`, and defines ROPE_BASE, the table's first element, and ROPE, its RopeParams.

uint rope_pairs() { return ROPE.n_rot / 2; }

// {cos, sin} of a pair in a row of the table.
vec2 rope_row(uint row, uint pair) {
  const uint at = ROPE_BASE + 2 * (row * rope_pairs() + pair);
  return vec2(rope_table[at], rope_table[at + 1]);
}
// The model's attention factor, which is cos at position 0 of the upper half.
float rope_factor() { return rope_table[ROPE_BASE + 64 * 2 * rope_pairs()]; }

// cos and sin of a pair at a position, times the model's attention factor.
vec2 rope_angle(uint position, uint pair) {
  const vec2 high = rope_row(64 + position / 64, pair), low = rope_row(position % 64, pair);
  return vec2(high.x * low.x - high.y * low.y, high.x * low.y + high.y * low.x);
}

// For a channel below n_rot: its pair, the other channel of the pair, and its rotated value.
uint pair_of(uint channel) { return ROPE.pairing == kRopeAdjacent ? channel / 2 : channel % rope_pairs(); }
bool is_second(uint channel) {
  return ROPE.pairing == kRopeAdjacent ? (channel & 1) != 0 : channel >= rope_pairs();
}
uint partner_of(uint channel) {
  const uint apart = ROPE.pairing == kRopeAdjacent ? 1 : rope_pairs();
  return is_second(channel) ? channel - apart : channel + apart;
}
float rotated(uint channel, float x, float partner, vec2 angle) {
  return x * angle.x + (is_second(channel) ? partner : -partner) * angle.y;
}

// The weight of a channel of rotated queries.
float query_weight(uint channel) {
  return ROPE.query_weight == 0 ? 1 : rope_table[ROPE_BASE + ROPE.query_weight + channel];
}
vec2 query_weights(uvec2 channels) { return vec2(query_weight(channels.x), query_weight(channels.y)); }
// A pair of channels after a rotation by `angle`, or back by it.
vec2 rotated_pair(vec2 x, vec2 angle) { return vec2(x.x * angle.x - x.y * angle.y, x.x * angle.y + x.y * angle.x); }
vec2 rotated_back(vec2 x, vec2 angle) { return rotated_pair(x, vec2(angle.x, -angle.y)); }

// The two channels of pair i; from n_rot / 2 on, of any two channels.
uvec2 channels_of(uint i) {
  return ROPE.pairing == kRopeAdjacent || i >= rope_pairs() ? uvec2(2 * i, 2 * i + 1) : uvec2(i, i + rope_pairs());
}
