// Entry points for text: tokens and chat formats.
#include <algorithm>
#include <vector>

#include "base/system.h"
#include "capi/handles.h"
#include "templates/chat/writer.h"

using namespace thimble;
using namespace thimble::capi;

namespace {

Status need_flags(uint32_t flags, uint32_t known) {
  if ((flags & ~known) == 0) return {};
  return error(Code::kInvalidArgument, "flags is 0x%x; the known bits here are 0x%x", flags, known);
}

Result<ChatWriter> find_writer(const Model& model, const thimble_chat_options& o) {
  if (o.format && o.source)
    return error(Code::kInvalidArgument,
                 "options.format and options.source are two ways to write; leave one NULL");
  if (o.source) return ChatWriter::from_source({o.source, static_cast<size_t>(o.source_length)});
  if (o.format) return model.chat_named(o.format);
  return model.chat;
}

Result<Conversation> read_conversation(const thimble_chat_options& o) {
  THIMBLE_TRY(
      need_flags(o.flags, THIMBLE_CHAT_ADD_ASSISTANT | THIMBLE_CHAT_CONTINUE | THIMBLE_CHAT_PARSE_CONTENT));
  THIMBLE_TRY(need_array(o.messages, o.message_count, "messages"));
  THIMBLE_TRY(need_array(o.source, o.source_length, "options.source"));
  THIMBLE_TRY(need_array(o.messages_json, o.messages_json_length, "options.messages_json"));
  THIMBLE_TRY(need_array(o.variables, o.variables_length, "options.variables"));
  if (o.message_count && o.messages_json_length)
    return error(Code::kInvalidArgument,
                 "options.messages and options.messages_json are two ways to give messages; leave one out");
  Conversation c;
  for (uint64_t i = 0; i < o.message_count; ++i) {
    const thimble_message& m = o.messages[i];
    THIMBLE_TRY(need(m.role, "a message's role"));
    THIMBLE_TRY(need_array(m.content, m.content_length, "a message's content"));
    c.messages.push_back({m.role, {m.content, static_cast<size_t>(m.content_length)}});
  }
  if (o.messages_json) c.messages_json = {o.messages_json, static_cast<size_t>(o.messages_json_length)};
  if (o.variables) c.variables_json = {o.variables, static_cast<size_t>(o.variables_length)};
  c.add_assistant = o.flags & THIMBLE_CHAT_ADD_ASSISTANT;
  c.continues = o.flags & THIMBLE_CHAT_CONTINUE;
  c.parses_content = o.flags & THIMBLE_CHAT_PARSE_CONTENT;
  c.held = o.held;
  c.now = o.time ? o.time : wall_clock_seconds();
  return c;
}

Status render(const thimble_model* model, const thimble_chat_options& o, char* text, uint64_t capacity,
              uint64_t* length) {
  THIMBLE_TRY(need(model, "model"));
  THIMBLE_LET(conversation, read_conversation(o));
  THIMBLE_TRY(need_buffer(text, capacity, length, "text"));
  THIMBLE_LET(writer, find_writer(*model->model, o));
  THIMBLE_LET(written, writer.write(conversation, model->model->tokenizer));
  return give_text(written, text, capacity, length);
}

}  // namespace

