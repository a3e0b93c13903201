#include "runtime/model/load.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>

namespace thimble {
namespace {

Status set_count(const Gguf& gguf, const std::string& key, uint64_t max, std::optional<uint64_t> value,
                 uint32_t& count) {
  if (!value) return gguf.lacks(key);
  if (*value < 1 || *value > max)
    return error(Code::kFormat, "%s: key %s is %" PRIu64 ", where 1 to %" PRIu64 " is possible",
                 gguf.name().c_str(), in_quotes(key).c_str(), *value, max);
  count = static_cast<uint32_t>(*value);
  return {};
}

}  // namespace

Status read_count(const Gguf& gguf, const std::string& key, uint64_t max, std::optional<uint64_t> fallback,
                  uint32_t& count) {
  THIMBLE_LET(value, gguf.get_uint(key));
  return set_count(gguf, key, max, value ? value : fallback, count);
}

Status check_taps(const Gguf& gguf, const std::string& prefix, uint32_t taps) {
  if (taps >= 2 && taps <= kMostTaps) return {};
  return error(Code::kUnsupported, "%s: key '%sssm.conv_kernel' is %u, and only 2 to %u are supported",
               gguf.name().c_str(), prefix.c_str(), taps, kMostTaps);
}

Status check_by_layer(const Gguf& gguf, const std::string& key, uint32_t layers) {
  const uint64_t count = gguf.find(key)->count;
  if (count == layers) return {};
  return error(Code::kFormat, "%s: key %s has %" PRIu64 " values for %" PRIu32 " layers", gguf.name().c_str(),
               in_quotes(key).c_str(), count, layers);
}

Status read_count_of_layer(const Gguf& gguf, const std::string& key, uint32_t layer, uint32_t layers,
                           uint64_t max, std::optional<uint64_t> fallback, bool may_be_0, uint32_t& count) {
  const GgufValue* value = gguf.find(key);
  if (!value || !value->is_array) return read_count(gguf, key, max, fallback, count);
  THIMBLE_TRY(check_by_layer(gguf, key, layers));
  THIMBLE_LET(found, gguf.get_ints(key));
  const int64_t number = (*found)[layer];
  if (number < 0)
    return error(Code::kFormat, "%s: key %s holds negative numbers", gguf.name().c_str(),
                 in_quotes(key).c_str());
  if (may_be_0 && number == 0) {
    count = 0;
    return {};
  }
  return set_count(gguf, key, max, static_cast<uint64_t>(number), count);
}

Result<Tensor> reorder(const Tensor& matrix, std::span<const Rows> rows, Model& model) {
  Tensor ordered = matrix;
  ordered.rows = 0;
  for (const Rows& range : rows) ordered.rows += range.count;
  THIMBLE_LET(pages, Pages::allocate(ordered.bytes()));
  std::byte* to = pages.data();
  for (const Rows& range : rows) {
    const Tensor from = matrix.row_range(range.first, range.count);
    std::memcpy(to, from.data, from.bytes());
    to += from.bytes();
  }
  ordered.data = pages.data();
  model.reordered.push_back({std::move(pages), ordered.bytes()});
  return ordered;
}

bool TensorSource::has_any(const std::string& begin) const {
  return std::any_of(gguf_.tensors().begin(), gguf_.tensors().end(),
                     [&](const GgufTensor& tensor) { return tensor.name.starts_with(begin); });
}

Result<Tensor> TensorSource::take(const std::string& name, uint64_t rows, uint64_t cols, uint64_t matrices) {
  const GgufTensor* found = gguf_.tensor(name);
  if (!found) return error(Code::kFormat, "%s lacks the tensor '%s'", gguf_.name().c_str(), name.c_str());
  const DTypeInfo* info = find_dtype(found->type);
  if (!info)
    return error(Code::kUnsupported,
                 "%s: tensor '%s' is of type %s (%" PRIu32
                 "), which cannot be read; use a file with types such as "
                 "q4_K, q6_K, q8_0 or f16",
                 gguf_.name().c_str(), name.c_str(), gguf_type_name(found->type), found->type);
  if (found->shape[0] != cols || found->shape[1] != rows || found->shape[2] != matrices ||
      found->shape[3] != 1) {
    std::string shape = std::to_string(found->shape[0]);
    for (uint32_t d = 1; d < found->dims; ++d) shape += " x " + std::to_string(found->shape[d]);
    const std::string expected = std::to_string(cols) +
                                 (rows * matrices > 1 ? " x " + std::to_string(rows) : "") +
                                 (matrices > 1 ? " x " + std::to_string(matrices) : "");
    return error(Code::kFormat, "%s: tensor '%s' is %s, where %s is expected", gguf_.name().c_str(),
                 name.c_str(), shape.c_str(), expected.c_str());
  }
  taken_[static_cast<size_t>(found - gguf_.tensors().data())] = true;
  return Tensor{found->data, info->type, static_cast<uint32_t>(rows * matrices), static_cast<uint32_t>(cols)};
}

// NAME of NAME.weight.
static std::string without_weight(const std::string& name) {
  constexpr std::string_view kEnd = ".weight";
  return name.ends_with(kEnd) ? name.substr(0, name.size() - kEnd.size()) : name;
}

Result<Tensor> TensorSource::matrix(const std::string& name, uint64_t rows, uint64_t cols) {
  THIMBLE_LET(tensor, take(name, rows, cols));
  const std::string begin = without_weight(name), of_scale = begin + ".scale";
  skip(begin + ".input_scale");
  // Tensors of more numbers are something else (gemma4's router has one).
  if (const GgufTensor* found = gguf_.tensor(of_scale); found && found->elements == 1) {
    THIMBLE_LET(scale, vector(of_scale, 1));
    std::memcpy(&tensor.scale, scale.data, sizeof tensor.scale);
  }
  return tensor;
}

Result<Tensor> TensorSource::table(const std::string& name, uint64_t rows, uint64_t cols) {
  return take(name, rows, cols);
}

Result<Tensor> TensorSource::scales(const std::string& name, uint64_t experts) {
  const std::string begin = without_weight(name);
  skip(begin + ".input_scale");
  return vector_if_any(begin + ".scale", experts);
}

Result<Tensor> TensorSource::matrices(const std::string& name, uint64_t experts, uint64_t rows,
                                      uint64_t cols) {
  return take(name, rows, cols, experts);
}

Result<Tensor> TensorSource::floats(const std::string& name, uint64_t rows, uint64_t cols) {
  THIMBLE_LET(tensor, take(name, rows, cols));
  if (tensor.type != DType::kF32)
    return error(Code::kUnsupported, "%s: tensor '%s' is of type %s, where f32 is needed",
                 gguf_.name().c_str(), name.c_str(), dtype_info(tensor.type).name);
  return tensor;
}

Result<Tensor> TensorSource::vector(const std::string& name, uint64_t cols) { return floats(name, 1, cols); }

Result<Tensor> TensorSource::vector_if_any(const std::string& name, uint64_t cols) {
  return has(name) ? vector(name, cols) : Tensor();
}

void TensorSource::skip(const std::string& begin) {
  for (size_t i = 0; i < taken_.size(); ++i)
    if (gguf_.tensors()[i].name.starts_with(begin)) taken_[i] = true;
}

Status TensorSource::all_taken() const {
  const auto left = std::find(taken_.begin(), taken_.end(), false);
  if (left == taken_.end()) return gguf_.layout();
  const GgufTensor& tensor = gguf_.tensors()[static_cast<size_t>(left - taken_.begin())];
  return error(Code::kUnsupported,
               "%s: tensor %s has no place in this architecture; without it the model would be wrong",
               gguf_.name().c_str(), in_quotes(tensor.name).c_str());
}

}  // namespace thimble
