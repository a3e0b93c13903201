// The sizes and offsets of every struct of the C API are part of the ABI. They never change; fields are only
// added at the end.
#include <gtest/gtest.h>

#include <cstddef>
#include <type_traits>

#include "thimble/thimble.h"

// These are the sizes with 8-byte pointers; with 4-byte pointers, structs that contain pointers are smaller.
static_assert(sizeof(void*) != 8 || sizeof(thimble_model_options) == 24);
static_assert(sizeof(void*) != 8 || sizeof(thimble_message) == 24);
static_assert(sizeof(void*) != 8 || sizeof(thimble_session_options) == 208);

#define OFFSET(type, field, offset) static_assert(sizeof(void*) != 8 || offsetof(type, field) == offset)

static_assert(sizeof(thimble_error) == 512);
OFFSET(thimble_error, struct_size, 0);
OFFSET(thimble_error, code, 4);
OFFSET(thimble_error, bytes_missing, 8);
OFFSET(thimble_error, message, 16);

static_assert(sizeof(thimble_device_info) == 248);
OFFSET(thimble_device_info, struct_size, 0);
OFFSET(thimble_device_info, total_bytes, 8);
OFFSET(thimble_device_info, free_bytes, 16);
OFFSET(thimble_device_info, name, 24);
OFFSET(thimble_device_info, description, 56);

static_assert(sizeof(thimble_device_rates) == 24);
OFFSET(thimble_device_rates, struct_size, 0);
OFFSET(thimble_device_rates, bytes_per_second, 8);
OFFSET(thimble_device_rates, flop_per_second, 16);

OFFSET(thimble_model_options, struct_size, 0);
OFFSET(thimble_model_options, log, 8);
OFFSET(thimble_model_options, log_user, 16);

static_assert(sizeof(thimble_model_info) == 496);
OFFSET(thimble_model_info, struct_size, 0);
OFFSET(thimble_model_info, has_weights, 4);
OFFSET(thimble_model_info, has_tokenizer, 8);
OFFSET(thimble_model_info, layers, 12);
OFFSET(thimble_model_info, d_model, 16);
OFFSET(thimble_model_info, heads, 20);
OFFSET(thimble_model_info, kv_heads, 24);
OFFSET(thimble_model_info, head_dim, 28);
OFFSET(thimble_model_info, d_ff, 32);
OFFSET(thimble_model_info, vocab, 36);
OFFSET(thimble_model_info, context_length, 40);
OFFSET(thimble_model_info, bos, 44);
OFFSET(thimble_model_info, eos, 48);
OFFSET(thimble_model_info, files, 52);
OFFSET(thimble_model_info, parameters, 56);
OFFSET(thimble_model_info, file_bytes, 64);
OFFSET(thimble_model_info, kv_bytes_per_token, 72);
OFFSET(thimble_model_info, architecture, 80);
OFFSET(thimble_model_info, name, 112);
OFFSET(thimble_model_info, quantization, 208);
OFFSET(thimble_model_info, chat_format, 224);
OFFSET(thimble_model_info, chat_problem, 256);
OFFSET(thimble_model_info, experts, 480);
OFFSET(thimble_model_info, experts_per_token, 484);
OFFSET(thimble_model_info, window, 488);
OFFSET(thimble_model_info, window_layers, 492);

static_assert(sizeof(thimble_tensor_info) == 136);
OFFSET(thimble_tensor_info, struct_size, 0);
OFFSET(thimble_tensor_info, dims, 4);
OFFSET(thimble_tensor_info, shape, 8);
OFFSET(thimble_tensor_info, bytes, 40);
OFFSET(thimble_tensor_info, name, 48);
OFFSET(thimble_tensor_info, type, 120);

OFFSET(thimble_message, role, 0);
OFFSET(thimble_message, content, 8);
OFFSET(thimble_message, content_length, 16);

static_assert(sizeof(void*) != 8 || sizeof(thimble_chat_options) == 96);
OFFSET(thimble_chat_options, struct_size, 0);
OFFSET(thimble_chat_options, flags, 4);
OFFSET(thimble_chat_options, format, 8);
OFFSET(thimble_chat_options, source, 16);
OFFSET(thimble_chat_options, source_length, 24);
OFFSET(thimble_chat_options, messages, 32);
OFFSET(thimble_chat_options, message_count, 40);
OFFSET(thimble_chat_options, messages_json, 48);
OFFSET(thimble_chat_options, messages_json_length, 56);
OFFSET(thimble_chat_options, variables, 64);
OFFSET(thimble_chat_options, variables_length, 72);
OFFSET(thimble_chat_options, held, 80);
OFFSET(thimble_chat_options, time, 88);

