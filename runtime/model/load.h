// Helpers for loading a model, shared by the files of this folder: they read keys with defaults and bounds,
// and tensors with shapes.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "gguf/gguf.h"
#include "runtime/model/model.h"

namespace thimble {

// Bounds on the sizes that a model file may state. They are far above any real model, and so low that the
// product of two of them cannot overflow.
constexpr uint64_t kMaxLayers = 1 << 12, kMaxHeads = 1 << 12, kMaxHeadDim = 1 << 12, kMaxWidth = 1 << 20;
constexpr uint64_t kMaxExperts = 1 << 12;
constexpr uint64_t kMaxPositions = INT32_MAX;

// The value of an optional key, or `fallback`.
template <typename T>
Result<T> with_default(Result<std::optional<T>> value, std::type_identity_t<T> fallback) {
  THIMBLE_TRY(value);
  return *value ? **value : fallback;
}

// Reads a count from 1 to max. If the file lacks the key, the count is the fallback. Without a fallback that
// is an error.
Status read_count(const Gguf& gguf, const std::string& key, uint64_t max, std::optional<uint64_t> fallback,
                  uint32_t& count);
// Like read_count(), for a key that may have one value for each of `layers` layers. `may_be_0`: 0 is a count
// too.
Status read_count_of_layer(const Gguf& gguf, const std::string& key, uint32_t layer, uint32_t layers,
                           uint64_t max, std::optional<uint64_t> fallback, bool may_be_0, uint32_t& count);
// Refuses a convolution over more tokens than the op short_conv takes, or over one (key ssm.conv_kernel).
Status check_taps(const Gguf& gguf, const std::string& prefix, uint32_t taps);
// Refuses an array whose length is not the number of layers.
Status check_by_layer(const Gguf& gguf, const std::string& key, uint32_t layers);

// Takes tensors from a file by name, checks their types and shapes, and knows which tensors were not taken.
class TensorSource {
 public:
  explicit TensorSource(const Gguf& gguf) : gguf_(gguf), taken_(gguf.tensors().size()) {}

  bool has(const std::string& name) const { return gguf_.tensor(name) != nullptr; }
  bool has_any(const std::string& begin) const;  // whether a tensor's name begins with this
  // A matrix of any type that the library can read, with its scale: NAME.weight has the factor NAME.scale, if
  // there is such a tensor of one number. NAME.input_scale, which quantises activations, is passed over.
  Result<Tensor> matrix(const std::string& name, uint64_t rows, uint64_t cols);
  // A matrix whose rows are looked up, without a scale.
  Result<Tensor> table(const std::string& name, uint64_t rows, uint64_t cols);
  // The matrices of all experts, stored one after the other.
  Result<Tensor> matrices(const std::string& name, uint64_t experts, uint64_t rows, uint64_t cols);
  // Their scales, f32 [experts], or nothing.
  Result<Tensor> scales(const std::string& name, uint64_t experts);
  // The tensor must be f32, the type in which converters write norms and biases.
  Result<Tensor> floats(const std::string& name, uint64_t rows, uint64_t cols);
  Result<Tensor> vector(const std::string& name, uint64_t cols);
  // Like vector(), but without an error if the file has no such tensor.
  Result<Tensor> vector_if_any(const std::string& name, uint64_t cols);
  // Passes over the tensors whose names begin with this.
  void skip(const std::string& begin);
  // Checks that every tensor was taken or skipped. Any other tensor might change the result: Unsupported,
  // with its name. Format: the data of the tensors are not contiguous.
  Status all_taken() const;

 private:
  Result<Tensor> take(const std::string& name, uint64_t rows, uint64_t cols, uint64_t matrices = 1);

  const Gguf& gguf_;
  std::vector<bool> taken_;
};

// Rows of a matrix: `count` from `first` on.
struct Rows {
  uint32_t first, count;
};
// A matrix of these rows, one range after the other, in host memory that the model owns.
Result<Tensor> reorder(const Tensor& matrix, std::span<const Rows> rows, Model& model);

// retainer.cpp: the prefix of a sidecar's keys: "retainer.", or "locret." in files that are older than the
// other kinds. Refuses a file without a retainer.
Result<std::string> retainer_prefix(const Gguf& gguf);
// retainer.cpp: the KV heads' shares of the pool, positive numbers. Empty: the file has none.
Result<std::vector<float>> retainer_shares(const Gguf& gguf);

// architecture.cpp: fills shape, rope, epsilon and the weights by role.
Status load_weights(const Gguf& gguf, Model& model);

// How an architecture's rotation may differ from the usual one.
struct RopeRules {
  bool reads_yarn = false;        // the file may set yarn's ramp and magnitude
  bool scales_windows = true;     // windowed layers use the scaling of the other layers
  bool reads_window_base = true;  // the file may set another base for windowed layers, key freq_base_swa
  double window_base = 0;         // the base of windowed layers if it does not; 0: that of the others
  // Scaling makes queries and keys longer by the factor of attention's products (deepseek2). yarn's cos and
  // sin do so only in a file without a multiplier.
  bool scales_attention = false;
  bool norms_rotated = false;  // norms follow the rotation and undo the length of cos and sin (hunyuan-dense)
  bool reads_alpha = false;    // the file may set a factor that scales the base (hunyuan-dense)
  bool halves_with_sections = false;  // a file with dimension_sections pairs channels as kRopeHalves (glm4)
  // Whether pairs alternate between positions in time and in an image (IMROPE), which are equal in text.
  bool alternates = false;
  // The channels of a head of a windowed layer, if the file may rotate more or fewer of them (key
  // dimension_count_swa). 0: as many rotate as in the others.
  uint32_t window_head_dim = 0;
};
// rope.cpp: loads the RoPE schemes. `prefix` is the architecture's name, with which every key begins.
// model.shape, model.info and model.attention_scale must already be filled.
Status load_rope(const Gguf& gguf, const std::string& prefix, const RopeRules& rules, TensorSource& tensors,
                 Model& model);

}  // namespace thimble
