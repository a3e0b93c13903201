"""Tests that thimble serve reads nothing twice with --cache-dir: serve_cache.py COMMAND SOURCE_FOLDER"""
import glob
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from serve_client import BOOK, COMMAND, ENVIRONMENT, HEADS, MODEL, SOURCE, Server, events

CHUNK, POOL = 128, 512
DEVICE = ["--device", "cpu", "--chunk", str(CHUNK), "-n", "12"]
WINDOW = [*DEVICE, "--retention", "window", "--pool", str(POOL)]
DENSE = [*DEVICE, "--retention", "none", "-c", "4096"]
TEXT = BOOK[:6000]  # about 1500 tokens
QUESTIONS = ["Who is in the house?", "What is the name of the man?", "Where is it?"]


def about(question, text=TEXT):
    return {"role": "user", "content": text + "\n\n" + question}


def cached(body):
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


def last_border(tokens, local=100):
    """The end of the last chunk that does not depend on where the prompt ends."""
    return (tokens - local - 1) // CHUNK * CHUNK


def answer(body):
    """The answer with the log-probabilities of its tokens, all digits of them."""
    return body["choices"][0]["message"]["content"], json.dumps(body["choices"][0]["logprobs"])


class LoggedServer(Server):
    """Keeps what the server says."""

    def __init__(self, *flags, **more):
        super().__init__(*flags, **more)
        self.log = self.first_lines
        self.reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr))
        self.reader.start()

    def stop(self, with_signal=signal.SIGTERM):
        self.process.send_signal(with_signal)
        self.process.wait(timeout=30)
        self.reader.join()
        self.process.stderr.close()
        return "".join(self.log)

    def ask_about(self, question, text=TEXT, **fields):
        return self.chat([about(question, text)], logprobs=True, **fields)

    def settle(self):
        """Waits until what is saved after an answer was saved: a request to look at a slot waits for that."""
        for slot in range(len(self.state()["slots"])):
            self.ask("GET", f"/thimble/kept?slot={slot}&first=0&count=1")