static_assert(sizeof(thimble_progress) == 40);
OFFSET(thimble_progress, struct_size, 0);
OFFSET(thimble_progress, pool_entries, 4);
OFFSET(thimble_progress, pool_capacity, 8);
OFFSET(thimble_progress, done, 16);
OFFSET(thimble_progress, total, 24);
OFFSET(thimble_progress, tokens_per_second, 32);

OFFSET(thimble_session_options, struct_size, 0);
OFFSET(thimble_session_options, threads, 4);
OFFSET(thimble_session_options, device, 8);
OFFSET(thimble_session_options, heads, 16);
OFFSET(thimble_session_options, budget_bytes, 24);
OFFSET(thimble_session_options, retention, 32);
OFFSET(thimble_session_options, retain_scope, 36);
OFFSET(thimble_session_options, pool, 40);
OFFSET(thimble_session_options, chunk, 44);
OFFSET(thimble_session_options, stabilizers, 48);
OFFSET(thimble_session_options, local, 52);
OFFSET(thimble_session_options, protect_init, 56);
OFFSET(thimble_session_options, max_new, 60);
OFFSET(thimble_session_options, selection, 64);
OFFSET(thimble_session_options, select_k, 68);
OFFSET(thimble_session_options, select_init, 72);
OFFSET(thimble_session_options, select_local, 76);
OFFSET(thimble_session_options, select_theta, 80);
OFFSET(thimble_session_options, vote, 84);
OFFSET(thimble_session_options, vote_scale, 88);
OFFSET(thimble_session_options, vote_window, 92);
OFFSET(thimble_session_options, select_prefill, 96);
OFFSET(thimble_session_options, positions, 100);
OFFSET(thimble_session_options, context, 104);
OFFSET(thimble_session_options, seed, 108);
OFFSET(thimble_session_options, progress, 112);
OFFSET(thimble_session_options, progress_user, 120);
OFFSET(thimble_session_options, select_page, 128);
OFFSET(thimble_session_options, dense_layers, 132);
OFFSET(thimble_session_options, watch, 136);
OFFSET(thimble_session_options, rebuild, 140);
OFFSET(thimble_session_options, rebuild_every, 144);
OFFSET(thimble_session_options, draft, 148);
OFFSET(thimble_session_options, draft_tokens, 152);
OFFSET(thimble_session_options, recall_format, 156);
OFFSET(thimble_session_options, draft_model, 160);
OFFSET(thimble_session_options, recall_mem_bytes, 168);
OFFSET(thimble_session_options, recall, 176);
OFFSET(thimble_session_options, recall_every, 180);
OFFSET(thimble_session_options, recall_disk_bytes, 184);
OFFSET(thimble_session_options, key_format, 192);
OFFSET(thimble_session_options, value_format, 196);
OFFSET(thimble_session_options, recall_prefill, 200);

static_assert(sizeof(thimble_memory) == 200);
OFFSET(thimble_memory, struct_size, 0);
OFFSET(thimble_memory, pool, 4);
OFFSET(thimble_memory, capacity, 8);
OFFSET(thimble_memory, chunk, 12);
OFFSET(thimble_memory, budget, 16);
OFFSET(thimble_memory, weights, 24);
OFFSET(thimble_memory, shared, 32);
OFFSET(thimble_memory, pool_bytes, 40);
OFFSET(thimble_memory, view, 48);
OFFSET(thimble_memory, workspace, 56);
OFFSET(thimble_memory, io, 64);
OFFSET(thimble_memory, fixed, 72);
OFFSET(thimble_memory, total, 80);
OFFSET(thimble_memory, allocated, 88);
OFFSET(thimble_memory, dense_bytes_per_token, 96);
OFFSET(thimble_memory, mapped, 104);
OFFSET(thimble_memory, mapped_resident, 112);
OFFSET(thimble_memory, host_tables, 120);
OFFSET(thimble_memory, largest_position, 128);
OFFSET(thimble_memory, selection_pays, 132);
OFFSET(thimble_memory, states, 136);
OFFSET(thimble_memory, state_slots, 144);
OFFSET(thimble_memory, draft, 152);
OFFSET(thimble_memory, streamed, 160);
OFFSET(thimble_memory, store, 168);
OFFSET(thimble_memory, store_file, 176);
OFFSET(thimble_memory, finer_layers, 184);
OFFSET(thimble_memory, reserved, 188);
OFFSET(thimble_memory, recall_bytes, 192);

