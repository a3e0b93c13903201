// Wraps the C library for app code (see library.h).
#include "apps/library.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace app {

namespace {

// Returns the result of a two-call function as a container. Calls `ask(data, capacity, &count, &error)` once,
// and again if `first_capacity` was too small.
template <typename Container, typename Ask>
Container two_calls(uint64_t first_capacity, Ask ask) {
  Container out;
  out.resize(first_capacity);
  for (;;) {
    thimble_error error = {};
    error.struct_size = sizeof error;
    uint64_t count = 0;
    const thimble_status status = ask(out, &count, &error);
    if (status == THIMBLE_OK) {
      out.resize(count);
      return out;
    }
    if (status != THIMBLE_INVALID_ARGUMENT || count <= out.size()) raise(error);
    out.resize(count);
  }
}

template <typename Info>
Info sized() {
  Info info = {};
  info.struct_size = sizeof info;
  return info;
}

}  // namespace

void raise(const thimble_error& error) {
  const char* message = error.message[0] ? error.message : thimble_status_text(error.code);
  throw Failure(error.code, message, error.bytes_missing);
}

Model open_model(const std::string& path, std::vector<std::string>* warnings) {
  thimble_model_options options;
  thimble_model_options_init(&options, sizeof options);
  options.log_user = warnings;
  options.log = [](void* user, const char* text) {
    if (user) {
      static_cast<std::vector<std::string>*>(user)->emplace_back(text);
    } else {
      std::fprintf(stderr, "thimble: warning: %s\n", text);
    }
  };
  thimble_model* model = nullptr;
  call(thimble_model_open, path.c_str(), &options, &model);
  return Model(model);
}

Heads open_heads(const Model& model, const std::string& path) {
  thimble_heads* heads = nullptr;
  call(thimble_heads_open, model.get(), path.c_str(), &heads);
  return Heads(heads);
}

Session create_session(const Model& model, const thimble_session_options& options) {
  thimble_session* session = nullptr;
  call(thimble_session_create, model.get(), &options, &session);
  return Session(session);
}

Session clone(const Session& session) {
  thimble_session* copy = nullptr;
  call(thimble_session_clone, session.get(), &copy);
  return Session(copy);
}

void save_session(const Session& session, const std::string& path, const std::string& note) {
  while (
      !call_unless_interrupted(thimble_session_save, session.get(), path.c_str(), note.data(), note.size()))
    continue;
}

void restore_session(const Session& session, const std::string& path) {
  call(thimble_session_restore, session.get(), path.c_str());
}

std::string session_note(const std::string& path) {
  return two_calls<std::string>(4096, [&](auto& note, uint64_t* length, auto* error) {
    return thimble_session_file_note(path.c_str(), note.data(), note.size(), length, error);
  });
}

std::string session_info(const std::string& path) {
  return two_calls<std::string>(2048, [&](auto& text, uint64_t* length, auto* error) {
    return thimble_session_file_info(path.c_str(), text.data(), text.size(), length, error);
  });
}

thimble_model_info model_info(const Model& model) {
  auto info = sized<thimble_model_info>();
  call(thimble_model_get_info, model.get(), &info);
  return info;
}

std::string heads_info(const std::string& path, const Model& model) {
  return two_calls<std::string>(4096, [&](auto& text, uint64_t* length, auto* error) {
    return thimble_heads_info(path.c_str(), model.get(), text.data(), text.size(), length, error);
  });
}

std::string training_report(const thimble_training* training) {
  return two_calls<std::string>(1024, [&](auto& text, uint64_t* length, auto* error) {
    return thimble_training_report(training, text.data(), text.size(), length, error);
  });
}

std::pair<std::string, std::string> model_metadata(const Model& model, uint64_t index) {
  uint64_t key_length = 0, value_length = 0;
  // Asks for both lengths. The call fails with "too small", as two-call functions do.
  thimble_model_metadata_get(model.get(), index, nullptr, 0, &key_length, nullptr, 0, &value_length, nullptr);
  std::string key(key_length, '\0'), value(value_length, '\0');
  call(thimble_model_metadata_get, model.get(), index, key.data(), key_length, &key_length, value.data(),
       value_length, &value_length);
  return {key, value};
}

bool has_chat_template(const Model& model) {
  uint64_t count = 0;
  call(thimble_model_metadata_count, model.get(), &count);
  for (uint64_t i = 0; i < count; ++i)
    if (model_metadata(model, i).first.starts_with("tokenizer.chat_template")) return true;
  return false;
}