class Cache(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.dir = self.folder.name + "/states"

    def serve(self, *flags, size="1GiB", **more):
        server = LoggedServer("--cache-dir", self.dir, "--cache-size", size, *flags, **more)
        self.addCleanup(lambda: server.process.poll() is None and server.stop(signal.SIGKILL))
        return server

    def states(self):
        return sorted(glob.glob(self.dir + "/*.session"))

    def bytes(self):
        return sum(os.path.getsize(path) for path in glob.glob(self.dir + "/*"))

    def expected(self, policy, **fields):
        """What a server without a cache answers."""
        server = LoggedServer(*policy, "--slots", "1")
        try:
            answers = []
            for question in QUESTIONS:
                server.set()  # forgets what was read
                answers.append(answer(server.ask_about(question, **fields)))
            return answers
        finally:
            server.stop()

    def test_a_text_is_read_once_and_answers_are_the_same(self):
        for policy in (WINDOW, DENSE, [*DEVICE, "--heads", HEADS, "--pool", str(POOL)],
                       [*DEVICE, "--retention", "keydiff", "--pool", str(POOL)],
                       [*WINDOW, "--recall", "128", "--recall-mem", "8MiB"]):
            with self.subTest(policy=policy[6:]):
                expected = self.expected(policy)
                local = 0 if policy == DENSE else 100
                server = self.serve(*policy)
                for number, question in enumerate(QUESTIONS):
                    body = server.ask_about(question)
                    border = last_border(body["usage"]["prompt_tokens"], local)
                    self.assertEqual(cached(body), border if number else 0)
                    self.assertEqual(answer(body), expected[number])
                server.settle()
                server.stop()
                self.assertTrue(self.states())
                server = self.serve(*policy)
                for number, question in enumerate(QUESTIONS):
                    body = server.ask_about(question)
                    self.assertEqual(cached(body), last_border(body["usage"]["prompt_tokens"], local))
                    self.assertEqual(answer(body), expected[number])
                log = server.stop()
                self.assertIn(f"{cached(body)} of {body['usage']['prompt_tokens']} tokens were not read again", log)

    def test_every_protocol_says_how_much_was_not_read_again(self):
        server = self.serve(*WINDOW)
        read = server.ask_about(QUESTIONS[0])["usage"]
        border = last_border(read["prompt_tokens"])
        server.stop()
        for path, fields, of in (("/v1/chat/completions", {}, lambda u: (u["prompt_tokens_details"]["cached_tokens"], u["prompt_tokens"])),
                                 ("/v1/messages", {"max_tokens": 12}, lambda u: (
                                     u["cache_read_input_tokens"], u["input_tokens"] + u["cache_read_input_tokens"]))):
            server = self.serve(*WINDOW)
            body = server.chat([about(QUESTIONS[0])], path, **fields)
            self.assertEqual(of(body["usage"]), (border, read["prompt_tokens"]))
            server.stop()
        server = self.serve(*WINDOW)
        usage = server.ask("POST", "/v1/responses", {"input": [about(QUESTIONS[0])]})[2]["usage"]
        self.assertEqual((usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]), (border, read["prompt_tokens"]))
        ids = server.ask("POST", "/tokenize", {"content": TEXT})[2]["tokens"]
        for number in range(2):
            usage = server.ask("POST", "/v1/completions", {"prompt": ids, "max_tokens": 2})[2]["usage"]
            self.assertEqual(usage["prompt_tokens_details"]["cached_tokens"], last_border(len(ids)) if number else 0)

    def test_messages_say_how_much_was_saved(self):
        for policy in (WINDOW, DENSE):
            with self.subTest(policy=policy[6:]):
                server = self.serve(*policy)

                def usage(question, **fields):
                    return server.chat([about(question)], "/v1/messages", max_tokens=12, **fields)["usage"]

                def parts(usage):
                    return [usage[name] for name in ("cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens")]

                first = parts(usage(QUESTIONS[0]))
                server.settle()
                # Entries are evicted at the end of a prompt, so the state is saved before it; else with the answer.
                border = last_border(sum(first), 100 if policy == WINDOW else 0)
                self.assertEqual(first, [0, border, sum(first) - border] if policy == WINDOW else [0, sum(first), 0])
                second = parts(usage(QUESTIONS[1]))
                self.assertEqual(second[:2], [border, 0])  # what is new since then is not worth a file
                text = BOOK[30000:36000]
                body = {"messages": [about(QUESTIONS[0], text)], "max_tokens": 12}
                lines = events(server.stream(body, "/v1/messages"))
                begun, ended = lines[0]["message"]["usage"], lines[-2]["usage"]
                self.assertEqual(sum(parts(begun)), sum(parts(ended)))
                self.assertEqual(parts(ended)[1] == sum(parts(ended)), policy == DENSE)
                server.stop()
        server = LoggedServer(*WINDOW)
        self.assertEqual(server.chat([about(QUESTIONS[0])], "/v1/messages", max_tokens=12)["usage"]["cache_creation_input_tokens"], 0)
        server.stop()

    def test_what_prompts_share_is_found_although_entries_were_evicted_since(self):
        system, texts = BOOK[:4000], (BOOK[10000:16000], BOOK[20000:26000])

        def openai(server, text):
            return server.chat([{"role": "system", "content": system}, about(QUESTIONS[0], text)])

        def anthropic(server, text):
            blocks = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": text}]
            return server.chat([{"role": "user", "content": blocks}], "/v1/messages", max_tokens=12)

        for ask, of in ((openai, cached), (anthropic, lambda body: body["usage"]["cache_read_input_tokens"])):
            server = self.serve(*WINDOW)
            self.assertEqual(of(ask(server, texts[0])), 0)
            body = ask(server, texts[1])
            tokens = len(server.ask("POST", "/tokenize", {"content": system})[2]["tokens"])
            # The last end of a chunk inside the system prompt or the marked block, whatever the template adds.
            self.assertIn(of(body), {(tokens + added) // CHUNK * CHUNK for added in (-1, 20)})
            server.stop()
            fresh = LoggedServer(*WINDOW)
            expected = ask(fresh, texts[1])
            self.assertEqual([body.get(name) and [c.get("message", c) for c in body[name]] for name in ("choices", "content")],
                             [expected.get(name) and [c.get("message", c) for c in expected[name]] for name in ("choices", "content")])
            fresh.stop()

    def test_a_conversation_goes_on_after_a_restart(self):
        for policy in (DENSE, WINDOW):
            with self.subTest(policy=policy[6:]):
                server = self.serve(*policy)
                messages = [about(QUESTIONS[0])]
                messages.append(server.chat(messages)["choices"][0]["message"])
                # A turn that is long enough to be saved.
                messages.append(about(QUESTIONS[1], BOOK[6000:9000]))
                body = server.chat(messages)
                held = body["usage"]["total_tokens"]
                messages += [body["choices"][0]["message"], {"role": "user", "content": "Why?"}]
                server.settle()
                server.stop(signal.SIGKILL)
                here, again = self.serve(*policy), self.serve(*policy)
                body = here.chat(messages, logprobs=True)
                self.assertEqual(cached(body), held)
                # The state is what the slot would have held.
                self.assertEqual(answer(again.chat(messages, logprobs=True)), answer(body))
                here.stop(), again.stop()
                fresh = LoggedServer(*policy)
                fresh.chat(messages[:1]), fresh.chat(messages[:3])
                body_fresh = fresh.chat(messages, logprobs=True)
                self.assertEqual((cached(body_fresh), answer(body_fresh)), (held, answer(body)))
                fresh.stop()

    def test_a_conversation_does_not_go_on_with_another_template(self):
        messages = [about(QUESTIONS[0]), {"role": "assistant", "content": "The man."}, {"role": "user", "content": "Why?"}]
        flags = {name: [*DENSE, "--chat-template", name] for name in ("chatml", "phi3")}
        server = self.serve(*flags["chatml"])
        messages[1] = server.chat(messages[:1])["choices"][0]["message"]
        server.settle()
        server.stop()
        fresh = LoggedServer(*flags["phi3"])
        expected = answer(fresh.chat(messages, logprobs=True))
        fresh.stop()
        server = self.serve(*flags["phi3"])
        body = server.chat(messages, logprobs=True)
        self.assertEqual((cached(body), answer(body)), (0, expected))
        server.stop()
        server = self.serve(*flags["chatml"])
        self.assertGreater(cached(server.chat(messages)), last_border(body["usage"]["prompt_tokens"]) // 2)
        server.stop()

    def test_servers_share_a_folder(self):
        one, other = self.serve(*WINDOW), self.serve(*WINDOW)
        stranger = self.serve(*WINDOW[:-1], str(POOL + 1))  # with other options
        body = one.ask_about(QUESTIONS[0])
        border = last_border(body["usage"]["prompt_tokens"])
        self.assertEqual(cached(body), 0)
        self.assertEqual(cached(other.ask_about(QUESTIONS[0])), border)
        self.assertEqual(cached(stranger.ask_about(QUESTIONS[0])), 0)
        for path in self.states():  # as if a third server had made room
            os.remove(path)
        self.assertEqual(cached(other.ask_about(QUESTIONS[1], BOOK[30000:36000])), 0)
        self.assertGreater(cached(one.ask_about(QUESTIONS[1], BOOK[30000:36000])), border // 2)
        for server in (one, other, stranger):
            self.assertNotIn("not used", server.stop())

    def test_damaged_files_are_ignored_with_a_line(self):
        server = self.serve(*WINDOW)
        expected = answer(server.ask_about(QUESTIONS[0]))
        server.stop()
        [path] = self.states()
        with open(path, "rb") as file:
            whole = file.read()
        middle = len(whole) // 2
        for number, damaged in enumerate((whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1:],  # in the body
                                          whole[:middle], b"", whole[:100] + b"?" + whole[101:])):
            with open(path, "wb") as file:
                file.write(damaged)
            server = self.serve(*WINDOW)
            body = server.ask_about(QUESTIONS[0])
            self.assertEqual((cached(body), answer(body)), (0, expected))
            log = server.stop()
            lines = [line for line in log.splitlines() if "not used" in line or "ignored" in line]
            self.assertEqual(len(lines), 1, log)
            with open(path, "rb") as file:
                self.assertEqual(len(file.read()), len(whole), number)  # saved again

    def test_a_damaged_file_leaves_a_slot_as_it_was(self):
        server = self.serve(*DENSE)
        expected = answer(server.ask_about(QUESTIONS[0]))
        server.stop()
        [path] = self.states()
        server = self.serve(*DENSE, "--slots", "1")
        server.ask_about(QUESTIONS[0], TEXT[:3000])
        held = server.state()["slots"][0]["position"]
        with open(path, "r+b") as file:
            file.seek(os.path.getsize(path) // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        body = server.ask_about(QUESTIONS[0])
        self.assertEqual(answer(body), expected)
        self.assertIn(cached(body), range(CHUNK, held))
        log = server.stop()
        self.assertEqual(log.count("a saved state is not used: "), 1, log)

    def test_the_folder_stays_below_its_size(self):
        server = self.serve(*WINDOW)
        server.ask_about(QUESTIONS[0])
        one = os.path.getsize(self.states()[0])
        most = int(2.5 * one)
        server.stop()
        server = self.serve(*WINDOW, size=str(most))
        over = []
        stopping = threading.Event()
        self.addCleanup(stopping.set)

        def watch():
            while not stopping.is_set():
                try:
                    over.append(self.bytes())
                except FileNotFoundError:
                    pass
                time.sleep(0.001)
        watcher = threading.Thread(target=watch)
        watcher.start()
        for part in range(3):
            server.ask_about(QUESTIONS[0], BOOK[10000 * part:10000 * part + 6000])
            time.sleep(0.02)  # so that the times of use differ
            self.assertGreater(cached(server.ask_about(QUESTIONS[1])), 0)  # the first text stays in use
        stopping.set()
        watcher.join()
        self.assertLessEqual(max(over), most)
        self.assertEqual(len(self.states()), 2)
        self.assertIn("thimble_cache_states 2\n", server.get("/metrics"))
        server.stop()
        server = self.serve(*WINDOW, size=str(most // 100))
        self.assertEqual(cached(server.ask_about(QUESTIONS[0])), 0)
        self.assertEqual(self.bytes(), 0)
        self.assertIn("does not fit in --cache-size", server.stop())

    def test_a_server_that_is_killed_leaves_a_usable_folder(self):
        choice = random.Random(1)
        for number in range(4):
            server = self.serve(*WINDOW)
            with server.begin({"messages": [about(QUESTIONS[0], BOOK[number * 7000:][:6000])]}):
                time.sleep(choice.uniform(0.2, 1.2))
            server.stop(signal.SIGKILL)
        with open(self.dir + "/0123456789abcdef.1-0.part", "wb") as file:
            file.write(b"half")
        server = self.serve(*WINDOW)
        self.assertEqual(glob.glob(self.dir + "/*.part"), [])
        server.ask_about(QUESTIONS[0])
        self.assertGreater(cached(server.ask_about(QUESTIONS[1])), 0)
        self.assertNotIn("not used", server.stop())

    def test_a_folder_that_cannot_be_written_is_explained(self):
        with open(self.dir, "w", encoding="ascii"):
            pass
        for path in (self.dir, "/nowhere/at/all", "/proc"):
            out = subprocess.run([COMMAND, "serve", "-m", MODEL, "--port", "0", *WINDOW, "--cache-dir", path],
                                 capture_output=True, text=True, env=ENVIRONMENT, check=False)
            self.assertEqual(out.returncode, 1)
            self.assertRegex(out.stderr, r"\Athimble: [^\n]*" + path + r"[^\n]*\n\Z")
        out = subprocess.run([COMMAND, "serve", "-m", MODEL, "--cache-size", "1GB"], capture_output=True, text=True,
                             env=ENVIRONMENT, check=False)
        self.assertEqual(out.returncode, 2)

    def test_a_full_disk_costs_only_the_saved_state(self):
        server = self.serve(*WINDOW)
        subprocess.run(["prlimit", "--pid", str(server.process.pid), "--fsize=65536"], check=True)
        for question in QUESTIONS[:2]:
            self.assertEqual(cached(server.ask_about(question)), 0)
        body = server.chat([about(QUESTIONS[2], BOOK[30000:36000])], "/v1/messages", max_tokens=4)
        self.assertEqual(body["usage"]["cache_creation_input_tokens"], 0)
        self.assertEqual(glob.glob(self.dir + "/*.*"), [])
        log = server.stop()
        self.assertEqual(log.count("states are not saved"), 1, log)
        self.assertIn("File too large", log)

    def test_memory_stays_within_the_budget(self):
        server = self.serve(*WINDOW, "--mem-budget", "64MiB")
        for number in range(4):
            server.ask_about(QUESTIONS[number % 3], BOOK[8000 * (number // 2):][:30000])
        self.assertLess(server.anonymous_bytes(), (64 + 32) << 20)
        self.assertLessEqual(server.state()["memory"]["allocated"], 64 << 20)
        server.stop()

    def test_a_recurrent_model_goes_on_from_where_its_states_were_saved(self):
        tool = os.environ.get("THIMBLE_SHARED", SOURCE + "/../shared") + "/tools/synth_gguf.py"
        if not os.path.exists(tool) and "THIMBLE_REQUIRE_DATA" not in os.environ:
            self.skipTest(tool + " is missing")
        model = self.folder.name + "/lfm2.gguf"
        subprocess.run(["/usr/bin/python3", tool, "tiny-lfm2", "f16", model, "--seed", "1"], check=True,
                       stdout=subprocess.DEVNULL)
        ids = [random.Random(2).randrange(256) for _ in range(1000)]
        for policy in ([*DEVICE, "--retention", "none"], [*DEVICE, "--retention", "window", "--pool", "300"]):
            def ask(server, last):
                body = server.ask("POST", "/v1/completions", {"prompt": ids + [last] * 20, "max_tokens": 4, "logprobs": 3})[2]
                return cached(body), body["choices"][0]["text"], json.dumps(body["choices"][0]["logprobs"])
            with self.subTest(policy=policy[4:]):
                fresh = LoggedServer(*policy, "--slots", "1", model=model)
                expected = []
                for last in (1, 2):
                    fresh.set()
                    expected.append(ask(fresh, last)[1:])
                fresh.stop()
                border = last_border(1020, 0 if policy[-1] == "none" else 100)
                for number in range(2):
                    server = self.serve(*policy, model=model)
                    for at, last in enumerate((1, 2)):
                        self.assertEqual(ask(server, last), (border if number or at else 0, *expected[at]))
                    server.stop()
                # A conversation goes on from the states after its last answer.
                policy += ["--chat-template", "chatml"]
                server, messages = self.serve(*policy, model=model), []
                for text in (TEXT[:800], TEXT[800:1600]):
                    messages.append({"role": "user", "content": text})
                    body = server.chat(messages)
                    messages.append(body["choices"][0]["message"])
                messages.append({"role": "user", "content": "Why?"})
                server.settle()
                held = body["usage"]["total_tokens"]
                before, after = server.chat(messages, logprobs=True), None
                server.stop()
                server = self.serve(*policy, model=model)
                after = server.chat(messages, logprobs=True)
                self.assertEqual((cached(before), cached(after), answer(after)), (held, held, answer(before)))
                server.stop()


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
