"""Tests tool calls and thoughts from a request to the model and back: serve_tools.py COMMAND SOURCE_FOLDER

The models are made here. A model's layer adds nothing, and its output has one successor for each token. The first model
calls add(1, 2) after <|assistant|>, says "It is 3." after <|result|>, and ends after any other token. Each byte of a prompt
is a token."""
import json
import os
import re
import struct
import sys
import tempfile
import unittest

from serve_client import Server, events

TEMPLATE = """\
{%- if tools %}<|tools|>{{ tools | tojson }}{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}{{ '<|result|>' if messages[-1].role == 'tool' else '<|assistant|>' }}{% endif %}"""
SPECIAL = ["<|tools|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|result|>", "<|end|>"]
ARGUMENTS = {"a": 1, "b": 2}
CALL = ['<tool_call>{"name": "add", ', '"arguments": {"a": 1, "b": 2}}', "</tool_call>"]
CHAINS = [["<|assistant|>", *CALL, "<|end|>"], ["<|result|>", "It is 3.", "<|end|>"]]
WIDTH = 288  # one channel for each token: the embedding is the identity


def spelled(text):
    """Bytes in the spelling of byte-level BPE, one character each."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in text)


def vocabulary(special, chains):
    """Returns the texts and types of the tokens: type 1 is text, 3 is a control token."""
    texts = [spelled([byte]) for byte in range(256)] + special
    types = [1] * 256 + [3] * len(special)
    for text in dict.fromkeys(text for chain in chains for text in chain if text not in special and len(text) > 1):
        texts.append(spelled(text.encode()))
        types.append(1)
    unused = WIDTH - len(texts)
    return texts + [f"<unused{i}>" for i in range(unused)], types + [1] * unused


def weights(texts, special, chains):
    """Yields the name, shape (columns first) and floats of each tensor."""
    after = {text: chains[0][-1] for text in texts}
    for chain in chains:
        names = [text if text in special else spelled(text.encode()) for text in chain]
        after.update(zip(names, names[1:]))
    output = [0.0] * WIDTH * WIDTH
    for column, text in enumerate(texts):
        output[texts.index(after[text]) * WIDTH + column] = 1.0
    ones, nothing = [1.0] * WIDTH, [0.0] * WIDTH * 32
    yield "token_embd", (WIDTH, WIDTH), [float(i % (WIDTH + 1) == 0) for i in range(WIDTH * WIDTH)]
    yield "output", (WIDTH, WIDTH), output
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        yield name, (WIDTH,), ones
    for name in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"):
        yield "blk.0." + name, (WIDTH, 32), nothing
    for name in ("attn_output", "ffn_down"):
        yield "blk.0." + name, (32, WIDTH), nothing


def text_value(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def metadata(key, value):
    if isinstance(value, str):
        data = struct.pack("<I", 8) + text_value(value)
    elif isinstance(value, float):
        data = struct.pack("<If", 6, value)
    elif isinstance(value, list) and isinstance(value[0], str):
        data = struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text_value, value))
    elif isinstance(value, list):
        data = struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    else:
        data = struct.pack("<II", 4, value)
    return text_value(key) + data


def write_model(path, template=TEMPLATE, special=SPECIAL, chains=CHAINS):
    """Writes a model. Each chain ends with the token that ends an answer."""
    texts, types = vocabulary(special, chains)
    keys = {"general.architecture": "llama", "general.name": "a chain", "llama.context_length": 8192, "llama.block_count": 1,
            "llama.embedding_length": WIDTH, "llama.feed_forward_length": 32, "llama.attention.head_count": 1,
            "llama.attention.head_count_kv": 1, "llama.attention.key_length": 32, "llama.attention.value_length": 32,
            "llama.rope.dimension_count": 32, "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.vocab_size": WIDTH,
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": texts,
            "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": ["t h"],
            "tokenizer.ggml.eos_token_id": texts.index(chains[0][-1]), "tokenizer.chat_template": template}
    if not template:
        del keys["tokenizer.chat_template"]
    infos, data = b"", b""
    tensors = list(weights(texts, special, chains))
    for name, shape, values in tensors:
        infos += text_value(name + ".weight") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, len(data))
        data += struct.pack(f"<{len(values)}f", *values)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    head += b"".join(metadata(*item) for item in keys.items()) + infos
    with open(path, "wb") as file:
        file.write(head + bytes(-len(head) % 32) + data)


QUESTION = {"role": "user", "content": "What is 1 + 2?"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"name": "add", "description": "Adds: a & b, <très> \"bien\"."}
TOOLS = [{"type": "function", "function": {**ADD, "parameters": SCHEMA}}]
ANTHROPIC_TOOLS = [{**ADD, "input_schema": SCHEMA}]
# The text that the template makes of it. Such templates are written for json.dumps.
PROMPT = f"<|tools|>{json.dumps(TOOLS, ensure_ascii=False)}<|user|>What is 1 + 2?<|end|><|assistant|>"
ANSWERED = PROMPT + "".join(CALL) + "<|end|>"
WITH_RESULT = ANSWERED + "<|tool|>3<|end|><|result|>It is 3."


def tokens(text):
    """The number of tokens of a prompt: one for each byte, and one for each special text."""
    for special in SPECIAL:
        text = text.replace(special, "\0")
    return len(text.encode())


class Chain(unittest.TestCase):
    """Each test has a server with one slot, so the slot's text comes only from the requests of that test."""
    model_of = ()  # template, special tokens, chains
    flags = ()

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.model = os.path.join(cls.folder.name, "chain.gguf")
        write_model(cls.model, *cls.model_of)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def setUp(self):
        self.server = Server("--device", "cpu", "--slots", "1", "--pool", "2048", "--retention", "none", *self.flags, model=self.model)

    def tearDown(self):
        self.assertEqual(self.server.stop()[0], 0)

    def read(self):
        """The text that the slot holds."""
        return "".join(segment["text"] for segment in self.server.get("/thimble/kept?slot=0")["segments"])