std::string tokenizer_problem(const Model& model) {
  if (model_info(model).has_tokenizer) return "";
  try {
    tokenize(model, "", 0);  // the library reports what is wrong with the file
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "";
}

void need_tokenizer(const Model& model) {
  const std::string problem = tokenizer_problem(model);
  if (!problem.empty()) throw Failure(THIMBLE_UNSUPPORTED, problem + "; 'thimble run --tokens' takes ids");
}

thimble_memory plan(const Model& model, const thimble_session_options& options) {
  auto memory = sized<thimble_memory>();
  call(thimble_session_plan, model.get(), &options, &memory);
  return memory;
}

std::vector<uint32_t> kv_heads(const Model& model) {
  return two_calls<std::vector<uint32_t>>(1024, [&](auto& heads, uint64_t* count, auto* error) {
    return thimble_model_kv_heads(model.get(), heads.data(), heads.size(), count, error);
  });
}

std::vector<uint32_t> plan_heads(const Model& model, const thimble_session_options& options) {
  return two_calls<std::vector<uint32_t>>(1024, [&](auto& keeps, uint64_t* count, auto* error) {
    return thimble_session_plan_heads(model.get(), &options, keeps.data(), keeps.size(), count, error);
  });
}

thimble_memory memory(const Session& session) {
  auto memory = sized<thimble_memory>();
  call(thimble_session_memory, session.get(), &memory);
  return memory;
}

thimble_session_options decided_options(const Session& session) {
  auto options = sized<thimble_session_options>();
  call(thimble_session_get_options, session.get(), &options);
  return options;
}

thimble_stats stats(const Session& session) {
  auto stats = sized<thimble_stats>();
  call(thimble_session_stats, session.get(), &stats);
  return stats;
}

thimble_device_rates measure_device(const std::string& device, uint32_t threads) {
  auto rates = sized<thimble_device_rates>();
  call(thimble_device_measure, device.c_str(), threads, &rates);
  return rates;
}

Tokens tokenize(const Model& model, std::string_view text, uint32_t flags) {
  Tokens tokens;
  // A token of English text has about four bytes, so a second call is rarely needed.
  tokens.ids =
      two_calls<std::vector<int32_t>>(text.size() / 3 + 16, [&](auto& ids, uint64_t* count, auto* error) {
        tokens.offsets.resize(ids.size());
        return thimble_tokenize(model.get(), text.data(), text.size(), flags, ids.data(),
                                tokens.offsets.data(), ids.size(), count, error);
      });
  tokens.offsets.resize(tokens.ids.size());
  return tokens;
}

std::vector<int32_t> token_ids(const Model& model, std::string_view text, uint32_t flags) {
  // Tokenises in parts, so that memory holds the ids of the whole text and next to them those of only one
  // part.
  constexpr size_t kPart = 1 << 20;
  std::vector<int32_t> all;
  all.reserve(text.size() / 4 + 16);
  do {
    const uint64_t cut = text.size() > kPart ? thimble_tokenize_cut(model.get(), text.data(), kPart) : 0;
    const std::string_view part = text.substr(0, cut ? cut : text.size());
    const auto ids =
        two_calls<std::vector<int32_t>>(part.size() / 3 + 16, [&](auto& out, uint64_t* count, auto* error) {
          return thimble_tokenize(model.get(), part.data(), part.size(), flags, out.data(), nullptr,
                                  out.size(), count, error);
        });
    all.insert(all.end(), ids.begin(), ids.end());
    text.remove_prefix(part.size());
    flags = (flags & ~uint32_t{THIMBLE_TOKENIZE_ADD_BOS}) | THIMBLE_TOKENIZE_CONTINUE;
  } while (!text.empty());
  return all;
}

std::string detokenize(const Model& model, const std::vector<int32_t>& ids, uint32_t flags) {
  return two_calls<std::string>(ids.size() * 8 + 16, [&](auto& text, uint64_t* length, auto* error) {
    return thimble_detokenize(model.get(), ids.data(), ids.size(), flags, text.data(), text.size(), length,
                              error);
  });
}

namespace {

thimble_chat_options chat_options(const ChatStyle& style) {
  thimble_chat_options options;
  thimble_chat_options_init(&options, sizeof options);
  if (!style.format.empty()) options.format = style.format.c_str();
  if (!style.source.empty()) options.source = style.source.data();
  options.source_length = style.source.size();
  if (!style.variables.empty()) options.variables = style.variables.data();
  options.variables_length = style.variables.size();
  if (style.parses_content) options.flags = THIMBLE_CHAT_PARSE_CONTENT;
  return options;
}

std::string render(const Model& model, const thimble_chat_options& options, uint64_t size) {
  return two_calls<std::string>(size, [&](auto& text, uint64_t* length, auto* error) {
    return thimble_chat_render(model.get(), &options, text.data(), text.size(), length, error);
  });
}

}  // namespace

std::string chat_text(const Model& model, const ChatStyle& style,
                      const std::vector<thimble_message>& messages, uint32_t flags) {
  thimble_chat_options options = chat_options(style);
  options.flags |= flags;
  options.messages = messages.data();
  options.message_count = messages.size();
  uint64_t size = 1024;
  for (const auto& m : messages) size += m.content_length;
  return render(model, options, size);
}

std::string chat_text(const Model& model, const ChatStyle& style, const std::string& messages_json,
                      uint64_t held) {
  thimble_chat_options options = chat_options(style);
  options.flags |= THIMBLE_CHAT_ADD_ASSISTANT;
  options.messages_json = messages_json.data();
  options.messages_json_length = messages_json.size();
  options.held = held;
  return render(model, options, 1024 + messages_json.size());
}

thimble_message message(const char* role, std::string_view content) {
  return {role, content.data(), content.size()};
}

std::string token_bytes(const Model& model, int32_t token) {
  char bytes[512];
  uint64_t length = 0;
  const auto status = thimble_token_bytes(model.get(), token, bytes, sizeof bytes, &length, nullptr);
  return status == THIMBLE_OK ? std::string(bytes, length) : "";
}

std::string token_text(const Session& session, int32_t token) {
  return two_calls<std::string>(64, [&](auto& text, uint64_t* length, auto* error) {
    return thimble_session_text(session.get(), token, text.data(), text.size(), length, error);
  });
}

std::vector<float> logits(const Session& session) {
  const float* values = nullptr;
  uint32_t count = 0;
  call(thimble_session_logits, session.get(), &values, &count);
  return {values, values + count};
}

std::vector<int32_t> kept(const Session& session, uint32_t layer, uint32_t kv_head) {
  return two_calls<std::vector<int32_t>>(
      stats(session).entries, [&](auto& positions, uint64_t* count, auto* error) {
        return thimble_session_kept(session.get(), layer, kv_head, positions.data(), positions.size(), count,
                                    error);
      });
}

std::vector<std::vector<int32_t>> kept_by_head(const Model& model, const Session& session) {
  const std::vector<uint32_t> in_layer = kv_heads(model);
  std::vector<std::vector<int32_t>> heads;
  for (uint32_t layer = 0; layer < in_layer.size(); ++layer)
    for (uint32_t head = 0; head < in_layer[layer]; ++head) heads.push_back(kept(session, layer, head));
  return heads;
}

std::vector<float> kept_shares(const Session& session) {
  return two_calls<std::vector<float>>(
      stats(session).position, [&](auto& shares, uint64_t* count, auto* error) {
        return thimble_session_kept_by_position(session.get(), shares.data(), nullptr, shares.size(), count,
                                                error);
      });
}

std::vector<float> stored_shares(const Session& session) {
  return two_calls<std::vector<float>>(
      stats(session).position, [&](auto& shares, uint64_t* count, auto* error) {
        return thimble_session_stored_by_position(session.get(), shares.data(), shares.size(), count, error);
      });
}

std::vector<float> attended(const Session& session) {
  return two_calls<std::vector<float>>(
      stats(session).position, [&](auto& shares, uint64_t* count, auto* error) {
        return thimble_session_kept_by_position(session.get(), nullptr, shares.data(), shares.size(), count,
                                                error);
      });
}

FILE* open_file(const std::string& path) {
#ifdef _WIN32
  FILE* const file = _wfopen(native_path(path).c_str(), L"rb");
#else
  FILE* const file = std::fopen(path.c_str(), "rb");
#endif
  if (!file) throw Failure(THIMBLE_IO, "cannot open '" + path + "': " + std::strerror(errno));
  return file;
}

std::string read_file(const std::string& path) {
  const bool standard_input = path == "-";
  const std::unique_ptr<FILE, int (*)(FILE*)> owned(standard_input ? nullptr : open_file(path), std::fclose);
  FILE* const file = standard_input ? stdin : owned.get();
  std::string bytes;
  char block[1 << 16];
  for (size_t n; (n = std::fread(block, 1, sizeof block, file)) > 0;) bytes.append(block, n);
  if (std::ferror(file)) {  // a folder can be opened but not read
    throw Failure(THIMBLE_IO, "cannot read " + (standard_input ? "standard input" : "'" + path + "'") + ": " +
                                  std::strerror(errno));
  }
  return bytes;
}

std::filesystem::path native_path(const std::string& path) { return std::u8string(path.begin(), path.end()); }

std::string utf8_path(const std::filesystem::path& path) {
  const std::u8string text = path.u8string();
  return {text.begin(), text.end()};
}

std::string_view strip(std::string_view text) {
  const char* kSpace = " \t\r\n\v\f";
  const size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

std::vector<int32_t> parse_ids(const std::string& text) {
  std::vector<int32_t> ids;
  for (size_t at = 0; (at = text.find_first_not_of(" ,\t\r\n", at)) != std::string::npos;) {
    const size_t end = std::min(text.find_first_of(" ,\t\r\n", at), text.size());
    const std::string word = text.substr(at, end - at);
    char* rest = nullptr;
    errno = 0;
    const long long id = std::strtoll(word.c_str(), &rest, 10);
    if (*rest || errno || id < 0 || id > INT32_MAX) {
      throw UsageError("'" + word + "' is not a token id; give numbers such as \"1,2,3\"");
    }
    ids.push_back(static_cast<int32_t>(id));
    at = end;
  }
  if (ids.empty()) throw UsageError("there is no token id in the list; give numbers such as \"1,2,3\"");
  return ids;
}

}  // namespace app
