// Entry points for models and retainers: opening files, and reading their contents.
#include "backends/registry.h"
#include "capi/handles.h"

using namespace thimble;
using namespace thimble::capi;

Result<std::shared_ptr<Device>> thimble_model::device(const std::string& name, uint32_t threads) const {
  const std::scoped_lock lock(mutex_);
  std::erase_if(opened_, [](const Opened& o) { return o.device.expired(); });
  for (const Opened& o : opened_)
    if (std::shared_ptr<Device> device = o.device.lock(); device && o.name == name && o.threads == threads)
      return device;
  THIMBLE_LET(device, open_device(name, {.threads = threads}));
  opened_.push_back({name, threads, device});
  return device;
}

namespace {

constexpr size_t kLongestValue = 4096;  // largest number of bytes shown of a metadata string

// Wraps memory that the caller owns as a file. Tensors in a file are aligned to 32 bytes.
Result<MappedFile> lend(const void* data, uint64_t size) {
  constexpr uintptr_t kAlignment = 32;
  THIMBLE_TRY(need(data, "data"));
  THIMBLE_TRY(need_array(static_cast<const char*>(data), size, "data"));
  if (reinterpret_cast<uintptr_t>(data) % kAlignment)
    return error(Code::kInvalidArgument,
                 "data is not aligned; give memory whose address is a multiple of 32");
  return MappedFile::lend(data, static_cast<size_t>(size));
}

Result<MappedFile> map(const char* path) {
  THIMBLE_TRY(need(path, "path"));
  return MappedFile::open(path);
}

using Files = std::vector<GgufFile>;
Result<Files> map_model(const char* path) {
  THIMBLE_TRY(need(path, "path"));
  return open_gguf(path);
}

std::string descriptor_name(int32_t descriptor) { return "file descriptor " + std::to_string(descriptor); }

Result<Files> map_descriptors(const int32_t* descriptors, uint64_t count) {
  THIMBLE_TRY(need_array(descriptors, count, "descriptors"));
  if (count == 0) return error(Code::kInvalidArgument, "no descriptor is given; give one for each file");
  Files files;
  for (uint64_t i = 0; i < count; ++i) {
    THIMBLE_LET(map, MappedFile::from_descriptor(descriptors[i]));
    files.push_back({std::move(map), descriptor_name(descriptors[i])});
  }
  return files;
}

Result<Files> map_range(int32_t descriptor, uint64_t offset, uint64_t size) {
  THIMBLE_LET(map, MappedFile::from_descriptor(descriptor, offset, size));
  Files files;
  files.push_back({std::move(map), descriptor_name(descriptor) + " from byte " + std::to_string(offset)});
  return files;
}

Result<Files> lend_model(const void* data, uint64_t size) {
  THIMBLE_LET(map, lend(data, size));
  Files files;
  files.push_back({std::move(map), "the buffer"});
  return files;
}

Status open_model(Result<Files> files, const thimble_model_options* lent, thimble_model** out) {
  THIMBLE_TRY(need(out, "model"));
  thimble_model_options options = {};
  THIMBLE_TRY(read_struct(lent, "options", options));
  THIMBLE_TRY(files);
  auto handle = std::make_unique<thimble_model>();
  THIMBLE_LET(model, Model::open(std::move(*files)));
  handle->model = model;
  handle->log = options.log;
  handle->log_user = options.log_user;
  for (const std::string& warning : model->warnings) handle->warn(warning);
  *out = handle.release();
  return {};
}

Status open_heads(const thimble_model* model, Result<MappedFile> file, std::string name,
                  thimble_heads** out) {
  THIMBLE_TRY(need(model, "model"));
  THIMBLE_TRY(need(out, "heads"));
  THIMBLE_TRY(file);
  THIMBLE_TRY(model->model->check_files());
  auto handle = std::make_unique<thimble_heads>();
  THIMBLE_LET(retainer, model->model->open_retainer(std::move(*file), std::move(name)));
  handle->retainer = retainer;
  handle->model = model->model;
  model->warn(retainer->warning);
  *out = handle.release();
  return {};
}

// A value as readable text: strings are copied up to a maximum length, everything else is formatted by
// printed().
Result<std::string> value_text(const Gguf& file, std::string_view key, const GgufValue& value) {
  std::string text;
  if (value.is_array || value.type != GgufType::kString) {
    text = printed(value);
  } else {
    THIMBLE_LET(string, file.get_string(key));
    text = cut_text(*string, kLongestValue);
  }
  Utf8Stream stream;
  std::string valid;
  stream.push(text, valid);
  stream.finish(valid);
  return valid;
}

}  // namespace

