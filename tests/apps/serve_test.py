"""Tests thimble serve from a client's side: serve_test.py COMMAND SOURCE_FOLDER"""
import http.client
import json
import re
import resource
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import unittest

from serve_client import BOOK, HEADS, MODEL, SOURCE, Server, drain, events, thimble

BUDGET = 64 << 20
# In addition to the budget, the process holds its program's own data, requests that are being read, and 256
# connections.
BESIDE = 32 << 20
LEAVERS = 3
QUESTION = "Sylvia works in Bergen. In which city does Sylvia work?"
POLICY = ["--device", "cpu", "--heads", HEADS, "--pool", "1024"]


def user(text):
    return {"role": "user", "content": text}


def long_request(stream=True, name=""):
    """A request whose text takes many seconds to read. With another name it is read from the start."""
    return {"messages": [user(name + BOOK + "\n\nWhat is this?")], "stream": stream}


def read_until(connection, done):
    """Returns the bytes that come until done() is true of them, which must be before the end."""
    got = b""
    while not done(got):
        piece = connection.recv(4096)
        assert piece, "the connection ended"
        got += piece
    return got


def content(lines):
    return "".join(e["choices"][0]["delta"].get("content", "") for e in events(lines) if e != "[DONE]" and e["choices"])


class Answers(unittest.TestCase):
    """Tests that leave the server unchanged and share one."""

    @classmethod
    def setUpClass(cls):
        cls.server = Server(*POLICY, "--mem-budget", "64MiB")

    @classmethod
    def tearDownClass(cls):
        assert cls.server.anonymous_bytes() < BUDGET + BESIDE, cls.server.anonymous_bytes()
        assert cls.server.stop()[0] == 0

    def test_answers_are_those_of_the_command(self):
        text = BOOK[:9000] + "\n\nWho is in the house?"  # twice the pool, so that entries are evicted
        for prompt in (QUESTION, text):
            expected = thimble("run", "-m", MODEL, *POLICY, "-f", "-", text=prompt)
            body = self.server.chat(prompt)
            self.assertEqual(body["choices"][0]["message"]["content"] + "\n", expected)
            self.assertEqual(body["choices"][0]["finish_reason"], "stop")
            self.assertEqual(content(self.server.stream({"messages": [user(prompt)]})) + "\n", expected)

    def test_a_conversation_goes_on_as_in_chat_and_reads_new_text_only(self):
        turns = ["Sylvia works in Bergen. In which city does Sylvia work?", "Harriet keeps the telescope in the attic.",
                 "Where does Harriet keep the telescope?"]
        # `thimble chat` writes each answer on a line if its output is not a terminal.
        expected = thimble("chat", "-m", MODEL, *POLICY, text="\n".join(turns) + "\n").split("\n")
        messages, before = [], 0
        for turn, answer in zip(turns, expected):
            messages.append(user(turn))
            body = self.server.chat(messages)
            message = body["choices"][0]["message"]
            self.assertEqual(message["content"], answer)
            self.assertEqual(body["usage"]["prompt_tokens_details"]["cached_tokens"], before)
            before = body["usage"]["total_tokens"]
            messages.append(message)

    def test_two_conversations_go_on_from_one(self):
        first = [user("Edgar likes quinces. What does Edgar like?")]
        answer = self.server.chat(first)
        held = answer["usage"]["total_tokens"]
        first.append(answer["choices"][0]["message"])
        one, two = first + [user("Who likes quinces?")], first + [user("What is a quince?")]
        for messages in (one, two):
            body = self.server.chat(messages)
            self.assertEqual(body["usage"]["prompt_tokens_details"]["cached_tokens"], held)
            messages.append(body["choices"][0]["message"])

    def test_a_stream_has_one_reason_then_the_usage_then_its_end(self):
        lines = self.server.stream({"messages": [user(QUESTION)], "stream_options": {"include_usage": True}})
        got = events(lines)
        self.assertEqual(got[-1], "[DONE]")
        self.assertEqual(got.count("[DONE]"), 1)
        reasons = [e["choices"][0]["finish_reason"] for e in got[:-2]]
        self.assertEqual(reasons[-1], "stop")
        self.assertEqual(set(reasons[:-1]), {None})
        self.assertEqual(got[-2]["choices"], [])
        self.assertEqual(got[-2]["usage"]["completion_tokens"], 4)  # "In Bergen.": three tokens and the end
        self.assertEqual(got[0]["choices"][0]["delta"], {"role": "assistant", "content": ""})

    def test_stops_and_lengths(self):
        for stop in ("gen", ["nowhere", "gen"]):
            body = self.server.chat(QUESTION, stop=stop)
            self.assertEqual(body["choices"][0]["message"]["content"], "In Ber")
            self.assertEqual(body["choices"][0]["finish_reason"], "stop")
        for name in ("max_tokens", "max_completion_tokens"):
            body = self.server.chat(QUESTION, **{name: 2})
            self.assertEqual(body["choices"][0]["message"]["content"], "In Bergen")
            self.assertEqual(body["choices"][0]["finish_reason"], "length")
            self.assertEqual(body["usage"]["completion_tokens"], 2)

    def test_seeds_decide_what_is_sampled(self):
        def sample(seed):
            body = {"prompt": "The house", "max_tokens": 12, "temperature": 1.5, "top_p": 1, "seed": seed}
            return self.server.ask("POST", "/v1/completions", body)[2]["choices"][0]["text"]

        self.assertEqual(sample(1), sample(1))
        self.assertNotEqual(len({sample(seed) for seed in range(4)}), 1)

    def test_sampling_is_what_a_request_says(self):
        def text(**fields):
            body = {"prompt": "Once upon a time", "max_tokens": 30, "temperature": 1.5, "top_p": 1, "top_k": 0, "min_p": 0, **fields}
            return self.server.ask("POST", "/v1/completions", body)[2]["choices"][0]["text"]

        greedy = text(temperature=0)
        self.assertNotEqual(text(seed=1), greedy)
        for only in ({"top_k": 1}, {"min_p": 1}):
            self.assertEqual(text(seed=1, **only), greedy)
        self.assertIn("had been very kind to him, and had been", greedy)
        self.assertNotIn("had been very", text(temperature=0, repeat_penalty=1.5))
        self.assertEqual(text(temperature=0, repetition_penalty=1.5), text(temperature=0, repeat_penalty=1.5))
        self.assertEqual(text(temperature=0, repeat_penalty=1.5, repeat_last_n=0), greedy)
        for penalty in ({"presence_penalty": 2}, {"frequency_penalty": 2}):
            self.assertNotIn("had been very", text(temperature=0, **penalty))
        self.assertNotEqual(text(temperature=0, presence_penalty=2), text(temperature=0, frequency_penalty=2))

    def test_penalties_do_not_depend_on_what_a_slot_read_before(self):
        def answer(messages):
            body = self.server.chat(messages, max_tokens=24, temperature=0, repeat_penalty=1.5, repeat_last_n=4096, presence_penalty=0.5,
                                    frequency_penalty=0.5)
            return body["choices"][0]["message"], body["usage"]["prompt_tokens_details"]["cached_tokens"]

        first = [user("Sylvia works in Bergen. In which city does Sylvia work?")]
        longer = [*first, answer(first)[0], user("In which city does Sylvia work now, and in which did Sylvia work?")]
        text, cached = answer(longer)
        self.assertGreater(cached, 20)
        for other in ("The house stood on a hill.", "A dog and a cat went out.", "It rained."):  # in every slot
            answer([user(other)])
        self.assertEqual(answer(longer), (text, 0))

    def test_penalties_count_the_tokens_of_the_answer_alone(self):
        first = [user("Who lives here?")]
        second = [*first, self.server.chat(first, max_tokens=30)["choices"][0]["message"], user("Who lives here?")]
        fields = {"max_tokens": 30, "presence_penalty": 2, "frequency_penalty": 2}
        continued = self.server.chat(second, **fields)
        other = Server(*POLICY, "--slots", "1")
        read = other.chat(second, **fields)
        self.assertGreater(continued["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
        self.assertEqual(read["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
        self.assertEqual(read["choices"], continued["choices"])
        self.assertEqual(other.stop()[0], 0)

    def test_tokens_end_an_answer_or_do_not(self):
        ids = self.server.ask("POST", "/tokenize", {"content": "In Bergen."})[2]["tokens"]
        body = self.server.chat(QUESTION, stop_token_ids=[ids[1], 0])
        self.assertEqual(body["choices"][0]["message"]["content"], "In")
        self.assertEqual((body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]), ("stop", 2))
        body = self.server.chat(QUESTION, ignore_eos=True, max_tokens=20)
        self.assertTrue(body["choices"][0]["message"]["content"].startswith("In Bergen."))
        self.assertEqual((body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]), ("length", 20))

    def test_forms_have_the_names_that_other_servers_give_them(self):
        digits = {"regex": "[0-9]{3}", "choice": ["123", "4\"5\n"], "json": {"enum": [123]}, "grammar": "root ::= [0-9] [0-9] [0-9]"}
        for name, form in digits.items():
            for fields in ({"guided_" + name: form}, {"structured_outputs": {name: form}}):
                said = self.server.chat(QUESTION, **fields)["choices"][0]["message"]["content"]
                self.assertRegex(said, r'^(\d{3}|4"5\n)$', fields)

    def test_completions_are_those_of_the_command_with_probabilities(self):
        expected = thimble("run", "-m", MODEL, *POLICY, "--raw", "-p", "The house", "-n", "5")
        body = {"prompt": "The house", "max_tokens": 5, "logprobs": 2}
        choice = self.server.ask("POST", "/v1/completions", body)[2]["choices"][0]
        self.assertEqual(choice["text"] + "\n", expected)
        probabilities = choice["logprobs"]
        self.assertEqual("".join(probabilities["tokens"]), choice["text"])
        for token, own, top in zip(probabilities["tokens"], probabilities["token_logprobs"], probabilities["top_logprobs"]):
            self.assertEqual(own, max(top.values()))  # greedy
            self.assertEqual(top[token], own)
            self.assertLess(own, 0)
        ids = self.server.ask("POST", "/tokenize", {"content": "The house", "add_special": True})[2]["tokens"]
        self.assertEqual(ids, [int(i) for i in thimble("tokenize", "-m", MODEL, "-p", "The house").split()])
        again = self.server.ask("POST", "/v1/completions", {"prompt": ids, "max_tokens": 5})[2]["choices"][0]
        self.assertEqual(again["text"], choice["text"])

    def test_messages_as_anthropic_writes_them(self):
        body = self.server.chat(QUESTION, path="/v1/messages", max_tokens=20)
        self.assertEqual(body["content"], [{"type": "text", "text": "In Bergen."}])
        self.assertEqual(body["stop_reason"], "end_turn")
        lines = self.server.stream({"messages": [user(QUESTION)], "max_tokens": 20}, "/v1/messages")
        names = [line[7:] for line in lines if line.startswith("event: ")]
        self.assertEqual(names[:2], ["message_start", "content_block_start"])
        self.assertEqual(set(names[2:-3]), {"content_block_delta"})
        self.assertEqual(names[-3:], ["content_block_stop", "message_delta", "message_stop"])
        status, _, error = self.server.ask("POST", "/v1/messages", {"messages": [user("a")]})
        self.assertEqual((status, error["type"], error["error"]["type"]), (400, "error", "invalid_request_error"))

    def test_responses_are_those_of_chat_completions(self):
        status, _, body = self.server.ask("POST", "/v1/responses", {"input": QUESTION})
        self.assertEqual((status, body["object"], body["status"]), (200, "response", "completed"), body)
        [item] = body["output"]
        self.assertEqual((item["type"], item["role"], item["content"][0]["text"]), ("message", "assistant", "In Bergen."))
        self.assertEqual((body["usage"]["output_tokens"], body["usage"]["total_tokens"]), (4, body["usage"]["input_tokens"] + 4))
        got = events(self.server.stream({"input": [user(QUESTION)]}, "/v1/responses"))
        self.assertEqual([event["sequence_number"] for event in got], list(range(len(got))))
        self.assertEqual([event["type"][9:] for event in got if event["type"] != "response.output_text.delta"],
                         ["created", "in_progress", "output_item.added", "content_part.added", "output_text.done",
                          "content_part.done", "output_item.done", "completed"])
        self.assertEqual("".join(e["delta"] for e in got if e["type"] == "response.output_text.delta"), "In Bergen.")
        self.assertEqual(got[-1]["response"]["output"][0]["content"], item["content"])
        # The conversation goes on: the client sends all items again, and only the new text is read.
        held = body["usage"]["total_tokens"]
        again = [user(QUESTION), item, user("Where is that?")]
        body = self.server.ask("POST", "/v1/responses", {"input": again})[2]
        self.assertEqual(body["usage"]["input_tokens_details"]["cached_tokens"], held)
        body = self.server.ask("POST", "/v1/responses", {"input": QUESTION, "max_output_tokens": 2})[2]
        self.assertEqual((body["status"], body["incomplete_details"]), ("incomplete", {"reason": "max_output_tokens"}))
        self.assertEqual(body["output"][0]["content"][0]["text"], "In Bergen")
        for fields, words in (({"previous_response_id": "resp_1"}, "stores no responses"), ({"input": []}, "input"),
                              ({"tools": [{"type": "web_search"}]}, "runs no tools"), ({"background": True}, "background"),
                              ({"messages": [user("a")]}, "messages"), ({"input": [{"type": "item_reference", "id": "a"}]}, "item_reference")):
            status, _, error = self.server.ask("POST", "/v1/responses", {"input": QUESTION, **fields})
            self.assertEqual(status, 400, fields)
            self.assertIn(words, error["error"]["message"])

    def test_embeddings_are_refused_clearly(self):
        status, _, error = self.server.ask("POST", "/v1/embeddings", {"input": "a", "model": "any"})
        self.assertEqual((status, error["error"]["type"]), (400, "invalid_request_error"))
        self.assertIn("makes no embeddings", error["error"]["message"])

    def test_several_answers_are_those_of_their_seeds(self):
        fields = {"max_tokens": 8, "temperature": 1.5, "top_p": 1}
        body = {"prompt": "The house", **fields}
        alone = [self.server.ask("POST", "/v1/completions", {**body, "seed": seed})[2]["choices"][0] for seed in (5, 6, 7)]
        whole = self.server.ask("POST", "/v1/completions", {**body, "seed": 5, "n": 3})[2]
        self.assertEqual([choice["text"] for choice in whole["choices"]], [choice["text"] for choice in alone])
        self.assertEqual([choice["index"] for choice in whole["choices"]], [0, 1, 2])
        self.assertGreater(len({choice["text"] for choice in alone}), 1)
        got = [e["choices"][0] for e in events(self.server.stream({**body, "seed": 5, "n": 3}, "/v1/completions")) if e != "[DONE]"]
        for i, choice in enumerate(alone):
            mine = [c for c in got if c["index"] == i]
            self.assertEqual("".join(c["text"] for c in mine), choice["text"])
            self.assertEqual([c["finish_reason"] for c in mine if c["finish_reason"]], [choice["finish_reason"]])
        # In a conversation, each answer goes on from the same prompt, also if entries are evicted.
        text = BOOK[:9000] + "\n\nWho is in the house?"
        for prompt in (QUESTION, text):
            alone = [self.server.chat(prompt, seed=seed, **fields)["choices"][0]["message"] for seed in (5, 6)]
            body = self.server.chat(prompt, seed=5, n=2, **fields)
            self.assertEqual([choice["message"] for choice in body["choices"]], alone)
            self.assertEqual(content(self.server.stream({"messages": [user(prompt)], "seed": 5, "n": 2, **fields})),
                             "".join(message["content"] for message in alone))

    def test_biases_forbid_and_force_tokens(self):
        [bergen] = self.server.ask("POST", "/tokenize", {"content": " Bergen"})[2]["tokens"]
        [oslo] = self.server.ask("POST", "/tokenize", {"content": " Oslo"})[2]["tokens"][:1]
        self.assertNotIn("Bergen", self.server.chat(QUESTION, logit_bias={str(bergen): -100})["choices"][0]["message"]["content"])
        self.assertEqual(self.server.chat(QUESTION)["choices"][0]["message"]["content"], "In Bergen.")  # the next is free of it
        forced = self.server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 3, "logit_bias": {str(oslo): 100}})[2]
        self.assertEqual(self.server.ask("POST", "/tokenize", {"content": forced["choices"][0]["text"]})[2]["tokens"], [oslo] * 3)
        status, _, error = self.server.ask("POST", "/v1/completions", {"prompt": "a", "logit_bias": {"99999999": 1}})
        self.assertEqual(status, 400)
        self.assertIn("99999999", error["error"]["message"])

    def test_answers_with_a_form_are_those_of_the_command(self):
        schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}, "sure": {"type": "boolean"}},
                  "required": ["city", "sure"], "additionalProperties": False}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(schema, file)
            file.flush()
            expected = thimble("run", "-m", MODEL, *POLICY, "--json-schema", file.name, "-p", QUESTION)
        self.assertEqual(set(json.loads(expected)), {"city", "sure"})
        form = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
        self.assertEqual(self.server.chat(QUESTION, **form)["choices"][0]["message"]["content"] + "\n", expected)
        self.assertEqual(content(self.server.stream({"messages": [user(QUESTION)], **form})) + "\n", expected)
        # The next turn is free of it, and so is a request that continues the conversation.
        messages = [user(QUESTION), {"role": "assistant", "content": expected}, user(QUESTION)]
        self.assertNotIn("{", self.server.chat(messages)["choices"][0]["message"]["content"])
        for seed in range(5):  # any sampled text meets it
            text = self.server.chat(QUESTION, seed=seed, temperature=2, top_k=0, top_p=1, **form)["choices"][0]["message"]["content"]
            self.assertIn(json.loads(text)["sure"], (True, False))

    def test_two_at_once_get_what_each_would_alone(self):
        questions = [BOOK[:4000] + "\n\nWho is in the house?", BOOK[9000:13000] + "\n\nWhere is the garden?"]
        alone = [self.server.chat(q)["choices"][0]["message"]["content"] for q in questions]
        together = [None, None]

        def ask(i):
            together[i] = content(self.server.stream({"messages": [user(questions[i])]}))

        threads = [threading.Thread(target=ask, args=(i,)) for i in (0, 1)]
        blocking = [self.server.begin(long_request()) for _ in threads]
        self.server.wait_until(lambda state: all(slot["busy"] for slot in state["slots"]))
        for thread in threads:
            thread.start()
        self.server.wait_until(lambda state: state["queue"]["waiting"] == 2)
        for connection in blocking:  # now both begin together
            connection.close()
        for thread in threads:
            thread.join()
        self.assertEqual(together, alone)

    def test_a_closed_connection_stops_the_prefill_within_a_tenth_of_a_second(self):
        # Only the quickest case counts: other programs can delay a thread, but nothing makes it faster.
        # docs/server.md has the printed times.
        times = []
        for i in range(LEAVERS):
            connection = self.server.begin(long_request(name=str(i)))
            read_until(connection, lambda got: b": reading " in got)
            self.assertEqual(self.server.busy(), 1)
            start = time.monotonic()
            self.assertEqual(self.server.ask("GET", "/health")[2], {"status": "ok"})
            self.assertEqual(self.server.busy(), 1)  # while it reads
            connection.close()
            times.append(self.server.wait_until(lambda state: not any(slot["busy"] for slot in state["slots"])))
        print(f"{len(times)} readings stopped after {statistics.median(times):.3f} s (median), {max(times):.3f} s at worst")
        self.assertLess(min(times), 0.1, times)

    def test_a_stream_lives_while_a_text_is_read(self):
        with self.server.begin(long_request()) as connection:
            start = time.monotonic()
            pattern = re.compile(rb": reading (\d+)/(\d+)\n")
            comments = pattern.findall(read_until(connection, lambda got: len(pattern.findall(got)) >= 3))
        self.assertLess(time.monotonic() - start, 30)  # each second, and more where other programs are in the way
        done = [int(d) for d, _ in comments]
        self.assertEqual(done, sorted(done))
        self.assertEqual({int(t) > 57000 for _, t in comments}, {True})

    def test_wrong_requests_get_one_sentence(self):
        message = {"messages": [user("a")]}
        wrong = [("{", 400), ("[]", 400), ("null", 400), ("", 400), (b'{"messages": "\xff\xfe"}', 400),
                 ('{"messages": "\\ud800"}', 400), ("[" * 100000, 400), ({"messages": []}, 400), ({"messages": [1]}, 400),
                 ({**message, "n": 17}, 400), ({**message, "temperature": "warm"}, 400), ({**message, "temperature": -1}, 400),
                 ({**message, "max_tokens": 0}, 400), ({**message, "max_tokens": 1e400}, 400), ({**message, "stop": [1]}, 400),
                 ({**message, "logit_bias": {"1": 101}}, 400), ({**message, "top_logprobs": 2}, 400),
                 ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
                 ('{"messages": [' + "0," * 300000 + "0]}", 400)]
        for body, expected in wrong:
            data = body if isinstance(body, (str, bytes)) else json.dumps(body)
            status, _, error = self.server.ask("POST", "/v1/chat/completions", data)
            self.assertEqual(status, expected, data[:80])
            self.assertEqual(set(error["error"]), {"message", "type", "param", "code"})
            self.assertEqual(error["error"]["type"], "invalid_request_error")
        self.assertEqual(self.server.ask("POST", "/v1/completions", {"prompt": [99999999]})[0], 400)
        self.assertEqual(self.server.ask("GET", "/nowhere")[0], 404)
        status, headers, _ = self.server.ask("GET", "/v1/chat/completions")
        self.assertEqual((status, headers["Allow"]), (405, "POST"))

    def test_pages_of_other_origins_are_refused(self):
        port = self.server.port
        cases = [({"Host": "evil.example"}, 403), ({"Host": f"evil.example:{port}"}, 403), ({"Host": "localhost"}, 200),
                 ({"Host": f"127.0.0.1:{port}"}, 200), ({"Host": f"[::1]:{port}"}, 200), ({"Host": "LocalHost"}, 200),
                 ({"Host": "localhost", "Origin": "http://evil.example"}, 403), ({"Host": "localhost", "Origin": "null"}, 403),
                 ({"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}, 200),
                 ({"Host": f"localhost:{port}", "Origin": "http://localhost:1"}, 403), ({"Host": ""}, 403)]
        for headers, expected in cases:
            self.assertEqual(self.server.ask("GET", "/health", headers=headers)[0], expected, headers)

    def test_a_body_too_large_is_refused_before_it_is_sent(self):
        with self.server.connect() as connection:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1073741824\r\n\r\n{")
            self.assertTrue(drain(connection).startswith(b"HTTP/1.1 413 "))

    def test_a_body_too_large_in_chunks_is_refused(self):
        with self.server.connect() as connection:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            try:
                for _ in range(20):
                    connection.sendall(b"100000\r\n" + b"a" * (1 << 20) + b"\r\n")
            except ConnectionError:
                pass
            self.assertTrue(drain(connection).startswith(b"HTTP/1.1 413 "))

    def test_headers_without_end_are_refused(self):
        with self.server.connect() as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
            try:
                for i in range(4000):
                    connection.sendall(b"X-Header-%d: value\r\n" % i)
            except ConnectionError:
                pass
            self.assertTrue(drain(connection).startswith(b"HTTP/1.1 431 "))

    def test_a_connection_serves_many_requests_in_turn(self):
        request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        last = request[:-2] + b"Connection: close\r\n\r\n"
        with self.server.connect() as connection:
            connection.sendall(request * 2 + last)
            self.assertEqual(drain(connection).count(b"200 OK"), 3)

    def statuses(self, request, half=False):
        """Returns the statuses of all answers to these bytes. Bytes in a body that look like a second request must get no answer."""
        with self.server.connect(timeout=5) as connection:
            try:
                connection.sendall(request)
                if half:
                    connection.shutdown(socket.SHUT_WR)
            except ConnectionError:
                pass
            return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", drain(connection))]

    def test_ambiguous_requests_are_refused(self):
        hidden = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        length = b"Content-Length: %d\r\n" % len(hidden)
        for fields, expected in (
                (b"Transfer-Encoding: gzip\r\n", 501), (b"Transfer-Encoding: gzip, chunked\r\n", 501),
                (b"Transfer-Encoding: identity\r\n", 501), (b"Transfer-Encoding: chunked, chunked\r\n", 501),
                (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", 400),
                (b"Transfer-Encoding: xchunked\r\n", 501), (b"Transfer-Encoding: \x0bchunked\r\n", 400),
                (length + b"Transfer-Encoding: chunked\r\n", 400), (b"Transfer-Encoding: chunked\r\n" + length, 400),
                (length + b"Content-Length: 0\r\n", 400), (length * 2, 400), (b"Content-Length: 0, 0\r\n", 400),
                (b"Content-Length: +5\r\n", 400), (b"Content-Length: -1\r\n", 400), (b"Content-Length: 0x5\r\n", 400),
                (b"Content-Length: 5 5\r\n", 400), (b"Content-Length:\r\n", 400), (b"Content-Length : 5\r\n", 400),
                (b"Content-Length: 99999999999999999999999\r\n", 400), (b"Content-Length: 0\r\n " + length, 400),
                (b"Host: localhost\r\n", 400), (b"X: a\r\n b\r\n", 400), (b"X: a\r\n\tb\r\n", 400), (b" X: a\r\n", 400),
                (b"X: a\nY: b\r\n", 400), (b"X: a\rY: b\r\n", 400), (b"X: a\0b\r\n", 400), (b"X\r\n", 400), (b": a\r\n", 400)):
            request = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + fields + b"\r\n" + hidden
            self.assertEqual(self.statuses(request), [expected], fields)
        for request, expected in (
                (b"GET /health HTTP/1.1\r\n\r\n", 400), (b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n", 400),
                (b"GET /health HTTP/1.1\nHost: localhost\n\n", 400), (b"GET  /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
                (b"POST /tokenize HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", 400)):
            self.assertEqual(self.statuses(request + hidden), [expected], request)
        chunked = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        for chunks in (b"zz\r\n", b"-1\r\n", b"2\n{}\r\n0\r\n\r\n", b"2\r\n{}0\r\n\r\n", b"2 2\r\n{}\r\n0\r\n\r\n",
                       b"fffffffffffffffff\r\n{}\r\n0\r\n\r\n", b"2;a\nb\r\n{}\r\n0\r\n\r\n"):
            self.assertIn(self.statuses(chunked + chunks + hidden), ([400], [413]), chunks)

    def test_unusual_but_valid_requests_are_read_correctly(self):
        last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        chunked = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: Chunked\r\n\r\n"
        for request in (chunked + b'd;name="v"\r\n{"content": "\r\n3\r\na"}\r\n0\r\nX: a\r\n\r\n', b"\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
                        b"GET http://localhost:1/health?a HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"GET HTTP://localhost HTTP/1.1\r\nHost: a\r\n\r\n"):
            self.assertEqual(self.statuses(request + last), [200, 200], request)
        self.assertEqual(self.statuses(b"GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\n\r\n" + last), [403, 200])

    def test_a_client_that_closed_its_sending_side_gets_its_answers(self):
        data = json.dumps({"messages": [user(QUESTION)]}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        request = head % len(data) + data
        self.assertEqual(self.statuses(request, half=True), [200])
        self.assertEqual(self.statuses(request * 2, half=True), [200, 200])
        stream = json.dumps({"messages": [user(QUESTION)], "stream": True}).encode()
        with self.server.connect() as connection:
            connection.sendall(head % len(stream) + stream)
            connection.shutdown(socket.SHUT_WR)
            got = drain(connection)
        self.assertTrue(got.startswith(b"HTTP/1.1 200 OK\r\n"), got)
        self.assertIn(b"data: [DONE]\n\n", got)

    def test_a_lost_connection_also_stops_an_answer_that_is_not_streamed(self):
        with self.server.begin(long_request(stream=False)):
            self.server.wait_until(lambda state: any(slot["busy"] for slot in state["slots"]))
        self.server.wait_until(lambda state: not any(slot["busy"] for slot in state["slots"]), 5)

    def test_an_older_client_gets_a_stream_without_chunks(self):
        data = json.dumps({"messages": [user(QUESTION)], "stream": True}).encode()
        with self.server.connect(timeout=600) as connection:  # the end is that of the connection
            connection.sendall(b"POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            head, body = drain(connection).split(b"\r\n\r\n", 1)
        self.assertNotIn(b"chunked", head)
        self.assertTrue(body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n"), body)

    def test_a_client_that_expects_100_continue_gets_it(self):
        data = json.dumps({"messages": [user(QUESTION)]}).encode()
        with self.server.connect() as connection:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
                               b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(data))
            self.assertEqual(connection.recv(100), b"HTTP/1.1 100 Continue\r\n\r\n")
            connection.sendall(data)
            self.assertIn(b"In Bergen.", drain(connection))

    def test_two_hundred_connections_are_held_and_too_many_turned_away(self):
        connections = [self.server.connect() for _ in range(200)]
        self.assertEqual(self.server.ask("GET", "/health")[0], 200)
        connections += [self.server.connect() for _ in range(80)]
        self.assertTrue(drain(connections[-1]).startswith(b"HTTP/1.1 503 "))
        for connection in connections:
            connection.close()

        def answers():
            try:
                return self.server.ask("GET", "/health")[0] == 200
            except (ConnectionError, http.client.HTTPException):
                return False

        deadline = time.monotonic() + 20  # for the server to see that they are closed
        while not answers():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)

    def test_what_a_slot_holds_is_shown_by_sentence_and_by_head(self):
        text = BOOK[:9000]
        body = self.server.chat(text + "\n\nWho is in the house?")
        slot = self.server.state()["last"]
        held = self.server.get(f"/thimble/kept?slot={slot}")
        segments = held["segments"]
        self.assertEqual((held["slot"], held["position"]), (slot, body["usage"]["total_tokens"]))
        self.assertEqual([s["first"] for s in segments[1:]], [s["first"] + s["count"] for s in segments[:-1]])
        self.assertEqual(segments[-1]["first"] + segments[-1]["count"], held["position"])
        self.assertIn(text + "\n\nWho is in the house?", "".join(s["text"] for s in segments))
        self.assertEqual({s["attended"] for s in segments}, {None})
        for segment in (segments[0], segments[20], segments[-1]):
            part = f"&first={segment['first']}&count={segment['count']}"
            heads = self.server.get(f"/thimble/kept?slot={slot}{part}")["heads"]
            self.assertEqual({len(heads), *map(len, heads)}, {held["layers"], held["kv_heads"]})
            shares = sum(heads, [])
            self.assertAlmostEqual(sum(shares) / len(shares), segment["kept"], 6)
        self.assertTrue(0 < segments[20]["kept"] < 1)  # heads differ
        # Reading the state changes nothing: the conversation continues after its answer.
        messages = [user(text + "\n\nWho is in the house?"), body["choices"][0]["message"], user("Where is the garden?")]
        self.assertEqual(self.server.chat(messages)["usage"]["prompt_tokens_details"]["cached_tokens"], held["position"])
        for query in ("", "slot=2", "slot=-1", "slot=a", "slot=0&first=0", "slot=0&first=0&count=0",
                      f"slot={slot}&first=0&count=99999", "slot=0&first=18446744073709551615&count=2"):
            status, _, error = self.server.ask("GET", "/thimble/kept?" + query)
            self.assertEqual(status, 400, query)
            self.assertTrue(error["error"]["message"])

    def test_a_watched_answer_is_the_same_and_says_what_it_attended_to(self):
        prompt = BOOK[:16000] + "\n\nWhat is the door code of the Lisbon warehouse?"
        expected = thimble("run", "-m", MODEL, *POLICY, "-f", "-", text=prompt)
        self.assertEqual(self.server.chat(prompt, watch=True)["choices"][0]["message"]["content"] + "\n", expected)
        self.assertEqual(expected, "40917\n")
        held = self.server.get(f"/thimble/kept?slot={self.server.state()['last']}")
        segments, asked = held["segments"], held["asked"]
        # The shares of each token sum to 1, and so does their mean.
        self.assertAlmostEqual(sum(s["attended"] for s in segments), 1, 4)
        most = max((s for s in segments if s["text"].strip() in BOOK[:16000]), key=lambda s: s["attended"])
        self.assertEqual(most["text"].strip(), "The door code of the Lisbon warehouse is 40917.")
        self.assertEqual(segments[asked["segment"]], most)
        heads = self.server.get(f"/thimble/kept?slot={held['slot']}&first={most['first']}&count={most['count']}")["heads"]
        self.assertEqual(asked["held"], max(map(max, heads)))
        self.assertFalse(asked["gone"])

    def test_a_slot_whose_client_left_can_be_looked_into(self):
        body = {"prompt": "The house", "max_tokens": 4000, "stream": True}
        for _ in range(8):
            with self.server.begin(body, "/v1/completions") as connection:
                got = b""
                while got.count(b"data: ") < 5:
                    got += connection.recv(4096)
            self.server.wait_until(lambda state: not any(slot["busy"] for slot in state["slots"]))
            held = self.server.get(f"/thimble/kept?slot={self.server.state()['last']}")
            self.assertGreaterEqual(held["position"], 7)
            last = held["segments"][-1]
            self.assertEqual(last["first"] + last["count"], held["position"])

    def test_the_page_loads_nothing_from_elsewhere(self):
        status, headers, page = self.server.ask("GET", "/")
        with open(SOURCE + "/apps/serve/page.html", encoding="utf-8") as file:
            self.assertEqual((status, page), (200, file.read()))
        self.assertEqual(headers["Content-Type"], "text/html; charset=utf-8")
        self.assertIn("default-src 'none';", headers["Content-Security-Policy"])
        self.assertIn("connect-src 'self';", headers["Content-Security-Policy"])
        for word in ("://", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            self.assertNotIn(word, page)

    def test_metrics_are_served(self):
        self.server.chat(QUESTION)
        figures = dict(line.rsplit(" ", 1) for line in self.server.get("/metrics").split("\n") if line and line[0] != "#")
        self.assertEqual(float(figures["thimble_budget_bytes"]), BUDGET)
        self.assertLessEqual(float(figures["thimble_allocated_bytes"]), BUDGET)
        self.assertGreater(float(figures["thimble_generated_tokens_total"]), 0)
        self.assertEqual(self.server.get("/v1/models")["data"][0]["id"], "thimble-demo-28m-q8_0")


class Settings(unittest.TestCase):
    """Tests that change policies and budget while the server runs."""

    LISBON = BOOK[:16000] + "\n\nWhat is the door code of the Lisbon warehouse?"

    def answer(self, server, prompt):
        return server.chat(prompt)["choices"][0]["message"]["content"]

    def test_answers_are_those_of_the_command_with_the_same_flags(self):
        server = Server(*POLICY, "--mem-budget", "64MiB")
        answers = set()
        for settings in ({"retention": "window", "pool": 256}, {"retention": "keydiff", "pool": 300, "mem-budget": "48MiB"},
                         {"retention": "none", "pool": 0, "selection": "tokenselect", "select-k": 16, "select-local": 32,
                          "select-prefill": True}, {}):
            status, state = server.set(**settings)
            self.assertEqual(status, 200, state)
            flags = [f"--{name}" + ("" if value is True else f"={value}") for name, value in settings.items()]
            flags = ["--device", "cpu", *flags] if flags else POLICY
            answer = self.answer(server, self.LISBON)
            self.assertEqual(answer + "\n", thimble("run", "-m", MODEL, *flags, "-f", "-", text=self.LISBON), settings)
            answers.add(answer)
            self.assertEqual(state["settings"].get("retention"), settings.get("retention", "auto"))
            self.assertEqual(state["memory"]["budget"], 48 << 20 if "mem-budget" in settings else BUDGET)
            self.assertEqual(state["memory"]["ceiling"], BUDGET)
            self.assertLessEqual(state["memory"]["allocated"], state["memory"]["budget"])
        self.assertGreater(len(answers), 1)
        self.assertIn("40917", answers)
        self.assertLess(server.anonymous_bytes(), BUDGET + BESIDE)
        self.assertEqual(server.stop()[0], 0)

    def test_an_answer_about_an_evicted_sentence_is_marked_as_gone(self):
        server = Server(*POLICY, "--slots", "1")
        for settings, gone in (({"retention": "window", "pool": 256}, True), ({}, False)):
            self.assertEqual(server.set(**settings)[0], 200)
            self.assertEqual(self.answer(server, self.LISBON) == "40917", not gone)
            held = server.get("/thimble/kept?slot=0")
            self.assertEqual(held["segments"][held["asked"]["segment"]]["text"].strip(),
                             "The door code of the Lisbon warehouse is 40917.")
            self.assertEqual(held["asked"]["gone"], gone)
        self.assertEqual(server.stop()[0], 0)

    def test_what_is_in_the_store_is_not_gone(self):
        server = Server("--device", "cpu", "--retention", "window", "--pool", "256", "--recall-mem", "64MiB", "--recall", "64", "--slots", "1")
        self.answer(server, self.LISBON)
        held = server.get("/thimble/kept?slot=0")
        for segment in held["segments"]:
            self.assertAlmostEqual(segment["kept"] + segment["stored"], 1, places=5)
        self.assertGreater(max(segment["stored"] for segment in held["segments"]), 0.9)
        self.assertFalse(held["asked"]["gone"])
        self.assertGreaterEqual(max(held["asked"]["held"], held["asked"]["stored"]), 0.5)
        self.assertEqual(server.stop()[0], 0)

    def test_refused_settings_change_nothing(self):
        server = Server(*POLICY, "--mem-budget", "64MiB")
        body = server.chat(QUESTION)
        before = server.state()
        for settings, words in (({"mem-budget": "65MiB"}, "64.0 MiB, which the server was started with"),
                                ({"mem-budget": "20MiB"}, "the budget of 20.0 MiB lacks"), ({"pool": 100000}, "lacks"),
                                ({"pool": "x"}, "--pool"), ({"pool": None}, "pool"), ({"frobnicate": 1}, "--frobnicate"),
                                ({"retention": "all"}, "none|window"), ({"retention": "adore"}, "controller"),
                                ({"select-k": 8}, "--selection"), ({"heads": HEADS}, "heads"), ({"heads=" + HEADS: True}, "name"),
                                ({"": 1}, "name")):
            status, error = server.set(**settings)
            self.assertEqual(status, 400, settings)
            self.assertIn(words, error["error"]["message"])
        self.assertEqual(server.state(), {**before, "memory": server.state()["memory"]})
        self.assertEqual(server.state()["memory"]["pool"], before["memory"]["pool"])
        # The tokens that were read are still there.
        again = server.chat([user(QUESTION), body["choices"][0]["message"], user("Where is that?")])
        self.assertEqual(again["usage"]["prompt_tokens_details"]["cached_tokens"], body["usage"]["total_tokens"])
        # Another page cannot do this: its form does not send JSON, and its script sends an origin.
        data, json_type = json.dumps({"pool": 64}), {"Content-Type": "application/json"}
        for headers, expected in (({}, 415), ({"Content-Type": "text/plain"}, 415), ({**json_type, "Origin": "null"}, 403),
                                  ({**json_type, "Host": "evil.example"}, 403)):
            self.assertEqual(server.ask("POST", "/thimble/settings", data, headers)[0], expected, headers)
        self.assertEqual(server.state()["memory"]["pool"], before["memory"]["pool"])
        self.assertEqual(server.stop()[0], 0)

    def test_settings_do_not_change_while_a_slot_is_busy(self):
        server = Server(*POLICY)
        with server.begin(long_request()):
            server.wait_until(lambda state: any(slot["busy"] for slot in state["slots"]))
            status, error = server.set(pool=64)
            self.assertEqual((status, error["error"]["message"]), (409, "a slot is busy; change the settings when all slots are idle"))
        server.wait_until(lambda state: not any(slot["busy"] for slot in state["slots"]))
        self.assertEqual(server.set(pool=64)[1]["memory"]["pool"], 64)
        self.assertEqual(server.state()["last"], None)
        self.assertEqual(server.stop()[0], 0)

    def test_requests_and_changes_at_the_same_time_are_answered(self):
        server = Server(*POLICY)
        statuses = []

        def change():
            for i in range(20):
                statuses.append(server.set(pool=64 + i)[0])

        threads = [threading.Thread(target=change) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            self.assertEqual(self.answer(server, QUESTION), "In Bergen.")
        for thread in threads:
            thread.join()
        self.assertLessEqual(set(statuses), {200, 409})
        server.wait_until(lambda state: not any(slot["busy"] for slot in state["slots"]))
        self.assertEqual(server.set(pool=64)[0], 200)
        self.assertEqual(server.stop()[0], 0)

    def test_sessions_that_the_system_has_no_memory_for_leave_the_old_ones(self):
        server = Server(*POLICY)
        limit = server.memory_of("VmSize") + (512 << 20)
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        status, error = server.set(retention="window", pool=1000000)  # of 4 KiB and more
        self.assertEqual(status, 503, error)
        self.assertEqual(server.state()["policies"]["retention"], "mix")
        self.assertEqual(server.state()["memory"]["pool"], 1024)
        self.assertEqual(self.answer(server, QUESTION), "In Bergen.")
        self.assertEqual(server.stop()[0], 0)


class Sizes(unittest.TestCase):
    """Slots of unequal size. Nothing is evicted, so a text needs a slot that holds it."""

    FLAGS = ["--device", "cpu", "--retention", "none"]

    def pool_of_last(self, server):
        state = server.state()
        return state["slots"][state["last"]]["pool"]

    def test_slots_without_room_in_f16_store_q8_0(self):
        for slots, expected in (("1", False), ("2", True), ("1x8000,1x500", False)):
            server = Server("--device", "cpu", "--mem-budget", "112MiB", "--slots", slots)
            self.assertEqual("keys and values as q8_0" in "".join(server.first_lines), expected, slots)
            self.assertEqual(server.stop()[0], 0)

    def test_a_request_goes_to_the_smallest_slot_that_holds_it(self):
        server = Server(*self.FLAGS, "--slots", "1x4096,2x512", "--mem-budget", "96MiB")
        self.assertEqual([slot["pool"] for slot in server.state()["slots"]], [512, 512, 4096])
        self.assertLessEqual(server.state()["memory"]["allocated"], 96 << 20)
        long = BOOK[:6000] + "\n\nWho is in the house?"
        for prompt, pool in ((QUESTION, 512), (long, 4096), (QUESTION + " ", 512)):
            answer = server.chat(prompt, max_tokens=20)["choices"][0]["message"]["content"]
            self.assertEqual(answer + "\n", thimble("run", "-m", MODEL, *self.FLAGS, "-n", "20", "-f", "-", text=prompt))
            self.assertEqual(self.pool_of_last(server), pool)
        # The room for a long answer counts, too.
        server.ask("POST", "/v1/completions", {"prompt": "A house", "max_tokens": 2000, "stop": ["a", "e", "t"]})
        self.assertEqual(self.pool_of_last(server), 4096)
        # A conversation that outgrows its slot goes on in a larger one.
        messages = [user(QUESTION)]
        messages.append(server.chat(messages, max_tokens=20)["choices"][0]["message"])
        self.assertEqual(self.pool_of_last(server), 512)
        server.chat([*messages, user(long)], max_tokens=20)
        self.assertEqual(self.pool_of_last(server), 4096)
        status, _, error = server.ask("POST", "/v1/completions", {"prompt": BOOK[:30000], "max_tokens": 1})
        self.assertEqual((status, error["error"]["code"]), (400, "context_length_exceeded"))
        self.assertIn("--slots", server.set(pool=64)[1]["error"]["message"])
        self.assertEqual(server.set()[0], 200)
        self.assertEqual(server.chat(QUESTION)["choices"][0]["message"]["content"], "In Bergen.")
        self.assertEqual(server.stop()[0], 0)

    def test_sixteen_clients_of_mixed_lengths_are_all_answered(self):
        server = Server(*self.FLAGS, "--slots", "1x4096,3x512")
        lengths = [200, 6000, 400, 900, 300, 9000, 500, 1200, 250, 700, 7500, 350, 450, 600, 800, 5000]
        prompts = [BOOK[i * 500:i * 500 + length] + "\n\nWho is in the house?" for i, length in enumerate(lengths)]
        alone = [server.chat(prompt, max_tokens=8)["choices"][0]["message"]["content"] for prompt in prompts]
        self.assertEqual(server.set()[0], 200)  # all slots forget
        start, waits, answers = time.monotonic(), {}, {}

        def ask(i):
            lines = []
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
            connection.request("POST", "/v1/chat/completions", json.dumps({"messages": [user(prompts[i])], "max_tokens": 8, "stream": True}))
            for line in connection.getresponse():
                lines.append(line.decode().rstrip("\n"))
                if i not in waits and lines[-1].startswith("data: "):
                    waits[i] = time.monotonic() - start
            connection.close()
            answers[i] = content(lines)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
            time.sleep(0.01)
        for thread in threads:
            thread.join()
        self.assertEqual([answers[i] for i in range(16)], alone)
        for name, group in (("short", [i for i in range(16) if lengths[i] < 2000]), ("long", [i for i in range(16) if lengths[i] > 2000])):
            seconds = sorted(waits[i] for i in group)
            print(f"{len(group)} {name} texts had their first token after {statistics.median(seconds):.2f} s (median), {seconds[-1]:.2f} s at worst")
        # Short texts do not wait for the long ones, which take turns in the only slot that holds them.
        self.assertLess(statistics.median(waits[i] for i in range(16) if lengths[i] < 2000),
                        statistics.median(waits[i] for i in range(16) if lengths[i] > 2000))
        self.assertEqual(server.stop()[0], 0)

    def test_wrong_sizes_are_explained(self):
        for slots, words in (("2x100,3", "for all slots or for none"), ("0", "number"), ("65", "1 to 64"), ("1x", "number"),
                             ("1x99999999,1x100", "out of|memory|lacks|range|too|most")):
            with self.assertRaisesRegex(RuntimeError, words):
                Server(*self.FLAGS, "--slots", slots, "--mem-budget", "64MiB")
        with self.assertRaisesRegex(RuntimeError, "leave --pool out"):
            Server(*self.FLAGS, "--slots", "1x100,1x200", "--pool", "300")
        with self.assertRaisesRegex(RuntimeError, "3 slots need .*smaller --slots"):
            Server(*self.FLAGS, "--slots", "1x9000,2x4096", "--mem-budget", "64MiB")


class Drafts(unittest.TestCase):
    """With drafts, answers are those of a server without."""

    def answers(self, server):
        """What comes for requests of many kinds, without what differs from run to run."""
        got = []

        def chat(messages, **fields):
            body = server.chat(messages, **fields)
            got.append((body["choices"], body["usage"]))
            return body["choices"][0]["message"]

        text = BOOK[:9000]  # twice the pool, so that entries are evicted
        messages = [user(text + "\n\nRepeat the first sentence, then the first sentence.")]
        messages += [chat(messages, max_tokens=60), user("Again.")]
        chat(messages, max_tokens=60)  # goes on in its slot
        chat(QUESTION, logprobs=True, top_logprobs=2, stop="gen")
        chat(QUESTION, watch=True)
        schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}, "again": {"type": "integer"}},
                  "required": ["city", "again"]}
        for sampled in ({}, {"temperature": 1, "seed": 5, "n": 3, "repeat_penalty": 1.2, "logit_bias": {"300": 5}}):
            chat(QUESTION, guided_json=schema, max_tokens=60, **sampled)
            chat("Tell me a story.", max_tokens=80, **sampled)
        got.append(content(server.stream({"messages": [user(QUESTION)], "grammar": 'root ::= ("In " | "Bergen")+', "max_tokens": 30})))
        return got

    def test_answers_are_those_without_drafts(self):
        flags = [*POLICY, "--mem-budget", "128MiB"]
        plain = Server(*flags)
        expected, memory = self.answers(plain), plain.state()["memory"]["slot"]
        self.assertEqual(plain.stop()[0], 0)
        for draft in ("lookup", MODEL):
            for most in (["--draft-max", "3"], []):
                with self.subTest(draft=draft, most=most), tempfile.TemporaryDirectory() as folder:
                    server = Server(*flags, "--draft", draft, *most, "--cache-dir", folder)
                    for again in (False, True):
                        got = self.answers(server)
                        self.assertEqual(got[0][0], expected[0][0])
                        if not again:
                            self.assertEqual(got, expected)
                    # Lookup remembers tokens; a model that drafts has a session of its own.
                    slot = server.state()["memory"]["slot"]
                    self.assertGreater(slot["io"] + slot["draft"], memory["io"] + memory["draft"] + (200 << 10))
                    self.assertEqual(server.stop()[0], 0)

    def test_what_cannot_be_drafted_is_refused(self):
        server = Server(*POLICY, "--draft", "lookup")
        status, answer = server.set(selection="quest")
        self.assertEqual((status, "draft" in answer["error"]["message"]), (400, True), answer)
        self.assertEqual(server.set(retention="window", pool=512)[0], 200)
        self.assertEqual(server.chat(QUESTION)["choices"][0]["message"]["content"], "In Bergen.")
        self.assertEqual(server.stop()[0], 0)


class Large(unittest.TestCase):
    """Tests with texts of the largest allowed size: a body of 1 MiB with this budget."""

    MOST = 1 << 20

    def setUp(self):
        self.server = Server(*POLICY, "--mem-budget", "64MiB")

    def tearDown(self):
        self.assertEqual(self.server.stop()[0], 0)

    def most_memory_of(self, text, count):
        """The peak memory of the server until `count` copies of this text are being read or wait, and there is no room for more."""
        data = [json.dumps({"messages": [user(name + "\n" + text)], "stream": True}, ensure_ascii=False).encode()
                for name in "abcd"[:count]]
        data = [d[:1] + b" " * (self.MOST - len(d)) + d[1:] for d in data]
        most, connections, ended = [], [], threading.Event()

        def watch():
            while not ended.wait(0.002):
                most.append(self.server.anonymous_bytes())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            for d in data:  # in turn, since bodies on their way are bounded, too
                connections.append(self.server.begin(d))
                self.server.wait_until(lambda state: state["queue"]["waiting"] + sum(slot["busy"] for slot in state["slots"]) ==
                                       len(connections), 60)
            status, _, error = self.server.ask("POST", "/v1/completions", {"prompt": "a b " * (self.MOST // 16), "max_tokens": 1})
            self.assertEqual((status, error["error"]["type"]), (503, "server_error"))
            for connection in connections:
                connection.close()
            self.server.wait_until(lambda state: not any(slot["busy"] for slot in state["slots"]), 60)
        finally:
            ended.set()
            thread.join()
        return max(most)

    def test_the_largest_texts_stay_within_the_memory_outside_the_budget(self):
        run = self.MOST // 8
        book = (BOOK * 5)[:self.MOST - 30000]
        stretches = "a" * run + " " + "b" * run + " " * run + book[:self.MOST // 2]
        tokens = " ".join("#$" * 20 for _ in range(25000))  # as many as bytes
        for text, count in ((book, 4), (stretches, 4), (tokens, 2)):
            self.assertLess(self.most_memory_of(text, count), BUDGET + BESIDE, text[:80])
        self.assertEqual(self.server.chat(QUESTION)["choices"][0]["message"]["content"], "In Bergen.")

    def test_a_larger_text_is_refused_with_a_sentence(self):
        for body, words in ((b" " * (self.MOST + 1), "the body is larger than 1048576 bytes, the most that the server has memory for"),
                            (json.dumps({"messages": [user("a" * (self.MOST // 8 + 1))]}), "131072 bytes without white space"),
                            (json.dumps({"messages": [user(" " * (self.MOST // 8 + 1))]}), "131072 bytes without white space")):
            status, _, error = self.server.ask("POST", "/v1/chat/completions", body)
            self.assertEqual((status, error["error"]["type"]), (413, "invalid_request_error"))
            self.assertIn(words, error["error"]["message"])


class InFlight(unittest.TestCase):
    """Tests the memory limit of all requests and answers together: 12 MiB with this budget."""

    MOST = 12 << 20

    def setUp(self):
        self.server = Server(*POLICY, "--mem-budget", "64MiB")

    def tearDown(self):
        self.server.wait_until(lambda state: not any(slot["busy"] for slot in state["slots"]))
        self.assertLess(self.server.memory_of("RssAnon"), BUDGET + BESIDE)
        self.assertEqual(self.server.chat(QUESTION)["choices"][0]["message"]["content"], "In Bergen.")
        self.assertLess(self.figure("thimble_in_flight_bytes"), 64 << 10)  # what the slots remember
        self.assertEqual(self.server.stop()[0], 0)

    def figure(self, name):
        return int(re.search(rf"^{name} (\d+)$", self.server.get("/metrics"), re.MULTILINE).group(1))

    def test_answers_that_nobody_takes_are_bounded(self):
        body = json.dumps({"content": "\n".join(["\U0001F600\u4e2d" * 400] * 90)}, ensure_ascii=False).encode()  # a MiB of ids
        statuses, most, unread = [], 0, []
        for _ in range(40):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", self.server.port))
            connection.settimeout(60)
            connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            statuses.append(connection.recv(12)[9:])
            most = max(most, self.server.anonymous_bytes())
            unread.append(connection)
        self.assertEqual(set(statuses), {b"200", b"503"})
        read_until(unread[-1], lambda got: b"again later" in got)
        self.assertLess(most, BUDGET + BESIDE)
        for connection in unread:
            connection.close()

    def test_many_small_values_are_refused_before_they_are_made(self):
        for body in ({"messages": [user("a")] * 32000}, {"messages": [user("a")], "tools": [{"a": ["b"]}] * 30000}):
            status, _, error = self.server.ask("POST", "/v1/chat/completions", json.dumps(body, separators=(",", ":")))
            self.assertEqual(status, 413)
            self.assertIn("too many values", error["error"]["message"])
        ids = self.server.ask("POST", "/v1/completions", {"prompt": [5] * 100000, "max_tokens": 0})
        self.assertIn("max_tokens", ids[2]["error"]["message"])  # numbers take little

    def test_small_messages_that_wait_are_counted(self):
        body = json.dumps({"messages": [user("a")] * 11000, "stream": True}, separators=(",", ":")).encode()
        waiting, statuses = [], []
        for _ in range(4):
            waiting.append(self.server.begin(body))
            statuses.append(waiting[-1].recv(12)[9:])
        self.assertGreater(self.figure("thimble_in_flight_bytes"), self.MOST // 2)
        self.assertEqual(set(statuses), {b"200", b"503"})
        for connection in waiting:
            connection.close()

    def test_an_answer_that_grows_beyond_the_bound_is_refused(self):
        bodies = []
        for _ in range(11):  # which leave about a MiB
            bodies.append(self.server.connect())
            bodies[-1].sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1048576\r\n\r\n" + b" " * 1048575)
        answer = {"prompt": BOOK[1000:2000], "max_tokens": 900, "logprobs": 20}
        status, _, error = self.server.ask("POST", "/v1/completions", answer)
        self.assertEqual(status, 503, error)
        self.assertIn("the answer is too large for the server's memory", error["error"]["message"])
        # Small requests and streamed ones are answered meanwhile.
        self.assertEqual(self.server.chat(QUESTION)["choices"][0]["message"]["content"], "In Bergen.")
        for connection in bodies:
            connection.close()


class Slow(unittest.TestCase):
    """Tests with clients that stop sending; all wait at the same time."""

    def test_an_idle_connection_is_closed(self):
        server = Server(*POLICY, "--mem-budget", "64MiB")
        beginnings = [b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{", b"GET /hea", b""]
        connections = [server.connect(timeout=30) for _ in beginnings]
        start = time.monotonic()
        for connection, beginning in zip(connections, beginnings):
            connection.sendall(beginning)
        for connection in connections:
            self.assertEqual(drain(connection), b"")
            connection.close()
        self.assertLess(time.monotonic() - start, 29)  # the limit is 10; who is not closed waits for 30
        self.assertEqual(server.stop()[0], 0)


class OneSlot(unittest.TestCase):
    """Tests that need their own server: a full queue, a key, a pool that becomes full, Ctrl-C."""

    def test_a_full_queue_is_reported_and_an_empty_one_serves_again(self):
        server = Server(*POLICY, "--slots", "1")
        waiting = []
        for i in range(5):  # one is read, four wait
            waiting.append(server.begin(long_request()))
            server.wait_until(lambda state: state["slots"][0]["busy"] and state["queue"]["waiting"] == i)
        for stream in (False, True):
            status, headers, error = server.ask("POST", "/v1/chat/completions", {"messages": [user("a")], "stream": stream})
            self.assertEqual((status, headers["Retry-After"], error["error"]["type"]), (429, "1", "rate_limit_error"))
        for connection in waiting[1:]:
            connection.close()
        server.wait_until(lambda state: state["queue"]["waiting"] == 0)
        waiting[0].close()
        self.assertEqual(server.chat(QUESTION)["choices"][0]["message"]["content"], "In Bergen.")
        with server.begin(long_request()):
            server.wait_until(lambda state: state["slots"][0]["busy"])
            status, _, error = server.ask("GET", "/thimble/kept?slot=0")
            self.assertEqual((status, error["error"]["message"]), (409, "slot 0 is busy; ask again when it is idle"))
            code, seconds = server.stop(signal.SIGINT)  # while it reads
        self.assertEqual(code, 0)
        self.assertLess(seconds, 5)

    def test_a_connection_closed_before_the_clone_is_made_stops_the_clone(self):
        def idle(state):
            return not any(slot["busy"] for slot in state["slots"])

        for _ in range(4):  # where the chunk was just at its end, again
            server = Server("--device", "cpu", "--retention", "none", "--pool", "16384", "--chunk", "4096")
            ids = server.ask("POST", "/tokenize", {"content": BOOK[:60000]})[2]["tokens"]
            with server.begin({"prompt": ids, "stream": True}, "/v1/completions") as connection:
                read_until(connection, lambda got: re.search(rb": reading [1-9]", got))
            server.wait_until(idle, 60)  # in the middle of a chunk, which a clone finishes first
            held = server.state()["slots"]
            beginning = {"prompt": ids[:4500], "max_tokens": 1}
            with server.begin(beginning, "/v1/completions"):
                server.wait_until(lambda state: state["slots"][1]["busy"])
            server.wait_until(idle, 60)
            stopped = server.state()["slots"] == held
            if stopped:  # now it is made
                body = server.ask("POST", "/v1/completions", beginning)[2]
                self.assertEqual(body["usage"]["prompt_tokens_details"]["cached_tokens"], 4096)
                self.assertEqual([slot["position"] for slot in server.state()["slots"]], [held[0]["position"], 4501])
            self.assertEqual(server.stop()[0], 0)
            if stopped:
                return
        self.fail("what is to be cloned was finished all the same")

    def test_names_and_origins_that_may_be_used(self):
        page = {"Origin": "https://chat.example"}

        def statuses(server, cases):
            for headers, expected in cases:
                self.assertEqual(server.ask("GET", "/v1/models", headers=headers)[0], expected, headers)

        server = Server(*POLICY, "--slots", "1", "--host", "0.0.0.0")
        statuses(server, [({"Host": "box.lan"}, 403), ({"Host": "0.0.0.0"}, 200)])
        self.assertIn("--allowed-host NAME", server.ask("GET", "/v1/models", headers={"Host": "box.lan"})[2]["error"]["message"])
        self.assertEqual(server.stop()[0], 0)
        server = Server(*POLICY, "--slots", "1", "--host", "0.0.0.0", "--allowed-host", "box.lan", "Other.lan", "--allowed-origin", page["Origin"])
        statuses(server, [({"Host": "box.lan"}, 200), ({"Host": f"BOX.lan:{server.port}"}, 200), ({"Host": "other.lan"}, 200),
                          ({"Host": "evil.box.lan"}, 403), ({"Host": "evil.example"}, 403),
                          ({"Host": "box.lan", "Origin": "https://box.lan"}, 200), ({"Host": "box.lan", "Origin": "https://other.lan"}, 403),
                          (page, 200), ({**page, "Host": "evil.example"}, 403), ({"Origin": "https://chat.example.evil"}, 403)])
        asks = {**page, "Access-Control-Request-Method": "POST"}
        status, headers, _ = server.ask("OPTIONS", "/v1/chat/completions", headers=asks)
        self.assertEqual((status, headers["Access-Control-Allow-Origin"], headers["Access-Control-Allow-Methods"]), (200, page["Origin"], "POST"))
        self.assertEqual(server.ask("OPTIONS", "/v1/chat/completions")[0], 405)
        for stream in (False, True):
            body = json.dumps({"messages": [user(QUESTION)], "stream": stream})
            status, headers, _ = server.ask("POST", "/v1/chat/completions", body, page)
            self.assertEqual((status, headers["Access-Control-Allow-Origin"], headers["Vary"]), (200, page["Origin"], "Origin"))
        self.assertNotIn("Access-Control-Allow-Origin", server.ask("GET", "/v1/models")[1])
        self.assertEqual(server.stop()[0], 0)
        server = Server(*POLICY, "--slots", "1", "--host", "0.0.0.0", "--api-key", "secret")
        key = {"Authorization": "Bearer secret"}
        statuses(server, [({"Host": "box.lan"}, 401), ({"Host": "box.lan", **key}, 200), ({**key, "Host": "a", "Origin": "https://b"}, 200)])
        self.assertNotIn("Access-Control-Allow-Origin", server.ask("GET", "/v1/models", headers={**page, **key})[1])
        self.assertEqual(server.stop()[0], 0)

    def test_requests_without_the_key_are_refused(self):
        server = Server(*POLICY, "--slots", "1", "--api-key", "secret")
        for headers, expected in (({}, 401), ({"Authorization": "Bearer secre"}, 401), ({"Authorization": "Bearer secretsecret"}, 401),
                                  ({"Authorization": "Bearer secret"}, 200), ({"x-api-key": "secret"}, 200)):
            self.assertEqual(server.ask("GET", "/v1/models", headers=headers)[0], expected, headers)
        for path, expected in (("/health", 200), ("/", 200), ("/nowhere", 401), ("/thimble/kept?slot=0", 401)):
            self.assertEqual(server.ask("GET", path)[0], expected, path)
        self.assertEqual(server.set(pool=64)[0], 401)
        self.assertEqual(server.stop()[0], 0)

    def test_held_tokens_are_not_read_again_and_a_full_pool_is_reported(self):
        flags = ["--device", "cpu", "--retention", "none", "--pool", "2048", "--chunk", "256"]
        server = Server(*flags, "--slots", "1")
        text = BOOK[:4000]
        for question in ("Who is in the house?", "Where is the garden?"):
            prompt = text + "\n\n" + question
            body = server.chat(prompt)
            expected = thimble("run", "-m", MODEL, *flags, "-f", "-", text=prompt)
            self.assertEqual(body["choices"][0]["message"]["content"] + "\n", expected)
        self.assertEqual(body["usage"]["prompt_tokens_details"]["cached_tokens"], 768)  # whole chunks
        status, _, error = server.ask("POST", "/v1/chat/completions", {"messages": [user(BOOK)]})
        self.assertEqual((status, error["error"]["code"]), (400, "context_length_exceeded"))
        self.assertEqual(server.stop()[0], 0)

    def test_a_window_holds_the_first_and_the_last_tokens(self):
        flags = ["--device", "cpu", "--retention", "window", "--pool", "256", "--chunk", "128"]
        server = Server(*flags, "--slots", "1")
        self.assertIsNone(server.state()["last"])
        self.assertEqual(server.get("/thimble/kept?slot=0")["segments"], [])
        ids = server.ask("POST", "/tokenize", {"content": BOOK[:4000]})[2]["tokens"]
        body = {"prompt": ids, "max_tokens": 1}
        self.assertEqual(server.ask("POST", "/v1/completions", body)[0], 200)
        # A prompt leaves the pool, whose first 4 tokens are protected, and its last 100 tokens; then one
        # token was generated.
        for first, count, share in ((0, 4, 1), (4, len(ids) - 356, 0), (len(ids) - 352, 353, 1), (3, 2, 0.5)):
            heads = server.get(f"/thimble/kept?slot=0&first={first}&count={count}")["heads"]
            self.assertEqual({value for layer in heads for value in layer}, {share}, (first, count))
        self.assertEqual(server.stop()[0], 0)

    def test_the_system_prompt_is_used_if_a_request_has_none(self):
        flags = [*POLICY, "--system-prompt", "Sylvia works in Oslo."]
        server = Server(*flags, "--slots", "1")
        expected = thimble("run", "-m", MODEL, *flags, "-p", "In which city does Sylvia work?")
        with_own = [{"role": "system", "content": "Sylvia works in Oslo."}, user("In which city does Sylvia work?")]
        for messages in (with_own, with_own[1:]):
            self.assertEqual(server.chat(messages)["choices"][0]["message"]["content"] + "\n", expected)
        self.assertIn("Oslo", expected)
        self.assertEqual(server.stop()[0], 0)

    def test_a_budget_too_small_for_the_slots_is_reported(self):
        with self.assertRaisesRegex(RuntimeError, "4 slots need .*fewer --slots"):
            Server(*POLICY, "--slots", "4", "--mem-budget", "64MiB")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