thimble_status thimble_tokenize(const thimble_model* model, const char* text, uint64_t length, uint32_t flags,
                                int32_t* ids, uint64_t* offsets, uint64_t capacity, uint64_t* count,
                                thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(model, "model"));
    THIMBLE_TRY(need_array(text, length, "text"));
    THIMBLE_TRY(need_flags(
        flags, THIMBLE_TOKENIZE_ADD_BOS | THIMBLE_TOKENIZE_PARSE_SPECIAL | THIMBLE_TOKENIZE_CONTINUE));
    THIMBLE_TRY(need_buffer(ids, capacity, count, "ids"));
    THIMBLE_TRY(need_tokenizer(*model->model));
    // Stores at most `capacity` tokens. They are copied to the caller only if all of them fit.
    uint64_t needed = 0;
    std::vector<int32_t> held_ids;
    std::vector<uint64_t> held_offsets;
    held_ids.reserve(static_cast<size_t>(std::min(capacity, length + 1)));
    const auto hold = [&](Token token) {
      if (needed++ >= capacity) return;
      held_ids.push_back(token.id);
      if (offsets) held_offsets.push_back(token.offset);
    };
    model->model->tokenizer.tokenize({text, static_cast<size_t>(length)}, flags & THIMBLE_TOKENIZE_ADD_BOS,
                                     flags & THIMBLE_TOKENIZE_PARSE_SPECIAL, hold,
                                     flags & THIMBLE_TOKENIZE_CONTINUE);
    THIMBLE_TRY(need_room(needed, capacity, count));
    std::copy(held_ids.begin(), held_ids.end(), ids);
    std::copy(held_offsets.begin(), held_offsets.end(), offsets);
    return {};
  });
}

uint64_t thimble_tokenize_cut(const thimble_model* model, const char* text, uint64_t length) {
  if (!model || !text) return 0;
  return model->model->tokenizer.cut({text, static_cast<size_t>(length)});
}

thimble_status thimble_detokenize(const thimble_model* model, const int32_t* ids, uint64_t count,
                                  uint32_t flags, char* text, uint64_t capacity, uint64_t* length,
                                  thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(model, "model"));
    THIMBLE_TRY(need_array(ids, count, "ids"));
    THIMBLE_TRY(need_flags(flags, THIMBLE_DETOKENIZE_SPECIAL));
    THIMBLE_TRY(need_buffer(text, capacity, length, "text"));
    THIMBLE_TRY(need_tokenizer(*model->model));
    for (uint64_t i = 0; i < count; ++i) THIMBLE_TRY(need_token(*model->model, ids[i]));
    const std::string bytes = model->model->tokenizer.detokenize(ids, static_cast<size_t>(count),
                                                                 flags & THIMBLE_DETOKENIZE_SPECIAL);
    Utf8Stream stream;
    std::string whole;
    stream.push(bytes, whole);
    stream.finish(whole);
    return give_text(whole, text, capacity, length);
  });
}

thimble_status thimble_token_bytes(const thimble_model* model, int32_t id, char* bytes, uint64_t capacity,
                                   uint64_t* length, thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(model, "model"));
    THIMBLE_TRY(need_buffer(bytes, capacity, length, "bytes"));
    THIMBLE_TRY(need_tokenizer(*model->model));
    THIMBLE_TRY(need_token(*model->model, id));
    std::string piece;
    model->model->tokenizer.append_piece(id, true, piece);
    return give_text(piece, bytes, capacity, length);
  });
}

int32_t thimble_token_ends(const thimble_model* model, int32_t id) {
  return model && model->model->tokenizer.ok() && model->model->tokenizer.ends_generation(id);
}

thimble_status thimble_chat_text(const thimble_model* model, const char* format,
                                 const thimble_message* messages, uint64_t count, uint32_t flags, char* text,
                                 uint64_t capacity, uint64_t* length, thimble_error* out) {
  return guard(out, [&] {
    thimble_chat_options o = {};
    o.format = format;
    o.messages = messages;
    o.message_count = count;
    o.flags = flags;
    return render(model, o, text, capacity, length);
  });
}

void thimble_chat_options_init(thimble_chat_options* options, uint32_t struct_size) {
  init_struct(options, struct_size, {});
}

thimble_status thimble_chat_render(const thimble_model* model, const thimble_chat_options* options,
                                   char* text, uint64_t capacity, uint64_t* length, thimble_error* out) {
  return guard(out, [&]() -> Status {
    thimble_chat_options o = {};
    THIMBLE_TRY(read_struct(options, "options", o));
    return render(model, o, text, capacity, length);
  });
}