void thimble_model_options_init(thimble_model_options* options, uint32_t struct_size) {
  init_struct(options, struct_size, {});
}

thimble_status thimble_model_open(const char* path, const thimble_model_options* options,
                                  thimble_model** model, thimble_error* out) {
  return guard(out, [&] { return open_model(map_model(path), options, model); });
}

thimble_status thimble_model_open_fd(int32_t descriptor, const thimble_model_options* options,
                                     thimble_model** model, thimble_error* out) {
  return guard(out, [&] { return open_model(map_descriptors(&descriptor, 1), options, model); });
}

thimble_status thimble_model_open_fd_range(int32_t descriptor, uint64_t offset, uint64_t size,
                                           const thimble_model_options* options, thimble_model** model,
                                           thimble_error* out) {
  return guard(out, [&] { return open_model(map_range(descriptor, offset, size), options, model); });
}

thimble_status thimble_model_open_fds(const int32_t* descriptors, uint64_t count,
                                      const thimble_model_options* options, thimble_model** model,
                                      thimble_error* out) {
  return guard(out, [&] { return open_model(map_descriptors(descriptors, count), options, model); });
}

thimble_status thimble_model_open_buffer(const void* data, uint64_t size,
                                         const thimble_model_options* options, thimble_model** model,
                                         thimble_error* out) {
  return guard(out, [&] { return open_model(lend_model(data, size), options, model); });
}

void thimble_model_free(thimble_model* model) { delete model; }

thimble_status thimble_model_get_info(const thimble_model* handle, thimble_model_info* info,
                                      thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(handle, "model"));
    THIMBLE_TRY(need_struct(info, "info"));
    const Model& model = *handle->model;
    const ModelShape& s = model.shape;
    thimble_model_info value = {};
    value.has_weights = model.has_weights();
    value.has_tokenizer = model.tokenizer.ok();
    value.layers = s.layers;
    value.d_model = s.d_model;
    value.heads = s.heads;
    value.kv_heads = s.kv_heads;
    value.head_dim = s.head_dim;
    value.d_ff = s.d_ff;
    value.vocab = model.has_weights() ? s.vocab : model.tokenizer.size();
    value.context_length = model.info.context_length;
    value.bos = model.tokenizer.ok() ? model.tokenizer.bos() : -1;
    value.eos = model.tokenizer.ok() ? model.tokenizer.eos() : -1;
    value.files = static_cast<uint32_t>(model.files().size());
    value.parameters = model.info.parameters;
    value.file_bytes = model.info.file_bytes;
    value.kv_bytes_per_token = kv_bytes_per_token(model);
    value.experts = s.experts;
    value.experts_per_token = s.chosen_experts;
    for (const Layer& layer : model.layers)
      if (layer.has_window()) value.window = layer.attention()->window, ++value.window_layers;
    copy_text(value.architecture, sizeof value.architecture, model.info.architecture);
    copy_text(value.name, sizeof value.name, model.info.name);
    copy_text(value.quantization, sizeof value.quantization, model.info.quantization);
    copy_text(value.chat_format, sizeof value.chat_format, model.chat.format_name());
    copy_text(value.chat_problem, sizeof value.chat_problem, model.chat.problem());
    write_struct(info, value);
    return {};
  });
}

thimble_status thimble_model_kv_heads(const thimble_model* model, uint32_t* kv_heads, uint64_t capacity,
                                      uint64_t* count, thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(model, "model"));
    THIMBLE_TRY(need_buffer(kv_heads, capacity, count, "kv_heads"));
    const std::vector<Layer>& layers = model->model->layers;
    THIMBLE_TRY(need_room(layers.size(), capacity, count));
    std::fill_n(kv_heads, layers.size(), 0);
    for (const uint32_t layer : model->model->layer_of_run) ++kv_heads[layer];
    return {};
  });
}

