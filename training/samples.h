// Training samples: runs of consecutive tokens from many texts. Each token has the inputs of the retainers
// (f16) and the labels that they are fitted to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/bits.h"

namespace thimble {

constexpr uint32_t kRunTokens = 256;

struct SampleShape {
  uint32_t layers = 0, heads = 0, cols = 0;  // trained layers; KV heads; inputs of a retainer

  uint64_t state_elements() const { return uint64_t(layers) * kRunTokens * cols; }
  uint64_t label_elements() const { return uint64_t(layers) * heads * kRunTokens; }
  // Bytes per run.
  uint64_t run_bytes() const {
    return state_elements() * sizeof(uint16_t) + label_elements() * (sizeof(float) + 1);
  }
};

class Samples {
 public:
  Samples() = default;
  Samples(const SampleShape& shape, uint32_t runs)
      : shape_(shape),
        runs_(runs),
        states_(runs * shape.state_elements()),
        labels_(runs * shape.label_elements()),
        best_(runs * shape.label_elements()) {}

  const SampleShape& shape() const { return shape_; }
  uint32_t runs() const { return runs_; }
  // f16 [kRunTokens][cols].
  uint16_t* states(uint32_t run, uint32_t layer) {
    return states_.data() + run * shape_.state_elements() + uint64_t(layer) * kRunTokens * shape_.cols;
  }
  const uint16_t* states(uint32_t run, uint32_t layer) const {
    return const_cast<Samples*>(this)->states(run, layer);
  }
  // [heads][kRunTokens]: the labels, and whether each is among the best of its text and head.
  float* labels(uint32_t run, uint32_t layer) { return labels_.data() + at(run, layer); }
  const float* labels(uint32_t run, uint32_t layer) const { return labels_.data() + at(run, layer); }
  uint8_t* best(uint32_t run, uint32_t layer) { return best_.data() + at(run, layer); }
  const uint8_t* best(uint32_t run, uint32_t layer) const { return best_.data() + at(run, layer); }

 private:
  uint64_t at(uint32_t run, uint32_t layer) const {
    return run * shape_.label_elements() + uint64_t(layer) * shape_.heads * kRunTokens;
  }

  SampleShape shape_;
  uint32_t runs_ = 0;
  std::vector<uint16_t> states_;
  std::vector<float> labels_;
  std::vector<uint8_t> best_;
};

}  // namespace thimble