NUMBERS = {"type": "object", "properties": {"a": {"enum": [7]}, "b": {"enum": ["x"]}}, "required": ["a", "b"], "additionalProperties": False}
MEANT = {"a": 7, "b": "x"}  # the only value of this schema, which the model would not write by itself


class Tools(Chain):
    def test_a_call_that_must_be_made_meets_its_schema(self):
        tools = [{"type": "function", "function": {"name": name, "parameters": NUMBERS}} for name in ("add", "take")]
        by_name = {"type": "function", "function": {"name": "take"}}
        for choice, name in (("required", "add"), (by_name, "take")):
            choice_of = self.server.chat([QUESTION], tools=tools, tool_choice=choice)["choices"][0]
            [call] = choice_of["message"]["tool_calls"]
            self.assertEqual((call["function"]["name"], json.loads(call["function"]["arguments"])), (name, MEANT))
            self.assertEqual((choice_of["finish_reason"], choice_of["message"]["content"]), ("tool_calls", None))
            lines = self.server.stream({"messages": [QUESTION], "tools": tools, "tool_choice": choice})
            calls = [call for event in events(lines) if event != "[DONE]" for c in event["choices"] for call in c["delta"].get("tool_calls", [])]
            self.assertEqual([json.loads(call["function"]["arguments"]) for call in calls], [MEANT])
        anthropic = [{"name": tool["function"]["name"], "input_schema": NUMBERS} for tool in tools]
        for choice, name in (({"type": "any"}, "add"), ({"type": "tool", "name": "take"}, "take")):
            body = self.server.chat([QUESTION], "/v1/messages", max_tokens=99, tools=anthropic, tool_choice=choice)
            self.assertEqual([(block["type"], block["name"], block["input"]) for block in body["content"]], [("tool_use", name, MEANT)])
        responses = [{"type": "function", **tool["function"]} for tool in tools]
        for choice, name in (("required", "add"), ({"type": "function", "name": "take"}, "take")):
            body = self.server.ask("POST", "/v1/responses", {"input": [QUESTION], "tools": responses, "tool_choice": choice})[2]
            self.assertEqual([(item["name"], json.loads(item["arguments"])) for item in body["output"]], [(name, MEANT)])
        for wrong in ({"tool_choice": "required"}, {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "no"}}},
                      {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "what"}}}], "tool_choice": "required"}):
            self.assertEqual(self.server.ask("POST", "/v1/chat/completions", {"messages": [QUESTION], **wrong})[0], 400, wrong)

    def test_arguments_of_strict_tools_meet_their_schema(self):
        tool = {"type": "function", "function": {"name": "add", "parameters": NUMBERS, "strict": True}}
        [call] = self.server.chat([QUESTION], tools=[tool])["choices"][0]["message"]["tool_calls"]
        self.assertEqual(json.loads(call["function"]["arguments"]), MEANT)
        [block] = self.server.chat([QUESTION], "/v1/messages", max_tokens=99,
                                   tools=[{"name": "add", "input_schema": NUMBERS, "strict": True}])["content"]
        self.assertEqual(block["input"], MEANT)

    def test_answers_have_the_form_that_is_asked_for(self):
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBERS}}
        for fields in ({"response_format": schema}, {"guided_json": NUMBERS}, {"json_schema": NUMBERS},
                       {"grammar": 'root ::= "{\\"a\\":7,\\"b\\":\\"x\\"}"'}):
            choice = self.server.chat([QUESTION], **fields)["choices"][0]
            self.assertEqual((json.loads(choice["message"]["content"]), choice["finish_reason"]), (MEANT, "stop"))
            self.assertEqual(json.loads(self.server.ask("POST", "/v1/completions", {"prompt": "a", **fields})[2]["choices"][0]["text"]), MEANT)
        text = {"format": {"type": "json_schema", "name": "n", "schema": NUMBERS}}
        body = self.server.ask("POST", "/v1/responses", {"input": [QUESTION], "text": text})[2]
        self.assertEqual(json.loads(body["output"][0]["content"][0]["text"]), MEANT)
        for fields in ({"output_config": {"format": {"type": "json_schema", "schema": NUMBERS}}},
                       {"output_format": {"type": "json_schema", "schema": NUMBERS}}):
            body = self.server.chat([QUESTION], "/v1/messages", max_tokens=99, **fields)
            self.assertEqual(json.loads(body["content"][0]["text"]), MEANT)
        # The next answer is free again.
        self.assertEqual(self.server.chat([QUESTION])["choices"][0]["message"]["content"], "".join(CALL))
        # With tools, the model may call one instead.
        choice = self.server.chat([QUESTION], tools=TOOLS, response_format=schema)["choices"][0]
        self.assertEqual([call["function"]["name"] for call in choice["message"]["tool_calls"]], ["add"])
        several = self.server.chat([QUESTION], response_format=schema, n=2)["choices"]
        self.assertEqual([json.loads(choice["message"]["content"]) for choice in several], [MEANT, MEANT])
        for wrong in ({"guided_json": {"type": "what"}}, {"grammar": "root ::= ("}, {"grammar": "leaf ::= \"a\""},
                      {"response_format": schema, "continue_final_message": True}):
            messages = [QUESTION, {"role": "assistant", "content": "It"}] if "continue_final_message" in wrong else [QUESTION]
            status, _, error = self.server.ask("POST", "/v1/chat/completions", {"messages": messages, **wrong})
            self.assertEqual(status, 400, wrong)
            self.assertTrue(error["error"]["message"])

    def test_a_call_goes_out_and_its_result_comes_back(self):
        body = self.server.chat([QUESTION], tools=TOOLS)
        choice = body["choices"][0]
        self.assertEqual(choice["finish_reason"], "tool_calls")
        self.assertIsNone(choice["message"]["content"])
        [call] = choice["message"]["tool_calls"]
        self.assertEqual((call["type"], call["function"]["name"]), ("function", "add"))
        self.assertEqual(json.loads(call["function"]["arguments"]), ARGUMENTS)
        self.assertEqual(body["usage"]["prompt_tokens"], tokens(PROMPT))
        self.assertTrue(self.read().startswith(PROMPT), self.read())

        result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        second = self.server.chat([QUESTION, choice["message"], result], tools=TOOLS)
        self.assertEqual(second["choices"][0]["message"], {"role": "assistant", "content": "It is 3."})
        self.assertEqual(second["choices"][0]["finish_reason"], "stop")
        # The text of the call is what the model wrote, not what a template would make of it.
        self.assertGreaterEqual(second["usage"]["prompt_tokens_details"]["cached_tokens"], body["usage"]["total_tokens"] - 1)
        self.assertTrue(self.read().startswith(WITH_RESULT), self.read())

    def test_a_call_that_was_not_made_here_is_written_by_the_template(self):
        function = {"name": "add", "arguments": ARGUMENTS}
        call = {"id": "c1", "type": "function", "function": {**function, "arguments": json.dumps(ARGUMENTS)}}
        messages = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "c1", "content": "3"}]
        body = self.server.chat(messages, tools=TOOLS)
        self.assertEqual(body["choices"][0]["message"]["content"], "It is 3.")
        prompt = PROMPT + "<call>" + json.dumps(function) + "<|end|><|tool|>3<|end|><|result|>"
        self.assertEqual(body["usage"]["prompt_tokens"], tokens(prompt))
        self.assertTrue(self.read().startswith(prompt + "It is 3."), self.read())

    def test_integers_of_any_length_keep_their_digits(self):
        arguments = {"a": 123456789012345678901234567890, "b": [-18446744073709551617]}
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": json.dumps(arguments)}}
        use = {"type": "tool_use", "id": "c1", "name": "add", "input": arguments}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": "3"}
        written = "<call>" + json.dumps({"name": "add", "arguments": arguments}) + "<|end|><|tool|>3<|end|>"
        self.server.chat([QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]},
                          {"role": "tool", "tool_call_id": "c1", "content": "3"}], tools=TOOLS)
        self.assertIn(written, self.read())
        self.server.chat([QUESTION, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}],
                         "/v1/messages", max_tokens=50, tools=ANTHROPIC_TOOLS)
        self.assertIn(written, self.read())

    def test_a_streamed_call_is_the_same(self):
        lines = self.server.stream({"messages": [QUESTION], "tools": TOOLS})
        choices = [event["choices"][0] for event in events(lines) if event != "[DONE]" and event["choices"]]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
        self.assertEqual([call["function"]["name"] for call in calls], ["add"])
        self.assertEqual(json.loads(calls[0]["function"]["arguments"]), ARGUMENTS)
        self.assertEqual("".join(choice["delta"].get("content") or "" for choice in choices), "")
        self.assertEqual(choices[-1]["finish_reason"], "tool_calls")
        self.assertTrue(self.read().startswith(PROMPT), self.read())

    def test_responses_read_and_write_the_same(self):
        tools = [{"type": "function", **ADD, "parameters": SCHEMA}]
        status, _, body = self.server.ask("POST", "/v1/responses", {"input": [QUESTION], "tools": tools})
        self.assertEqual(status, 200, body)
        [call] = body["output"]
        self.assertEqual((call["type"], call["name"], json.loads(call["arguments"])), ("function_call", "add", ARGUMENTS))
        self.assertEqual(body["usage"]["input_tokens"], tokens(PROMPT))
        self.assertTrue(self.read().startswith(PROMPT), self.read())
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
        second = self.server.ask("POST", "/v1/responses", {"input": [QUESTION, call, result], "tools": tools})[2]
        self.assertEqual([item["content"][0]["text"] for item in second["output"]], ["It is 3."])
        self.assertTrue(self.read().startswith(WITH_RESULT), self.read())

        data = events(self.server.stream({"input": [QUESTION], "tools": tools}, "/v1/responses"))
        [start] = [event["item"] for event in data if event["type"] == "response.output_item.added"]
        self.assertEqual((start["type"], start["name"], start["arguments"]), ("function_call", "add", ""))
        parts = [event["delta"] for event in data if event["type"] == "response.function_call_arguments.delta"]
        self.assertEqual(json.loads("".join(parts)), ARGUMENTS)
        self.assertEqual(data[-1]["response"]["output"][0]["arguments"], "".join(parts))

    def test_without_tools_the_same_answer_is_text(self):
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            body = self.server.chat([QUESTION], **fields)
            self.assertEqual(body["choices"][0]["message"]["content"], "".join(CALL))
            self.assertEqual(body["choices"][0]["finish_reason"], "stop")
            self.assertTrue(self.read().startswith("<|user|>What is 1 + 2?<|end|><|assistant|><tool_call>"), self.read())

    def test_anthropics_format_reads_and_writes_the_same(self):
        body = self.server.chat([QUESTION], "/v1/messages", max_tokens=50, tools=ANTHROPIC_TOOLS)
        self.assertEqual(body["stop_reason"], "tool_use")
        [use] = body["content"]
        self.assertEqual((use["type"], use["name"], use["input"]), ("tool_use", "add", ARGUMENTS))
        self.assertEqual(body["usage"]["input_tokens"], tokens(PROMPT))
        self.assertTrue(self.read().startswith(PROMPT), self.read())

        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": "3"}]}
        messages = [QUESTION, {"role": "assistant", "content": body["content"]}, result]
        second = self.server.chat(messages, "/v1/messages", max_tokens=50, tools=ANTHROPIC_TOOLS)
        self.assertEqual(second["content"], [{"type": "text", "text": "It is 3."}])
        self.assertEqual(second["stop_reason"], "end_turn")
        self.assertTrue(self.read().startswith(WITH_RESULT), self.read())

    def test_anthropics_streamed_call_is_the_same(self):
        lines = self.server.stream({"messages": [QUESTION], "max_tokens": 50, "tools": ANTHROPIC_TOOLS}, "/v1/messages")
        data = events(lines)
        [start] = [event["content_block"] for event in data if event["type"] == "content_block_start"]
        self.assertEqual((start["type"], start["name"]), ("tool_use", "add"))
        parts = [event["delta"]["partial_json"] for event in data if event["type"] == "content_block_delta"]
        self.assertEqual(json.loads("".join(parts)), ARGUMENTS)
        [ending] = [event["delta"]["stop_reason"] for event in data if event["type"] == "message_delta"]
        self.assertEqual(ending, "tool_use")

    def test_an_earlier_answer_is_not_what_a_question_asks_about(self):
        self.assertEqual(self.server.set(retention="window", pool=512, chunk=128)[0], 200)
        messages = [{"role": "user", "content": "It is 3.\n" + "Rain fell.\n" * 100}, {"role": "tool", "content": "x"}]
        messages.append(self.server.chat(messages)["choices"][0]["message"])
        self.assertEqual(messages[-1]["content"], "It is 3.")
        self.server.chat([*messages, {"role": "user", "content": "\nIs it 3?"}])
        held = self.server.get("/thimble/kept?slot=0")
        self.assertIn("It is 3.<|end|>", [segment["text"] for segment in held["segments"]])
        self.assertEqual((held["asked"]["segment"], held["asked"]["gone"]), (0, True), held)

    def test_a_begun_answer_goes_on(self):
        """The message that the client began is not a separate turn: the model continues it."""
        question = {"role": "user", "content": "Hi"}
        for path, fields in (("/v1/messages", {"max_tokens": 5}), ("/v1/chat/completions", {"continue_final_message": True})):
            self.server.chat([question, {"role": "assistant", "content": "It is"}], path, **fields)
            self.assertEqual(self.read(), "<|user|>Hi<|end|><|assistant|>It is<|end|>")
        # The two parts become one message, after which the conversation continues.
        body = self.server.chat([question, {"role": "assistant", "content": "It is"}, question], "/v1/messages", max_tokens=5)
        self.assertGreater(body["usage"]["cache_read_input_tokens"], 0)

    def test_prompts_are_counted_and_the_model_is_named(self):
        counted = self.server.chat([QUESTION], "/v1/messages/count_tokens", tools=ANTHROPIC_TOOLS)
        self.assertEqual(counted, {"input_tokens": tokens(PROMPT)})
        self.assertEqual(self.server.get("/v1/models/chain"), self.server.get("/v1/models")["data"][0])
        status, _, error = self.server.ask("GET", "/v1/models/other")
        self.assertEqual((status, error["error"]["code"]), (404, "model_not_found"))
        self.assertEqual(self.server.ask("POST", "/v1/models/chain", {})[0], 405)

    def test_a_base_model_completes_texts_and_says_so(self):
        model = os.path.join(self.folder.name, "base.gguf")
        write_model(model, None)
        base = Server("--device", "cpu", "--slots", "1", "--pool", "2048", "--retention", "none", model=model)
        text = base.ask("POST", "/v1/completions", {"prompt": "<|result|>"})[2]["choices"][0]["text"]
        self.assertEqual(text, "It is 3.")
        words = "no chat template; use /v1/completions, or start the server with --chat-template"
        for path in ("/v1/chat/completions", "/v1/messages"):
            status, _, error = base.ask("POST", path, {"messages": [QUESTION], "max_tokens": 5})
            self.assertEqual(status, 400)
            self.assertIn(words, error["error"]["message"])
        self.assertIn(words, base.state()["chat_problem"])
        self.assertIsNone(self.server.state()["chat_problem"])
        self.assertEqual(base.stop()[0], 0)