static_assert(sizeof(thimble_sampler_options) == 48);
OFFSET(thimble_sampler_options, struct_size, 0);
OFFSET(thimble_sampler_options, temperature, 4);
OFFSET(thimble_sampler_options, top_k, 8);
OFFSET(thimble_sampler_options, top_p, 12);
OFFSET(thimble_sampler_options, min_p, 16);
OFFSET(thimble_sampler_options, repeat_penalty, 20);
OFFSET(thimble_sampler_options, repeat_last, 24);
OFFSET(thimble_sampler_options, seed, 32);
OFFSET(thimble_sampler_options, presence_penalty, 40);
OFFSET(thimble_sampler_options, frequency_penalty, 44);

static_assert(sizeof(thimble_stats) == 152);
OFFSET(thimble_stats, struct_size, 0);
OFFSET(thimble_stats, entries, 4);
OFFSET(thimble_stats, position, 8);
OFFSET(thimble_stats, waiting, 16);
OFFSET(thimble_stats, evicted, 24);
OFFSET(thimble_stats, evictions, 32);
OFFSET(thimble_stats, generated, 40);
OFFSET(thimble_stats, selected, 48);
OFFSET(thimble_stats, cache_hits, 56);
OFFSET(thimble_stats, cache_misses, 64);
OFFSET(thimble_stats, prefill_tokens, 72);
OFFSET(thimble_stats, prefill_seconds, 80);
OFFSET(thimble_stats, decode_seconds, 88);
OFFSET(thimble_stats, prefill_bytes, 96);
OFFSET(thimble_stats, prefill_flop, 104);
OFFSET(thimble_stats, decode_bytes, 112);
OFFSET(thimble_stats, decode_flop, 120);
OFFSET(thimble_stats, saturated, 128);
OFFSET(thimble_stats, stored, 136);
OFFSET(thimble_stats, recalled, 144);

static_assert(sizeof(void*) != 8 || sizeof(thimble_training_options) == 96);
OFFSET(thimble_training_options, struct_size, 0);
OFFSET(thimble_training_options, threads, 4);
OFFSET(thimble_training_options, device, 8);
OFFSET(thimble_training_options, data, 16);
OFFSET(thimble_training_options, data_count, 24);
OFFSET(thimble_training_options, texts, 28);
OFFSET(thimble_training_options, steps, 32);
OFFSET(thimble_training_options, equal_shares, 36);
OFFSET(thimble_training_options, output, 40);
OFFSET(thimble_training_options, heads, 48);
OFFSET(thimble_training_options, kind, 56);
OFFSET(thimble_training_options, target, 64);
OFFSET(thimble_training_options, seed, 72);
OFFSET(thimble_training_options, memory_bytes, 80);
OFFSET(thimble_training_options, text_tokens, 88);

static_assert(sizeof(thimble_training_progress) == 56);
OFFSET(thimble_training_progress, struct_size, 0);
OFFSET(thimble_training_progress, phase, 4);
OFFSET(thimble_training_progress, done, 8);
OFFSET(thimble_training_progress, total, 16);
OFFSET(thimble_training_progress, per_second, 24);
OFFSET(thimble_training_progress, loss, 32);
OFFSET(thimble_training_progress, recall, 40);
OFFSET(thimble_training_progress, dense, 48);

