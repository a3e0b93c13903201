// The position that token_score turns the query of row 0 to. The shader that includes this has included rope.glsl.

// Keys stay unrotated, so their distance is n_local + row; under kRopeOriginal they are cached rotated, the query turns to its
// own position, and scores are the true logits.
uint score_position() { return ROPE.mode == kRopeList ? step.n_local : uint(step.position); }
