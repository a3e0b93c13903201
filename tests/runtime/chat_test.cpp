#include "templates/chat/chat.h"

#include <gtest/gtest.h>

#include "gguf/gguf.h"
#include "tests/support/data.h"
#include "tests/support/gguf_writer.h"
#include "text/tokenizer.h"

namespace thimble {
namespace {

const std::vector<ChatMessage> kConversation = {
    {"system", "Be brief."}, {"user", "Hi"}, {"assistant", "Hello."}, {"user", "Why?"}};

std::string written(ChatFormat format, const std::vector<ChatMessage>& messages = kConversation,
                    bool add_assistant = true, bool first = true) {
  const auto text = format_chat(format, messages, add_assistant, first);
  EXPECT_TRUE(text.ok()) << text.status().message();
  return text.ok() ? *text : "";
}

TEST(Chat, WritesEachFormatAsItsTemplateDoes) {
  EXPECT_EQ(
      written(ChatFormat::kChatml),
      "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
      "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(written(ChatFormat::kLlama3),
            "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n");
  EXPECT_EQ(written(ChatFormat::kLlama2),
            "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello. </s><s>[INST] Why? [/INST]");
  EXPECT_EQ(written(ChatFormat::kMistral), "[INST] Be brief.\n\nHi [/INST] Hello.</s>[INST] Why? [/INST]");
  EXPECT_EQ(written(ChatFormat::kZephyr),
            "<|system|>\nBe "
            "brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\nHello.</s>\n<|user|>\nWhy?</s>\n<|assistant|>\n");
  for (const ChatFormat format : {ChatFormat::kPhi3, ChatFormat::kThimble})
    EXPECT_EQ(written(format),
              "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello.<|end|>\n"
              "<|user|>\nWhy?<|end|>\n<|assistant|>\n");
}

TEST(Chat, ContinuesWhereTheModelStoppedAtItsEndOfTurnToken) {
  // The session holds the text written for the first question, then the model's answer and its end token. The
  // next question, written as a continuation, must give the same text as the whole conversation.
  const std::vector<ChatMessage> before(kConversation.begin(), kConversation.begin() + 2);
  const std::vector<ChatMessage> after(kConversation.begin() + 3, kConversation.end());
  const std::pair<ChatFormat, const char*> answers[] = {
      {ChatFormat::kChatml, "Hello.<|im_end|>"}, {ChatFormat::kLlama3, "Hello.<|eot_id|>"},
      {ChatFormat::kLlama2, " Hello. </s>"},     {ChatFormat::kMistral, " Hello.</s>"},
      {ChatFormat::kZephyr, "Hello.</s>"},       {ChatFormat::kPhi3, "Hello.<|end|>"},
      {ChatFormat::kThimble, "Hello.<|end|>"}};
  for (const auto& [format, answer] : answers)
    EXPECT_EQ(written(format, before) + answer + written(format, after, true, false), written(format))
        << chat_format_name(format);
}

TEST(Chat, LeavesTheAssistantOutUnlessAskedFor) {
  EXPECT_EQ(written(ChatFormat::kChatml, {{"user", "Hi"}}, false), "<|im_start|>user\nHi<|im_end|>\n");
  EXPECT_EQ(written(ChatFormat::kThimble, {}, false), "");
}

TEST(Chat, TrimsContentWhereTheTemplateDoes) {
  EXPECT_EQ(written(ChatFormat::kLlama2, {{"user", " \n a b \n"}}), "[INST] a b [/INST]");
  EXPECT_EQ(written(ChatFormat::kLlama3, {{"user", " \t"}}, false),
            "<|start_header_id|>user<|end_header_id|>\n\n<|eot_id|>");
  EXPECT_EQ(written(ChatFormat::kChatml, {{"user", " a\n"}}, false), "<|im_start|>user\n a\n<|im_end|>\n");
}

TEST(Chat, RefusesRolesAndSystemMessagesThatHaveNoPlace) {
  const auto role = format_chat(ChatFormat::kChatml, {{"tool", "x"}}, true, true);
  EXPECT_EQ(role.status().code(), Code::kInvalidArgument);
  EXPECT_NE(role.status().message().find("'tool'"), std::string::npos);
  EXPECT_EQ(format_chat(ChatFormat::kLlama2, {{"user", "a"}, {"system", "b"}}, true, true).status().code(),
            Code::kInvalidArgument);
}

TEST(Chat, RecognisesTemplatesByTheirMarks) {
  const std::pair<const char*, ChatFormat> templates[] = {
      {"{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
       "'<|im_end|>' + "
       "'\n'}}{% endfor %}",
       ChatFormat::kChatml},
      {"{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ "
       "message['content'] | trim + "
       "'<|eot_id|>' %}",
       ChatFormat::kLlama3},
      {"{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' %}{{ bos_token + '[INST] ' + "
       "content.strip() + ' [/INST]' }}",
       ChatFormat::kLlama2},
      {"{{ bos_token }}{% for message in messages %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% "
       "endfor %}",
       ChatFormat::kMistral},
      {"{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}\n{% endif "
       "%}{{ "
       "'<|assistant|>' }}",
       ChatFormat::kZephyr},
      {"{{'<|' + message['role'] + '|>' + '\n' + message['content'] + '<|end|>\n' }}{{ '<|assistant|>\n' }}",
       ChatFormat::kPhi3}};
  for (const auto& [text, format] : templates) {
    const auto found = recognise_chat_format(text);
    ASSERT_TRUE(found.ok()) << text;
    EXPECT_STREQ(chat_format_name(*found), chat_format_name(format));
  }
}

TEST(Chat, NamesTheFormatsIfATemplateIsUnknown) {
  for (const char* text : {"", "{{ message }}", "{{ bos_token }}<start_of_turn>user", "[SYSTEM_PROMPT][INST]",
                           "{{ '<|user|>\n' + message['content'] + '\n' }}{{ '<|assistant|>\n' + "
                           "message['content'] + eos_token }}"}) {
    const auto found = recognise_chat_format(text);
    ASSERT_FALSE(found.ok()) << text;
    EXPECT_EQ(found.status().code(), Code::kUnsupported);
    for (const char* name : chat_format_names())
      EXPECT_NE(found.status().message().find(name), std::string::npos);
    EXPECT_NE(found.status().message().find("--chat-template"), std::string::npos);
  }
}

TEST(Chat, FindsEveryFormatByItsName) {
  for (const char* name : chat_format_names()) {
    const auto found = find_chat_format(name);
    ASSERT_TRUE(found.ok());
    EXPECT_STREQ(chat_format_name(*found), name);
  }
  EXPECT_EQ(find_chat_format("").status().code(), Code::kInvalidArgument);
}

TEST(Chat, ReadsTheTemplatesOfRealFiles) {
  const auto file = MappedFile::open(project_file("models/thimble-demo-28m-q8_0.gguf"));
  ASSERT_TRUE(file.ok());
  const auto gguf = Gguf::parse(*file, "demo");
  ASSERT_TRUE(gguf.ok());
  const auto found = recognise_chat_format(*gguf->need_string("tokenizer.chat_template"));
  ASSERT_TRUE(found.ok()) << found.status().message();
  EXPECT_EQ(*found, ChatFormat::kThimble);

  // Each mark is one token of the model.
  const auto tokenizer = Tokenizer::load(*gguf);
  ASSERT_TRUE(tokenizer.ok());
  const std::vector<Token> tokens = tokenizer->tokenize(written(*found, {{"user", "Hi"}}), true, true);
  ASSERT_GE(tokens.size(), 7u);
  EXPECT_EQ(tokens[0].id, tokenizer->bos());
  EXPECT_EQ(tokens[1].id, tokenizer->find("<|user|>"));
  EXPECT_EQ(tokens[tokens.size() - 4].id, tokenizer->find("<|end|>"));
  EXPECT_EQ(tokens[tokens.size() - 2].id, tokenizer->find("<|assistant|>"));
}

TEST(Chat, RecognisesWholeTemplatesOfAFile) {
  // These templates were written for this test. Each has what its family's templates have around their marks:
  // defaults for a missing system message, branches by role, checks of the order, white space control, both
  // kinds of quotes.
  const std::pair<const char*, ChatFormat> templates[] = {{R"({%- if messages[0]["role"] != "system" -%}
{{- "<|im_start|>system\nAnswer briefly.<|im_end|>\n" -}}
{%- endif -%}
{%- for turn in messages -%}
{{- "<|im_start|>" ~ turn["role"] ~ "\n" ~ turn["content"] ~ "<|im_end|>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\n" -}}{%- endif -%})",
                                                           ChatFormat::kChatml},
                                                          {R"({%- set ns = namespace(first=true) -%}
{%- for m in messages -%}
{%- set turn = "<|start_header_id|>" ~ m.role ~ "<|end_header_id|>\n\n" ~ (m.content | trim) ~ "<|eot_id|>" -%}
{{- bos_token ~ turn if ns.first else turn -}}
{%- set ns.first = false -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|start_header_id|>assistant<|end_header_id|>\n\n" }}{%- endif -%})",
                                                           ChatFormat::kLlama3},
                                                          {R"({% if messages[0]['role'] == 'system' %}
{% set rules = '<<SYS>>\n' + messages[0]['content'].strip() + '\n<</SYS>>\n\n' %}
{% set turns = messages[1:] %}{% else %}{% set rules = '' %}{% set turns = messages %}{% endif %}
{% for turn in turns %}
{% if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('user and assistant take turns') }}{% endif %}
{% if turn['role'] == 'user' %}
{{ bos_token + '[INST] ' + (rules if loop.first else '') + turn['content'].strip() + ' [/INST]' }}
{% else %}{{ ' ' + turn['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %})",
                                                           ChatFormat::kLlama2},
                                                          {R"({{- bos_token -}}
{%- for turn in messages -%}
{%- if turn.role == "user" -%}{{- "[INST] " + turn.content + " [/INST]" -}}
{%- elif turn.role == "assistant" -%}{{- " " + turn.content + eos_token -}}
{%- else -%}{{- raise_exception("only user and assistant have a place here") -}}{%- endif -%}
{%- endfor -%})",
                                                           ChatFormat::kMistral},
                                                          {R"({% for turn in messages %}
{% if turn['role'] == 'system' %}{{ '<|system|>\n' + turn['content'] + eos_token }}
{% elif turn['role'] == 'user' %}{{ '<|user|>\n' + turn['content'] + eos_token }}
{% else %}{{ '<|assistant|>\n' + turn['content'] + eos_token }}{% endif %}
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
{% endfor %})",
                                                           ChatFormat::kZephyr},
                                                          {R"({{ bos_token }}{% for turn in messages %}
{% if turn['role'] == 'user' %}{{ '<|user|>' + '\n' + turn['content'] + '<|end|>' + '\n' }}
{% elif turn['role'] == 'system' and turn['content'] %}{{ '<|system|>' + '\n' + turn['content'] + '<|end|>' + '\n' }}
{% else %}{{ '<|assistant|>' + '\n' + turn['content'] + '<|end|>' + '\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' + '\n' }}{% endif %})",
                                                           ChatFormat::kPhi3}};
  for (const auto& [text, format] : templates) {
    SCOPED_TRACE(text);
    const FileBytes bytes = GgufWriter().set("tokenizer.chat_template", std::string(text)).bytes();
    const MappedFile file = lend(bytes);
    const auto gguf = Gguf::parse(file, "template");
    ASSERT_TRUE(gguf.ok()) << gguf.status().message();
    const auto found = recognise_chat_format(*gguf->need_string("tokenizer.chat_template"));
    ASSERT_TRUE(found.ok()) << found.status().message();
    EXPECT_STREQ(chat_format_name(*found), chat_format_name(format));
  }
}

TEST(Chat, RecognisesThePublicPhi3Template) {
  const std::string path = shared_file("data/vocab/phi-3.gguf");
  THIMBLE_NEEDS(path);
  const auto file = MappedFile::open(path);
  ASSERT_TRUE(file.ok());
  const auto gguf = Gguf::parse(*file, "phi-3");
  ASSERT_TRUE(gguf.ok());
  const auto found = recognise_chat_format(*gguf->need_string("tokenizer.chat_template"));
  ASSERT_TRUE(found.ok()) << found.status().message();
  EXPECT_EQ(*found, ChatFormat::kPhi3);
}

}  // namespace
}  // namespace thimble