thimble_status thimble_model_metadata_count(const thimble_model* model, uint64_t* count, thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(model, "model"));
    THIMBLE_TRY(need(count, "count"));
    *count = model->model->gguf().metadata().size();
    return {};
  });
}

thimble_status thimble_model_metadata_get(const thimble_model* model, uint64_t index, char* key,
                                          uint64_t key_capacity, uint64_t* key_length, char* value,
                                          uint64_t value_capacity, uint64_t* value_length,
                                          thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(model, "model"));
    THIMBLE_TRY(need_buffer(key, key_capacity, key_length, "key"));
    THIMBLE_TRY(need_buffer(value, value_capacity, value_length, "value"));
    const auto& metadata = model->model->gguf().metadata();
    if (index >= metadata.size())
      return error(Code::kInvalidArgument, "entry %" PRIu64 " was asked for; there are %zu, counted from 0",
                   index, metadata.size());
    const auto& [name, stored] = metadata[static_cast<size_t>(index)];
    THIMBLE_TRY(model->model->check_files());  // the value is in the mapped file
    THIMBLE_LET(text, value_text(model->model->gguf(), name, stored));
    const Status key_fits = need_room(name.size(), key_capacity, key_length);
    THIMBLE_TRY(need_room(text.size(), value_capacity, value_length));
    THIMBLE_TRY(key_fits);
    std::copy(name.begin(), name.end(), key);
    std::copy(text.begin(), text.end(), value);
    return {};
  });
}

thimble_status thimble_model_tensor_count(const thimble_model* model, uint64_t* count, thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(model, "model"));
    THIMBLE_TRY(need(count, "count"));
    *count = model->model->gguf().tensors().size();
    return {};
  });
}

thimble_status thimble_model_tensor_get(const thimble_model* model, uint64_t index, thimble_tensor_info* info,
                                        thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(model, "model"));
    THIMBLE_TRY(need_struct(info, "info"));
    const std::vector<GgufTensor>& tensors = model->model->gguf().tensors();
    if (index >= tensors.size())
      return error(Code::kInvalidArgument, "tensor %" PRIu64 " was asked for; there are %zu, counted from 0",
                   index, tensors.size());
    THIMBLE_TRY(model->model->check_files());  // the name is in the mapped file
    const GgufTensor& tensor = tensors[static_cast<size_t>(index)];
    thimble_tensor_info value = {};
    value.dims = tensor.dims;
    std::copy(std::begin(tensor.shape), std::end(tensor.shape), value.shape);
    value.bytes = tensor.bytes;
    copy_text(value.name, sizeof value.name, tensor.name);
    copy_text(value.type, sizeof value.type, gguf_type_name(tensor.type));
    write_struct(info, value);
    return {};
  });
}

thimble_status thimble_heads_open(const thimble_model* model, const char* path, thimble_heads** heads,
                                  thimble_error* out) {
  return guard(out, [&] { return open_heads(model, map(path), path ? path : "", heads); });
}

thimble_status thimble_heads_open_fd(const thimble_model* model, int32_t descriptor, thimble_heads** heads,
                                     thimble_error* out) {
  return guard(out, [&] {
    return open_heads(model, MappedFile::from_descriptor(descriptor), descriptor_name(descriptor), heads);
  });
}

thimble_status thimble_heads_open_buffer(const thimble_model* model, const void* data, uint64_t size,
                                         thimble_heads** heads, thimble_error* out) {
  return guard(out, [&] { return open_heads(model, lend(data, size), "the buffer", heads); });
}

void thimble_heads_free(thimble_heads* heads) { delete heads; }

int32_t thimble_heads_retention(const thimble_heads* heads) {
  if (heads)
    for (int32_t i = 0; const char* name = policy_name(static_cast<Retention>(i)); ++i)
      if (heads->retainer->retention == name) return i;
  return THIMBLE_RETENTION_LOCRET;
}
