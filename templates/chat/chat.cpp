#include "templates/chat/chat.h"

#include <algorithm>
#include <iterator>

namespace thimble {
namespace {

// A turn is open + role + close + content + end + gap. The model itself generates `end`. The template writes
// `gap`, so a conversation that continues after an answer begins with it.
struct Format {
  ChatFormat format;
  const char* name;
  const char *open, *close, *end, *gap;
  bool trims;  // white space around the content is removed
};

// llama2 and mistral write [INST] content [/INST] for user turns and have no role name for the assistant.
// Their system message goes into the user's turn.
constexpr Format kFormats[] = {
    {ChatFormat::kChatml, "chatml", "<|im_start|>", "\n", "<|im_end|>", "\n", false},
    {ChatFormat::kLlama3, "llama3", "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "", true},
    {ChatFormat::kLlama2, "llama2", "[INST] ", " [/INST]", "</s>", "<s>", true},
    {ChatFormat::kPhi3, "phi3", "<|", "|>\n", "<|end|>", "\n", false},
    {ChatFormat::kMistral, "mistral", "[INST] ", " [/INST]", "</s>", "", false},
    {ChatFormat::kZephyr, "zephyr", "<|", "|>\n", "</s>", "\n", false},
    {ChatFormat::kThimble, "thimble", "<|", "|>\n", "<|end|>", "\n", false},
};

const Format& row(ChatFormat format) {
  return *std::find_if(std::begin(kFormats), std::end(kFormats),
                       [&](const Format& f) { return f.format == format; });
}

std::string names() {
  std::string all;
  for (const Format& f : kFormats) all += (all.empty() ? "" : ", ") + std::string(f.name);
  return all;
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpaces = " \t\n\v\f\r";
  const size_t first = text.find_first_not_of(kSpaces);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpaces) + 1 - first);
}

// llama2 and mistral: [INST] <<SYS>>\nsystem\n<</SYS>>\n\nuser [/INST] answer </s><s>[INST] ...
Result<std::string> format_inst(const Format& f, const std::vector<ChatMessage>& messages) {
  const bool llama2 = f.format == ChatFormat::kLlama2;
  std::string text, system;
  for (const ChatMessage& m : messages) {
    const std::string_view content = f.trims ? trimmed(m.content) : m.content;
    if (m.role == "system") {
      system.append(llama2 ? "<<SYS>>\n" : "").append(content).append(llama2 ? "\n<</SYS>>\n\n" : "\n\n");
    } else if (m.role == "user") {
      text.append(text.empty() ? "" : f.gap).append(f.open).append(system).append(content).append(f.close);
      system.clear();
    } else {
      text.append(" ").append(content).append(llama2 ? " " : "").append(f.end);
    }
  }
  if (!system.empty())
    return error(Code::kInvalidArgument, "chat format %s: a system message needs a user message after it",
                 f.name);
  return text;
}

}  // namespace

const char* chat_format_name(ChatFormat format) { return row(format).name; }

std::vector<const char*> chat_format_names() {
  std::vector<const char*> all;
  for (const Format& f : kFormats) all.push_back(f.name);
  return all;
}

Result<ChatFormat> find_chat_format(std::string_view name) {
  for (const Format& f : kFormats)
    if (name == f.name) return f.format;
  return error(Code::kInvalidArgument, "there is no chat format '%.*s'; choose one of %s",
               static_cast<int>(std::min<size_t>(name.size(), 64)), name.data(), names().c_str());
}

Result<ChatFormat> recognise_chat_format(std::string_view chat_template) {
  const auto has = [&](std::string_view mark) { return chat_template.find(mark) != std::string_view::npos; };
  if (has("<|im_start|>")) return ChatFormat::kChatml;
  if (has("<|start_header_id|>") && has("<|end_header_id|>")) return ChatFormat::kLlama3;
  if (has("<|end|>") && has("<|assistant|>")) {
    // The demo model's template writes '<|' role '|>\n' in one expression, Phi-3's in several. The text is
    // the same.
    return has(R"('|>\n' + message['content'])") ? ChatFormat::kThimble : ChatFormat::kPhi3;
  }
  if (const size_t user = chat_template.find("<|user|>"); user != std::string_view::npos) {
    // Other templates share the role marks, but end a user's turn with nothing or with another mark.
    const std::string_view turn = chat_template.substr(user, chat_template.find("}}", user) - user);
    if (turn.find("eos_token") != std::string_view::npos || turn.find("</s>") != std::string_view::npos)
      return ChatFormat::kZephyr;
  }
  if (has("[INST]") && has("<<SYS>>")) return ChatFormat::kLlama2;
  // [SYSTEM_PROMPT] marks Mistral's later formats, which differ.
  if (has("[INST]") && !has("[SYSTEM_PROMPT]")) return ChatFormat::kMistral;
  return error(Code::kUnsupported,
               "the model's chat template is not one of the known formats (%s); name the one to use with "
               "--chat-template NAME",
               names().c_str());
}

Result<std::string> format_chat(ChatFormat format, const std::vector<ChatMessage>& messages,
                                bool add_assistant, bool first) {
  const Format& f = row(format);
  for (const ChatMessage& m : messages)
    if (m.role != "system" && m.role != "user" && m.role != "assistant")
      return error(Code::kInvalidArgument,
                   "there is no chat role '%.*s'; a message is from system, user or assistant",
                   static_cast<int>(std::min<size_t>(m.role.size(), 64)), m.role.data());

  std::string text = first ? "" : f.gap;
  if (format == ChatFormat::kLlama2 || format == ChatFormat::kMistral) {
    THIMBLE_LET(turns, format_inst(f, messages));
    return text + turns;
  }
  for (const ChatMessage& m : messages)
    text.append(f.open)
        .append(m.role)
        .append(f.close)
        .append(f.trims ? trimmed(m.content) : m.content)
        .append(f.end)
        .append(f.gap);
  if (add_assistant) text.append(f.open).append("assistant").append(f.close);
  return text;
}

}  // namespace thimble
