// Fields that several of OpenAI's wire formats have.
#pragma once

#include "apps/serve/task.h"

namespace app::serve {

// Fields of sampling, which read_sampling() reads, and fields that do not change the answer.
constexpr const char* kSamplingFields[] = {
    "temperature",        "top_p",         "top_k",      "min_p",         "repeat_penalty",
    "repetition_penalty", "repeat_last_n", "seed",       "stop",          "frequency_penalty",
    "presence_penalty",   "logit_bias",    "ignore_eos", "stop_token_ids"};
constexpr const char* kHarmlessFields[] = {"user",
                                           "safety_identifier",
                                           "metadata",
                                           "store",
                                           "service_tier",
                                           "prompt_cache_key",
                                           "prompt_cache_options",
                                           "prompt_cache_retention",
                                           "cache_prompt",
                                           "prediction"};
constexpr int64_t kMostTokens = int64_t{1} << 30;

void read_sampling(const Json& body, Task& task);
// Reads the format of an answer: {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema"} with
// its schema as a member of `holder`.
Form format_form(const Json& format, const Json& holder);
// The variables of the chat template besides the messages: how much the model is to think, and those that the
// request names. `effort` is OpenAI's reasoning effort; nullptr: none is given.
Json template_variables(const Json& body, const std::string* effort);
// Converts a call to the form that chat templates expect: its arguments, JSON as text or an object, become an
// object. `id` may be null.
Json template_call(const std::string& name, const Json* arguments, const std::string* id);
// Reads which of the tools may or must be called, and how many calls there may be. `tools`: an array in the
// form of chat completions, or null.
void read_tools(const Json& body, Json tools, Task& task);
// Checks that the tool exists which must be called.
void check_must_call(const Task& task);
// Refuses an answer without an end.
void check_end(const Task& task);
// Reads whether the answer is streamed.
void read_streaming(const Json& body, Asked& asked);

}  // namespace app::serve
