// Entry points about text: tokens, chat formats.
#include "capi/handles.h"
#include "runtime/chat/chat.h"

using namespace thimble;
using namespace thimble::capi;

namespace {

Status need_flags(uint32_t flags, uint32_t known) {
  if ((flags & ~known) == 0) return {};
  return error(Code::kInvalidArgument, "flags is 0x%x; the known bits here are 0x%x", flags, known);
}

Result<ChatFormat> find_format(const Model& model, const char* name) {
  return name ? find_chat_format(name) : recognise_chat_format(model.chat_template);
}

}  // namespace

thimble_status thimble_tokenize(const thimble_model* model, const char* text, uint64_t length, uint32_t flags,
                                int32_t* ids, uint64_t* offsets, uint64_t capacity, uint64_t* count,
                                thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(model, "model"));
    THIMBLE_TRY(need_array(text, length, "text"));
    THIMBLE_TRY(need_flags(flags, THIMBLE_TOKENIZE_ADD_BOS | THIMBLE_TOKENIZE_PARSE_SPECIAL));
    THIMBLE_TRY(need_buffer(ids, capacity, count, "ids"));
    THIMBLE_TRY(need_tokenizer(*model->model));
    const std::vector<Token> tokens = model->model->tokenizer.tokenize(
        {text, static_cast<size_t>(length)}, flags & THIMBLE_TOKENIZE_ADD_BOS,
        flags & THIMBLE_TOKENIZE_PARSE_SPECIAL);
    THIMBLE_TRY(need_room(tokens.size(), capacity, count));
    for (size_t i = 0; i < tokens.size(); ++i) {
      ids[i] = tokens[i].id;
      if (offsets) offsets[i] = tokens[i].offset;
    }
    return {};
  });
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
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(model, "model"));
    THIMBLE_TRY(need_array(messages, count, "messages"));
    THIMBLE_TRY(need_flags(flags, THIMBLE_CHAT_ADD_ASSISTANT | THIMBLE_CHAT_CONTINUE));
    THIMBLE_TRY(need_buffer(text, capacity, length, "text"));
    std::vector<ChatMessage> chat;
    for (uint64_t i = 0; i < count; ++i) {
      THIMBLE_TRY(need(messages[i].role, "a message's role"));
      THIMBLE_TRY(need_array(messages[i].content, messages[i].content_length, "a message's content"));
      chat.push_back(
          {messages[i].role, {messages[i].content, static_cast<size_t>(messages[i].content_length)}});
    }
    THIMBLE_LET(known, find_format(*model->model, format));
    THIMBLE_LET(formatted, format_chat(known, chat, flags & THIMBLE_CHAT_ADD_ASSISTANT,
                                       !(flags & THIMBLE_CHAT_CONTINUE)));
    return give_text(formatted, text, capacity, length);
  });
}
