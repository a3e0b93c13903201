// Parts of reading a model, shared by the files of this folder: keys with defaults and bounds, tensors with
// shapes.
#pragma once

#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "gguf/gguf.h"
#include "runtime/model/model.h"

namespace thimble {

// Bounds on what a model may say about itself, far above any real one and low enough that no product of two
// overflows.
constexpr uint64_t kMaxLayers = 1 << 12, kMaxHeads = 1 << 12, kMaxHeadDim = 1 << 12, kMaxWidth = 1 << 20;
constexpr uint64_t kMaxExperts = 1 << 12;
constexpr uint64_t kMaxPositions = INT32_MAX;

// The value of an optional key, or `fallback`.
template <typename T>
Result<T> with_default(Result<std::optional<T>> value, std::type_identity_t<T> fallback) {
  THIMBLE_TRY(value);
  return *value ? **value : fallback;
}

// Reads a count from 1 to max. Without the key it is the fallback, or an error where that is absent too.
Status read_count(const Gguf& gguf, const std::string& key, uint64_t max, std::optional<uint64_t> fallback,
                  uint32_t& count);
// The same of a key that may hold a value for each layer. They are accepted where all are equal.
Status read_count_by_layer(const Gguf& gguf, const std::string& key, uint32_t layers, uint64_t max,
                           std::optional<uint64_t> fallback, uint32_t& count);
// Refuses an array that has more or fewer values than there are layers.
Status check_by_layer(const Gguf& gguf, const std::string& key, uint32_t layers);

// Takes tensors out of a file by name, checks their types and shapes, and knows which were not asked for.
class TensorSource {
 public:
  explicit TensorSource(const Gguf& gguf) : gguf_(gguf), taken_(gguf.tensors().size()) {}

  bool has(const std::string& name) const { return gguf_.tensor(name) != nullptr; }
  bool has_any(const std::string& begin) const;  // whether a tensor's name begins so
  // A matrix of any type that this library reads.
  Result<Tensor> matrix(const std::string& name, uint64_t rows, uint64_t cols);
  // The matrices of all experts, one below the other.
  Result<Tensor> matrices(const std::string& name, uint64_t experts, uint64_t rows, uint64_t cols);
  // Only f32 is accepted, which is how converters write norms and biases.
  Result<Tensor> floats(const std::string& name, uint64_t rows, uint64_t cols);
  Result<Tensor> vector(const std::string& name, uint64_t cols);
  // The same, or no tensor where the file has none.
  Result<Tensor> vector_if_any(const std::string& name, uint64_t cols);
  // A tensor that nobody asked for would have changed the result: Unsupported, naming it. Format where their
  // data do not follow each other.
  Status all_taken() const;

 private:
  Result<Tensor> take(const std::string& name, uint64_t rows, uint64_t cols, uint64_t matrices = 1);

  const Gguf& gguf_;
  std::vector<bool> taken_;
};

// retainer.cpp: what the keys of a sidecar begin with, "retainer." or, in the files from before there were
// other kinds, "locret."; refused where it holds no retainer.
Result<std::string> retainer_prefix(const Gguf& gguf);
// retainer.cpp: the KV heads' shares of the pools, positive numbers; none where the file has none.
Result<std::vector<float>> retainer_shares(const Gguf& gguf);

// architecture.cpp: fills shape, rope, epsilon and the weights by role.
Status load_weights(const Gguf& gguf, Model& model);

// What architectures have in other ways of rotation.
struct RopeRules {
  bool reads_yarn = false;        // where its ramp lies and what becomes of its magnitude may be in the file
  bool scales_windows = true;     // layers with a window have the scaling of the others
  bool reads_window_base = true;  // the file may give these layers a base of their own, the key freq_base_swa
  double window_base = 0;         // where it does not; 0: that of the others
};
// rope.cpp: `prefix` is the architecture's name, in front of every key. model.shape and model.info are filled
// already.
Status load_rope(const Gguf& gguf, const std::string& prefix, const RopeRules& rules, TensorSource& tensors,
                 Model& model);

}  // namespace thimble
