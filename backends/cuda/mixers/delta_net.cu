// delta_net: the gated delta rule. Few rows go row by row, many in chunks.
#include "backends/cuda/mixers/delta_net.cuh"

namespace thimble::cuda {

void delta_net(const Launch& l, const DeltaNet& op) {
  const DeltaNetParams& p = op.p;
  const DeltaOperands o{data<float>(op.qkv), data<float>(op.gates),    data<float>(op.a),
                        data<float>(op.dt),  data<float>(op.m.block0), op.m.slot_stride / sizeof(float),
                        data<float>(op.y)};
  const bool chunks =
      l.max_rows >= kLeastChunk && l.scratch_bytes >= delta_chunk_bytes(p.key_heads, p.value_heads, p.width);
  if (chunks) delta_chunks(l, p, o);
  delta_steps(l, p, o, chunks);
}

}  // namespace thimble::cuda