# As in gpt-oss' template, an answer is a message of thoughts and a final one. The client returns only the
# last.
HARMONY = """\
{%- for message in messages %}
{%- if message.role == 'assistant' and '<|channel|>' in message.content %}{{ raise_exception('channels in the content') }}{% endif %}
{%- if message.tool_calls and message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}
{%- if message.tool_calls %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking or message.content }}<|end|>
{%- for call in message.tool_calls %}<|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary json<|message|>
{{- call.function.arguments | tojson }}<|call|>{% endfor %}
{%- elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
CHANNELS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]


class Harmony(Chain):
    # Each token has one successor, so the whole text after <|start|>assistant is one token.
    model_of = (HARMONY, CHANNELS, [["t", "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant"
                                     "<|channel|>final<|message|>Four.", "<|return|>"]])

    def test_thoughts_and_answer_are_separate_and_can_be_sent_back(self):
        question = {"role": "user", "content": "2+2?"}
        message = self.server.chat([question])["choices"][0]["message"]
        self.assertEqual(message, {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."})
        second = self.server.chat([question, message, question])["choices"][0]["message"]
        self.assertEqual(second, message)

        lines = self.server.stream({"messages": [question]})
        deltas = [event["choices"][0]["delta"] for event in events(lines) if event != "[DONE]"]
        for name, text in (("content", "Four."), ("reasoning_content", "Two and two.")):
            self.assertEqual("".join(delta.get(name) or "" for delta in deltas), text)

        content = self.server.chat([question], "/v1/messages", max_tokens=50)["content"]
        self.assertEqual(content, [{"type": "thinking", "thinking": "Two and two.", "signature": ""},
                                   {"type": "text", "text": "Four."}])
        messages = [question, {"role": "assistant", "content": content}, question]
        self.assertEqual(self.server.chat(messages, "/v1/messages", max_tokens=50)["content"], content)

    def test_thoughts_are_items_of_a_response(self):
        question = {"role": "user", "content": "2+2?"}
        body = self.server.ask("POST", "/v1/responses", {"input": [question]})[2]
        thought, answer = body["output"]
        self.assertEqual((thought["type"], thought["content"]), ("reasoning", [{"type": "reasoning_text", "text": "Two and two."}]))
        self.assertEqual(answer["content"][0]["text"], "Four.")
        held = body["usage"]["total_tokens"]
        second = self.server.ask("POST", "/v1/responses", {"input": [question, thought, answer, question]})[2]
        self.assertEqual([item["type"] for item in second["output"]], ["reasoning", "message"])
        self.assertGreaterEqual(second["usage"]["input_tokens_details"]["cached_tokens"], held - 1)
        data = events(self.server.stream({"input": [question]}, "/v1/responses"))
        for kind, text in (("reasoning_text", "Two and two."), ("output_text", "Four.")):
            self.assertEqual("".join(e["delta"] for e in data if e["type"] == f"response.{kind}.delta"), text)

    def test_thoughts_before_a_call_come_back(self):
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        messages = [{"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "I look.", "reasoning_content": "I should.", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "c1", "content": "x"}]
        self.server.chat(messages)
        self.assertIn("<|channel|>analysis<|message|>I should.\n\nI look.<|end|>", self.read())
        self.server.chat([messages[0], {**messages[1], "content": None}, messages[2]])
        self.assertIn("<|channel|>analysis<|message|>I should.<|end|>", self.read())

    def test_a_call_that_must_be_made_meets_its_schema(self):
        tools = [{"type": "function", "function": {"name": name, "parameters": NUMBERS}} for name in ("add", "take")]
        for choice, name in (("required", "add"), ({"type": "function", "function": {"name": "take"}}, "take")):
            for given in (tools, tools[:1] if name == "add" else tools[1:]):
                message = self.server.chat([QUESTION], tools=given, tool_choice=choice)["choices"][0]["message"]
                [call] = message["tool_calls"]
                self.assertEqual((call["function"]["name"], json.loads(call["function"]["arguments"])), (name, MEANT))
                self.assertIn(f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", self.read())
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBERS}}
        message = self.server.chat([QUESTION], response_format=schema)["choices"][0]["message"]
        self.assertEqual(message["reasoning_content"], "Two and two.")

    def test_a_begun_answer_is_in_its_channel(self):
        self.server.chat([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "Fo"}], "/v1/messages", max_tokens=1)
        self.assertTrue(self.read().endswith("<|start|>assistant<|channel|>final<|message|>Fo<|return|>"), self.read())


# As in Solar Open's template, thoughts, text and calls are messages whose marks are control tokens.
SOLAR = """\
{%- for message in messages %}
{%- if message.reasoning %}<|begin|>assistant<|think|>{{ message.reasoning }}<|end|>{% endif %}
{%- if message.tool_calls %}<|begin|>assistant<|tool_calls|>{% for call in message.tool_calls %}<|tool_call:begin|>{{ call.id }}
{{- '<|tool_call:name|>' + call.function.name + '<|tool_call:args|>' + call.function.arguments | tojson }}<|tool_call:end|>{% endfor %}<|calls|>
{%- else %}<|begin|>{{ message.role }}<|content|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|begin|>assistant{% endif %}"""
SOLAR_MARKS = ["<|begin|>", "<|end|>", "<|think|>", "<|content|>", "<|tool_calls|>", "<|tool_call:begin|>", "<|tool_call:name|>",
               "<|tool_call:args|>", "<|tool_call:end|>", "<|calls|>", "<|flush|>"]


class SolarOpen(Chain):
    model_of = (SOLAR, SOLAR_MARKS, [["t", "<|think|>", "Two and two.", "<|end|>", "<|begin|>", "assistant", "<|content|>", "Four.", "<|flush|>"]])
    MESSAGE = {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}

    def test_thoughts_and_answer_are_separate_and_can_be_sent_back(self):
        message = self.server.chat([QUESTION])["choices"][0]["message"]
        self.assertEqual(message, self.MESSAGE)
        body = self.server.chat([QUESTION, message, QUESTION])
        self.assertEqual(body["choices"][0]["message"], message)
        self.assertGreater(body["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
        other = {"role": "user", "content": "Hm?"}
        self.server.chat([other, {**message, "content": "4"}, QUESTION])
        self.assertIn("<|think|>Two and two.<|end|><|begin|>assistant<|content|>4<|end|>", self.read())
        self.server.chat([other, {**message, "content": "Fo"}], continue_final_message=True)
        self.assertTrue(self.read().endswith("<|begin|>assistant<|think|>Two and two.<|end|><|begin|>assistant<|content|>Fo<|flush|>"), self.read())

    def test_an_answer_has_its_form_after_the_thought(self):
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBERS}}
        message = self.server.chat([QUESTION], response_format=schema)["choices"][0]["message"]
        self.assertEqual((json.loads(message["content"]), message["reasoning_content"]), (MEANT, "Two and two."))
        self.assertIn("<|begin|>assistant<|content|>{", self.read())

    def test_a_call_that_must_be_made_is_a_message_after_the_thought(self):
        tool = {"type": "function", "function": {"name": "add", "parameters": NUMBERS}}
        message = self.server.chat([QUESTION], tools=[tool], tool_choice="required")["choices"][0]["message"]
        self.assertEqual([json.loads(call["function"]["arguments"]) for call in message["tool_calls"]], [MEANT])
        self.assertEqual((message["content"], message["reasoning_content"]), (None, "Two and two."))
        self.assertIn("<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>", re.sub(r"\s", "", self.read()))


class Apertus(Chain):
    """Calls are in the middle of thoughts."""
    model_of = (TEMPLATE, SPECIAL + ["<|inner_prefix|>", "<|inner_suffix|>", "<|tools_prefix|>", "<|tools_suffix|>"],
                [["<|assistant|>", "<|inner_prefix|>", "I add.", "<|tools_prefix|>", '[{"add": {"a": 1}}]', "<|tools_suffix|>", "<|end|>"],
                 ["<|result|>", "So.", "<|inner_suffix|>", "It is 3.", "<|end|>"]])

    def test_a_call_in_a_thought_is_made(self):
        for strict, arguments in ((False, {"a": 1}), (True, MEANT)):
            tool = {"type": "function", "function": {"name": "add", "parameters": NUMBERS, "strict": strict}}
            message = self.server.chat([QUESTION], tools=[tool], parallel_tool_calls=False)["choices"][0]["message"]
            self.assertEqual([json.loads(call["function"]["arguments"]) for call in message["tool_calls"]], [arguments])
            self.assertEqual((message["content"], message["reasoning_content"]), (None, "I add."))

    def test_a_begun_answer_has_the_marks_of_the_model(self):
        begun = {"role": "assistant", "content": "It is 3.", "reasoning_content": "I add."}
        self.server.chat([QUESTION, begun], continue_final_message=True)
        self.assertTrue(self.read().endswith("<|assistant|><|inner_prefix|>I add.<|inner_suffix|>It is 3.<|end|>"), self.read())


class HarmonyCalls(Chain):
    model_of = (HARMONY, CHANNELS, [["t", "<|channel|>commentary to=functions.add json<|message|>", '{"a": 1}', "<|return|>"]])

    def test_arguments_of_strict_functions_meet_their_schema(self):
        for strict, arguments in ((True, MEANT), (False, {"a": 1})):
            tool = {"type": "function", "function": {"name": "add", "parameters": NUMBERS, "strict": strict}}
            [call] = self.server.chat([QUESTION], tools=[tool])["choices"][0]["message"]["tool_calls"]
            self.assertEqual((call["function"]["name"], json.loads(call["function"]["arguments"])), ("add", arguments))


class WithoutTools(Chain):
    """A template that does not tell the model of tools: the server does."""
    model_of = (re.sub(r"\{%- if tools %\}.*?\{% endif %\}|\{%- for call in .*?\{% endfor %\}", "", TEMPLATE), SPECIAL + ["<|system|>"],
                [["<|assistant|>", "```json\n", '{"name": "add", "arguments": {"a": 1, "b": 2}}', "\n```", "<|end|>"]])

    def test_tools_are_described_and_fenced_calls_are_made(self):
        choice = self.server.chat([QUESTION], tools=TOOLS)["choices"][0]
        [call] = choice["message"]["tool_calls"]
        self.assertEqual((call["function"]["name"], json.loads(call["function"]["arguments"])), ("add", ARGUMENTS))
        self.assertIn('<|system|>You may call these functions:\n{"name":"add"', self.read())
        held = self.read()
        result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        body = self.server.chat([QUESTION, choice["message"], result], tools=TOOLS)
        self.assertGreater(body["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
        self.assertTrue(self.read().startswith(held + "<|user|>The function returned:\n3"), self.read())


class Gemma(Chain):
    # The marks of calls are control tokens, which have no text.
    model_of = (TEMPLATE, SPECIAL + ["<|tool_call>", "<tool_call|>"],
                [["<|assistant|>", "<|tool_call>", "call:add{a:1,b:2}", "<tool_call|>", "<|end|>"]])

    def test_a_call_between_control_tokens_is_made(self):
        choice = self.server.chat([QUESTION], tools=TOOLS)["choices"][0]
        [call] = choice["message"]["tool_calls"]
        self.assertEqual((call["function"]["name"], json.loads(call["function"]["arguments"])), ("add", ARGUMENTS))
        self.assertEqual((choice["finish_reason"], choice["message"]["content"]), ("tool_calls", None))


# A template that opens the thought itself, unless it is told not to. It supports neither system messages nor
# long ids.
THINKER = """\
{%- for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for call in message.tool_calls or [] %}{% if call.id|length != 9 %}{{ raise_exception('ids') }}{% endif %}[{{ call.id }}]{% endfor %}
{%- if message.role == 'tool' %}{% if message.tool_call_id|length != 9 %}{{ raise_exception('ids') }}{% endif %}[{{ message.tool_call_id }}]{% endif %}
{%- if message.reasoning_content and loop.last %}({{ message.reasoning_content }}){% endif %}
{{- '<|' + message.role + '|>' + message.content }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|><think>
{%- if enable_thinking is defined and not enable_thinking %}</think>{% endif %}{% endif %}"""
MARKS = ["<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<think>", "</think>"]


class Thoughts(Chain):
    # Marks of thoughts are found even if they are control tokens, which have no text.
    model_of = (THINKER, MARKS, [["<think>", 'Maybe <tool_call>{"name": "rm", "arguments": {}}</tool_call>? No.', "</think>",
                                  '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "<|end|>"]])

    def test_a_call_in_a_thought_is_not_made(self):
        choice = self.server.chat([QUESTION], tools=TOOLS)["choices"][0]
        self.assertEqual([call["function"]["name"] for call in choice["message"]["tool_calls"]], ["add"])
        self.assertIn("rm", choice["message"]["reasoning_content"])
        self.assertIsNone(choice["message"]["content"])

    def test_an_answer_has_its_form_after_the_thought(self):
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBERS}}
        for fields in ({}, {"enable_thinking": False}):
            message = self.server.chat([QUESTION], response_format=schema, **fields)["choices"][0]["message"]
            self.assertEqual(json.loads(message["content"]), MEANT)
            self.assertEqual("reasoning_content" in message, not fields)
        tool = {"type": "function", "function": {"name": "add", "parameters": NUMBERS}}
        message = self.server.chat([QUESTION], tools=[tool], tool_choice="required")["choices"][0]["message"]
        self.assertIn("Maybe", message["reasoning_content"])
        self.assertEqual([json.loads(call["function"]["arguments"]) for call in message["tool_calls"]], [MEANT])

    def test_thinking_can_be_switched_off(self):
        for fields in ({"enable_thinking": False}, {"reasoning_effort": "none"},
                       {"chat_template_kwargs": {"enable_thinking": False}}):
            message = self.server.chat([QUESTION], tools=TOOLS, **fields)["choices"][0]["message"]
            self.assertNotIn("reasoning_content", message)
            self.assertEqual([call["function"]["name"] for call in message["tool_calls"]], ["add"])
        body = self.server.chat([QUESTION], "/v1/messages", max_tokens=50, thinking={"type": "disabled"}, tools=ANTHROPIC_TOOLS)
        self.assertEqual([block["type"] for block in body["content"]], ["tool_use"])
        body = self.server.chat([QUESTION], "/v1/messages", max_tokens=50, tools=ANTHROPIC_TOOLS)
        self.assertEqual([block["type"] for block in body["content"]], ["thinking", "tool_use"])

    def test_any_id_of_a_call_comes_back(self):
        message = self.server.chat([QUESTION], tools=TOOLS)["choices"][0]["message"]
        call = message["tool_calls"][0]
        for other in (call["id"], "call_of_another_server"):
            asked = {"role": "user", "content": "What is 1 + 2, " + other}  # which no slot holds
            messages = [asked, {**message, "tool_calls": [{**call, "id": other}]},
                        {"role": "tool", "tool_call_id": other, "content": "3"}]
            self.server.chat(messages, tools=TOOLS)
            first, second = re.findall(r"\[(\w{9})\]", self.read())
            self.assertEqual(first, second)
            self.assertEqual(first == other, other == call["id"])

    def test_a_system_message_is_read_without_a_place_for_one(self):
        self.server.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
        self.assertTrue(self.read().startswith("<|user|>Be brief.\n\nHi<|assistant|>"), self.read())
        self.server.chat([{"role": "user", "content": "Hi"}], "/v1/messages", system="Be brief.", max_tokens=9)
        self.assertTrue(self.read().startswith("<|user|>Be brief.\n\nHi<|assistant|>"), self.read())


class Tags(Chain):
    # The template describes calls as tags, and the model begins one but would not write it to its end.
    model_of = (TEMPLATE.replace("{% endif %}", "<tool_call>\n<function=NAME>{% endif %}", 1), SPECIAL,
                [["<|assistant|>", "<tool_call>", "\n<function=add>", "<|end|>"]])
    PROPERTIES = {"n": {"type": "integer", "enum": [7]}, "word": {"type": "string", "enum": [' 3 "q"\n</parameter x>']},
                  "list": {"type": "array", "items": {"const": True}, "minItems": 2, "maxItems": 2},
                  "short": {"type": "string", "minLength": 2, "maxLength": 2}}
    MEANT = {"n": 7, "word": ' 3 "q"\n</parameter x>', "list": [True, True]}

    def ask(self, schema, name="add", strict=True, **fields):
        function = {"name": name, "strict": strict, "parameters": schema}
        return self.server.chat([QUESTION], tools=[{"type": "function", "function": function}], max_tokens=400, **fields)["choices"][0]["message"]

    def test_calls_in_tags_meet_their_schema(self):
        schema = {"type": "object", "properties": self.PROPERTIES, "required": list(self.PROPERTIES)}
        for fields in ({}, {"tool_choice": "required", "strict": False}):
            message = self.ask(schema, **fields)
            self.assertEqual(len(message["tool_calls"]), 1, message)
            call = message["tool_calls"][0]["function"]
            arguments = json.loads(call["arguments"])
            self.assertEqual((call["name"], list(arguments)), ("add", list(self.PROPERTIES)))
            self.assertEqual(len(arguments.pop("short")), 2)
            self.assertEqual(arguments, self.MEANT)
            self.assertIn("<tool_call>\n<function=add>\n<parameter=n>\n7\n</parameter>", self.read())

    def test_a_schema_that_tags_cannot_show_is_met_in_json(self):
        # In tags, a text of digits could not be told from an integer.
        day = {"type": ["string", "integer"], "minimum": 7, "maximum": 7, "pattern": "^2027-01-0[12]$"}
        schema = {"type": "object", "properties": {"day": day}, "required": ["day"]}
        message = self.ask(schema, tool_choice="required")
        self.assertRegex(message["tool_calls"][0]["function"]["arguments"], r'^\{"day": ?("2027-01-0[12]"|7)\}$')
        self.assertIn('{"name"', self.read())


class Strict:
    """Models that begin a call in their format, and would go on with something else."""
    CALL = {"type": "function", "function": {"name": "add", "strict": True, "parameters": NUMBERS}}

    def written(self):
        """The text that the slot holds, without white space, which has no meaning in these calls."""
        return re.sub(r"\s", "", self.read())

    def test_arguments_of_strict_tools_meet_their_schema(self):
        choice = self.server.chat([QUESTION], tools=[self.CALL], max_tokens=199, parallel_tool_calls=False)["choices"][0]
        [call] = choice["message"]["tool_calls"]
        self.assertEqual((call["function"]["name"], json.loads(call["function"]["arguments"])), ("add", MEANT))
        self.assertEqual(choice["message"]["content"], "I add.")
        self.assertIn(self.WRITTEN, self.written())

    def test_other_answers_are_free(self):
        message = self.server.chat([QUESTION], tools=[{**self.CALL, "function": {**self.CALL["function"], "strict": False}}], max_tokens=199)
        self.assertNotIn("tool_calls", message["choices"][0]["message"])


def strict_model(marks, wrong):
    """The model writes a text, the first mark, and then what is not a call."""
    return TEMPLATE, SPECIAL + marks, [["<|assistant|>", "I add.", marks[0], wrong, "<|end|>"]]


class StrictGemma(Strict, Chain):
    model_of = strict_model(["<|tool_call>", "<tool_call|>", '<|"|>'], "call:sub")
    WRITTEN = '<|tool_call>call:add{a:7,b:<|"|>x<|"|>}<tool_call|>'


class StrictLfm(Strict, Chain):
    model_of = strict_model(["<|tool_call_start|>", "<|tool_call_end|>"], "[sub(")
    WRITTEN = '<|tool_call_start|>[add(a=7,b="x")]<|tool_call_end|>'


class StrictDeepSeek(Strict, Chain):
    model_of = strict_model(["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"], "sub")
    WRITTEN = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a":7,"b":"x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'


class StrictKimi(Strict, Chain):
    model_of = strict_model(["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
                             "<|tool_call_end|>"], "sub")
    WRITTEN = '<|tool_call_argument_begin|>{"a":7,"b":"x"}<|tool_call_end|><|tool_calls_section_end|>'


class ForcedAsWritten:
    """A forced call has the form of the template, WRITTEN."""

    def test_a_call_that_must_be_made_is_written_as_the_template_does(self):
        function = {"name": "add", "parameters": NUMBERS}
        message = self.server.chat([QUESTION], tools=[{"type": "function", "function": function}], tool_choice="required", max_tokens=199)
        [call] = message["choices"][0]["message"]["tool_calls"]
        self.assertEqual(json.loads(call["function"]["arguments"]), MEANT)
        self.assertIn(self.WRITTEN, self.written())


def listed(mark, close, call):
    """A template that writes calls as a list of JSON between marks."""
    return re.sub(r"\{%- for call in .*?\{% endfor %\}", "{%- if message.tool_calls %}" + mark + "[{% for call in message.tool_calls %}" + call
                  + "{% if not loop.last %}, {% endif %}{% endfor %}]" + close + "{% endif %}", TEMPLATE)


class StrictMistral(ForcedAsWritten, Strict, Chain):
    CALLED = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    model_of = (listed("[TOOL_CALLS]", "", CALLED), *strict_model(["[TOOL_CALLS]"], "[sub")[1:])
    WRITTEN = '[TOOL_CALLS][{"name":"add","arguments":{"a":7,"b":"x"},"id":"'


class StrictCommand(StrictMistral):
    CALLED = '{"tool_call_id": "0", "tool_name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
    model_of = (listed("<|START_ACTION|>", "<|END_ACTION|>", CALLED), *strict_model(["<|START_ACTION|>", "<|END_ACTION|>"], "[sub")[1:])
    WRITTEN = '"tool_name":"add","parameters":{"a":7,"b":"x"}}]<|END_ACTION|>'


class Granite(StrictMistral):
    # The template mentions the mark, and writes calls without one.
    model_of = (TEMPLATE.replace("<|tools|>", "<|tools|><|tool_call|>", 1), *strict_model(["<|tool_call|>"], "[sub")[1:])
    WRITTEN = '<|tool_call|>[{"name":"add","arguments":{"a":7,"b":"x"}}]'


class Functionary(Chain):
    # The prompt ends with the mark of a call.
    model_of = (TEMPLATE.replace("<call>{{ call.function | tojson }}", ">>>{{ call.function.name }}\n{{ call.function.arguments | tojson }}")
                .replace("<|assistant|>'", "<|assistant|>>>>'"), SPECIAL, [[">", "all\n", "I add.", ">>>", "add\n", "{}", "<|end|>"]])
    TOOL = {"type": "function", "function": {"name": "add", "parameters": NUMBERS}}

    def ask(self, strict=False, **fields):
        tool = {**self.TOOL, "function": {**self.TOOL["function"], "strict": strict}}
        message = self.server.chat([QUESTION], tools=[tool], parallel_tool_calls=False, **fields)["choices"][0]["message"]
        return message["content"], [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", [])]

    def test_answers_have_recipients(self):
        self.assertEqual(self.ask(), ("I add.", [{}]))
        self.assertEqual(self.ask(strict=True), ("I add.", [MEANT]))
        self.assertEqual(re.sub(r"\s", "", self.read()).split("<|assistant|>")[1], '>>>allIadd.>>>add{"a":7,"b":"x"}<|end|>')
        self.assertEqual(self.ask(tool_choice="required"), (None, [MEANT]))
        self.assertIn("<|assistant|>>>>add\n{", self.read())
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBERS}}
        content, calls = self.ask(response_format=schema)
        self.assertEqual((json.loads(content), calls), (MEANT, []))
        self.assertIn("<|assistant|>>>>all\n{", self.read())


class FunctionaryCalls(Functionary):
    # The answer is a call alone.
    model_of = (*Functionary.model_of[:2], [[">", "add\n", "{}", "<|end|>"]])

    def test_answers_have_recipients(self):
        self.assertEqual(self.ask(), (None, [{}]))
        self.assertEqual(self.ask(strict=True), (None, [MEANT]))


GLM = (TEMPLATE.replace("<call>{{ call.function | tojson }}", "<tool_call>{{ call.function.name }}"
                        "{% for k, v in call.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>"))


class WithoutQuotes:
    def test_a_strict_schema_that_the_format_cannot_show_is_refused_by_its_place(self):
        schema = {"type": "object", "properties": {"day": {"type": ["string", "integer"]}}, "required": ["day"]}
        for strict, expected in (True, 400), (False, 200):
            tool = {"type": "function", "function": {"name": "add", "strict": strict, "parameters": schema}}
            status, _, body = self.server.ask("POST", "/v1/chat/completions", {"messages": [QUESTION], "tools": [tool]})
            self.assertEqual(status, expected)
            if strict:
                self.assertIn('"add" cannot be called in this model\'s format: #/properties/day allows values of several types', body["error"]["message"])


class StrictGlm(WithoutQuotes, ForcedAsWritten, Strict, Chain):
    model_of = (GLM, *strict_model(["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"], "sub")[1:])
    WRITTEN = "<tool_call>add<arg_key>a</arg_key><arg_value>7</arg_value><arg_key>b</arg_key><arg_value>x</arg_value></tool_call>"


class StrictMiniMax(WithoutQuotes, ForcedAsWritten, Strict, Chain):
    TAG = "]<]minimax[>["
    MINIMAX = TEMPLATE.replace("<call>{{ call.function | tojson }}", TAG + '<tool_call>\n' + TAG + '<invoke name="{{ call.function.name }}">'
                               + TAG + "</invoke>\n" + TAG + "</tool_call>")
    model_of = (MINIMAX, SPECIAL + [TAG], [["<|assistant|>", "I add.", TAG, "<tool_call>sub", "<|end|>"]])
    WRITTEN = TAG + '<invokename="add">' + f"{TAG}<a>7{TAG}</a>{TAG}<b>x{TAG}</b>{TAG}</invoke>{TAG}</tool_call>"


class ThoughtsWithDrafts(Thoughts):
    flags = ("--draft", "lookup", "--draft-max", "3")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
