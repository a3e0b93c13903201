// The position to which token_score rotates the query of row 0. The includer has included rope.glsl.

// Keys stay unrotated, so their distance is n_local + row. Under kRopeOriginal they are cached rotated; the
// query is then rotated to its own position, and the scores are the true logits.
uint score_position() { return ROPE.mode == kRopeList ? step.n_local : uint(step.position); }
