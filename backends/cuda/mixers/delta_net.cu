// delta_net: the gated delta rule. Few rows go row by row, many in chunks.
#include "backends/cuda/mixers/delta_net.cuh"

namespace thimble::cuda {

namespace {

DeltaOperands operands_of(const DeltaNet& op) {
  return {data<float>(op.qkv), data<float>(op.gates),    data<float>(op.a),
          data<float>(op.dt),  data<float>(op.m.block0), op.m.slot_stride / sizeof(float),
          data<float>(op.y)};
}

}  // namespace

void delta_net(const Launch& l, const DeltaNet& op) {
  const DeltaNetParams& p = op.p;
  const DeltaOperands o = operands_of(op);
  const bool chunks =
      l.max_rows >= kLeastChunk && l.scratch_bytes >= delta_chunk_bytes(p.key_heads, p.value_heads, p.width);
  if (chunks) delta_chunks(l, p, o);
  delta_steps(l, p, o, chunks, nullptr, {});
}

void delta_net(const Launch& l, const DeltaNet& op, const ShortConv& conv, const GatedNorm* norm) {
  const Convolution convolution{data<float>(conv.x) + conv.p.x_column,
                                data<float>(conv.w),
                                data<float>(conv.tail.block0),
                                conv.tail.slot_stride / sizeof(float),
                                data<float>(conv.y),
                                conv.p.taps,
                                conv.p.channels};
  Norm n{};
  if (norm)
    n = {data<float>(norm->z) + norm->p.z_column, data<float>(norm->weight), norm->p.eps,
         norm->p.act == kActSigmoid};
  delta_steps(l, op.p, operands_of(op), false, &convolution, n);
}

}  // namespace thimble::cuda
