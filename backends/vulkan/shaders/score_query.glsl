// The queries that token_score scores with. The shader that includes this has declared `float q[]`, at base[0], and rope.glsl.

// Channel c of a query head, counted from the first of first_head, rotated. Keys stay unrotated, so their distance is n_local
// + row; under kRopeOriginal they are cached rotated, the query turns to its own position, and scores are the true logits.
float score_query_channel(uint row, uint query, uint c) {
  const uint at = push.base[0] + row * push.p.row_stride + (push.p.first_head * push.p.group + query) * push.p.head_dim;
  if (c >= push.p.rope.n_rot) return q[at + c];
  const uint first = push.p.rope.mode == kRopeList ? step.n_local : uint(step.position);
  return rotated(c, q[at + c], q[at + partner_of(c)], rope_angle(first + row, pair_of(c)));
}