namespace {

// Bindings in other languages assume this of a struct: a C layout that can be copied as bytes.
template <typename... T>
constexpr bool all_plain() {
  return ((std::is_standard_layout_v<T> && std::is_trivial_v<T>)&&...);
}

TEST(Layout, IsPlainAndEveryEnumValueIsPinned) {
  EXPECT_TRUE((all_plain<thimble_error, thimble_device_info, thimble_model_options, thimble_model_info,
                         thimble_tensor_info, thimble_message, thimble_progress, thimble_session_options,
                         thimble_memory, thimble_sampler_options, thimble_stats, thimble_training_options,
                         thimble_chat_options, thimble_training_progress>()));
  EXPECT_EQ(THIMBLE_RETENTION_DEFAULT, -1);
  EXPECT_EQ(THIMBLE_RETENTION_NONE, 0);
  EXPECT_EQ(THIMBLE_RETENTION_WINDOW, 1);
  EXPECT_EQ(THIMBLE_RETENTION_RANDOM, 2);
  EXPECT_EQ(THIMBLE_RETENTION_LOCRET, 3);
  EXPECT_EQ(THIMBLE_RETENTION_KEYDIFF, 4);
  EXPECT_EQ(THIMBLE_RETENTION_TOVA, 5);
  EXPECT_EQ(THIMBLE_RETENTION_REREAD, 6);
  EXPECT_EQ(THIMBLE_RETENTION_ADORE, 7);
  EXPECT_EQ(THIMBLE_RETENTION_MIX, 8);
  EXPECT_EQ(THIMBLE_RETAIN_PER_HEAD, 0);
  EXPECT_EQ(THIMBLE_RETAIN_LAYER, 1);
  EXPECT_EQ(THIMBLE_TRAIT_EVICTS, 1);
  EXPECT_EQ(THIMBLE_TRAIT_EVICTS_EACH, 2);
  EXPECT_EQ(THIMBLE_TRAIT_SHARES, 4);
  EXPECT_EQ(THIMBLE_TRAIT_RETAINER, 8);
  EXPECT_EQ(THIMBLE_TRAIT_CONTROLLER, 16);
  EXPECT_EQ(THIMBLE_TRAIT_REMEMBERS, 32);
  EXPECT_EQ(THIMBLE_SELECTION_DENSE, 0);
  EXPECT_EQ(THIMBLE_SELECTION_TOKENSELECT, 1);
  EXPECT_EQ(THIMBLE_SELECTION_QUEST, 2);
  EXPECT_EQ(THIMBLE_VOTE_AUTO, 0);
  EXPECT_EQ(THIMBLE_VOTE_LAYER, 1);
  EXPECT_EQ(THIMBLE_VOTE_GROUP, 2);
  EXPECT_EQ(THIMBLE_RECALL_ALL, 0xffffffffu);
  EXPECT_EQ(THIMBLE_KV_F16, 0);
  EXPECT_EQ(THIMBLE_KV_Q8_0, 1);
  EXPECT_EQ(THIMBLE_KV_Q4_0, 2);
  EXPECT_EQ(THIMBLE_DRAFT_NONE, 0);
  EXPECT_EQ(THIMBLE_DRAFT_LOOKUP, 1);
  EXPECT_EQ(THIMBLE_DRAFT_MODEL, 2);
  EXPECT_EQ(THIMBLE_DRAFT_MTP, 3);
  EXPECT_EQ(THIMBLE_POSITIONS_LIST, 0);
  EXPECT_EQ(THIMBLE_POSITIONS_ORIGINAL, 1);
  EXPECT_EQ(THIMBLE_SCALE_NONE, 0);
  EXPECT_EQ(THIMBLE_SCALE_SQRT, 1);
  EXPECT_EQ(THIMBLE_TRAINING_READING, 0);
  EXPECT_EQ(THIMBLE_TRAINING_FITTING, 1);
  EXPECT_EQ(THIMBLE_TRAINING_CHECKING, 2);
  EXPECT_EQ(THIMBLE_TRAINING_DONE, 3);
  EXPECT_EQ(THIMBLE_TRAINING_TRYING, 4);
  EXPECT_EQ(THIMBLE_TOKENIZE_ADD_BOS, 1u);
  EXPECT_EQ(THIMBLE_TOKENIZE_PARSE_SPECIAL, 2u);
  EXPECT_EQ(THIMBLE_TOKENIZE_CONTINUE, 4u);
  EXPECT_EQ(THIMBLE_DETOKENIZE_SPECIAL, 1u);
  EXPECT_EQ(THIMBLE_CHAT_ADD_ASSISTANT, 1u);
  EXPECT_EQ(THIMBLE_CHAT_CONTINUE, 2u);
  EXPECT_EQ(THIMBLE_CHAT_PARSE_CONTENT, 4u);
  EXPECT_EQ(THIMBLE_DEFAULT, 0xffffffffu);
  EXPECT_EQ(THIMBLE_OK, 0);
  EXPECT_EQ(THIMBLE_INVALID_ARGUMENT, 10);
  EXPECT_EQ(THIMBLE_UNSUPPORTED, 11);
  EXPECT_EQ(THIMBLE_IO, 20);
  EXPECT_EQ(THIMBLE_FORMAT, 21);
  EXPECT_EQ(THIMBLE_MISMATCH, 22);
  EXPECT_EQ(THIMBLE_BUDGET, 30);
  EXPECT_EQ(THIMBLE_OUT_OF_MEMORY, 31);
  EXPECT_EQ(THIMBLE_CONTEXT_FULL, 40);
  EXPECT_EQ(THIMBLE_CANNOT_REWIND, 41);
  EXPECT_EQ(THIMBLE_INTERRUPTED, 50);
  EXPECT_EQ(THIMBLE_BUSY, 51);
  EXPECT_EQ(THIMBLE_DEVICE_LOST, 60);
  EXPECT_EQ(THIMBLE_NOT_FINITE, 61);
  EXPECT_EQ(THIMBLE_INTERNAL, 90);
}

}  // namespace
