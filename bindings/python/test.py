#!/usr/bin/env python3
"""The Python binding's tests. THIMBLE_LIBRARY is the library, THIMBLE_LAYOUTS what layouts.py wrote."""
import ctypes
import gc
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import unittest
import unittest.mock

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.dont_write_bytecode = True  # the sources' folder stays as it is
sys.path.insert(0, str(HERE))

import thimble  # noqa: E402
from thimble import _c  # noqa: E402

MODEL = ROOT / "models" / "thimble-demo-28m-q8_0.gguf"
BOOK = ROOT / "models" / "demo-book.txt"
OPTIONS = thimble.Options(threads=2, device="cpu", budget_bytes=64 << 20, retention="window", pool=256, chunk=128)


class Layouts(unittest.TestCase):
    """What is declared in _c.py is what the C compiler makes of the header."""

    layouts = json.loads(pathlib.Path(os.environ["THIMBLE_LAYOUTS"]).read_text())

    def test_structs_are_the_headers(self):
        ours = {struct.__name__: {"size": ctypes.sizeof(struct),
                                  "fields": {name: [getattr(struct, name).offset, getattr(struct, name).size]
                                             for name, _ in struct._fields_}} for struct in _c.STRUCTS}
        self.assertEqual(ours, self.layouts["structs"])

    def test_constants_and_functions_are_the_headers(self):
        self.assertEqual(_c.CONSTANTS, self.layouts["constants"])
        self.assertEqual(sorted(name for name, _, _ in _c.FUNCTIONS), sorted(self.layouts["functions"]))


class Runner:
    """Runs the steps of the conformance script."""

    def __init__(self, folder):
        self.path = os.path.join(folder, "session")
        self.sessions = {}

    def run(self, step):
        step = {key: value for key, value in step.items() if key != "expect"}
        verb = step.pop("do")
        if "session" in step and verb != "create":
            name = step.pop("session")
            step["session"] = self.sessions.pop(name) if verb == "close" else self.sessions[name]
        try:
            return getattr(self, verb)(**step)
        except thimble.ThimbleError as error:
            return {"error": error.name}

    def options(self, given):
        given = {"device": "cpu", **given}
        if given.pop("heads", False):
            given["heads"] = self.heads
        if given.pop("draft_model", False):
            given["draft_model"] = self.model
        return thimble.Options(**given)

    def position(self, session):
        return {"position": session.stats().position}

    def pick(self, value, *names):
        return {name: getattr(value, name) for name in names}

    def open(self, model, heads):
        self.model = thimble.Model(ROOT / model)
        self.heads = self.model.heads(ROOT / heads)
        return {"warnings": len(self.model.warnings)}

    def info(self):
        self.shape = self.model.info()
        return self.pick(self.shape, "layers", "kv_heads", "vocab", "context_length", "eos", "parameters", "architecture",
                         "quantization", "chat_format", "window_layers")

    def tokenize(self, text, **flags):
        return {"ids": self.model.tokenize(text, **flags)}

    def detokenize(self, ids, special=False):
        return {"text": self.model.detokenize(ids, special)}

    def ends(self, token):
        return {"ends": self.model.token_ends(token)}

    def chat(self, messages):
        return {"text": self.model.chat(messages)}

    def plan(self, options):
        memory = self.model.plan(self.options(options))
        return {**self.pick(memory, "pool", "capacity", "chunk", "budget", "dense_bytes_per_token"),
                "fits": memory.total <= memory.budget}

    def fits(self, options, **changed):
        try:
            self.model.plan(self.options({**options, **changed}))
            return True
        except thimble.ThimbleError:
            return False

    def refused(self, options):
        try:
            self.model.session(self.options(options)).close()
            return {}
        except thimble.ThimbleError as error:
            enough = options["budget_bytes"] + error.bytes_missing
            return {"code": error.code, "name": error.name, "says_why": str(error) != "",
                    "bytes_missing_is_enough": self.fits(options, budget_bytes=enough),
                    "a_byte_less_is_not": not self.fits(options, budget_bytes=enough - 1)}

    def largest_pool(self, options):
        pool = self.model.largest_pool(self.options(options))
        return {"fits": self.fits(options, pool=pool), "one_more_does_not": not self.fits(options, pool=pool + 1)}

    def create(self, session, options):
        self.sessions[session] = self.model.session(self.options(options))
        return self.position(self.sessions[session])

    def read(self, session, file=None, bytes=0, text=None, piece=None, bos=False):
        ids = self.model.tokenize((ROOT / file).read_bytes()[:bytes] if file else text, bos=bos)
        for at in range(0, len(ids), piece or len(ids)):
            session.feed(ids[at: at + (piece or len(ids))])
        return self.position(session)

    def step(self, session, count):
        tokens, text = [], ""
        for _ in range(count):
            tokens.append(session.step())
            text += session.text(tokens[-1])
        return {"tokens": tokens, "text": text}

    def accept(self, session, token):
        session.accept(token)
        return self.position(session)

    def flush(self, session):
        session.flush()
        return self.position(session)

    def reset(self, session):
        session.reset()
        return self.position(session)

    def rewind(self, session, position):
        session.rewind(position)
        return self.position(session)

    def interrupt(self, session):
        session.interrupt()
        return {"asked": True}

    def score(self, session, ids):
        return {"logprobs": session.score(ids)}

    def logits(self, session):
        logits = session.logits()
        return {"count": len(logits), "best": logits.index(max(logits))}

    def sample(self, session, **sampler):
        session.set_sampler(thimble.Sampler(**sampler))
        return {"set": True}

    def grammar(self, session, kind, text=""):
        if kind == "none":
            session.set_grammar(None)
        else:
            with self.model.grammar(kind, text) as grammar:
                session.set_grammar(grammar)
        return {"set": True}

    def clone(self, session, **twin):
        self.sessions[twin["as"]] = session.clone()
        return self.position(self.sessions[twin["as"]])

    def save(self, session, note):
        session.save(self.path, note.encode())
        return {"saved": True}

    def restore(self, session):
        session.restore(self.path)
        return self.position(session)

    def saved(self):
        return {"position": thimble.session_file_info(self.path)["position"],
                "note": thimble.session_file_note(self.path).decode()}

    def kept(self, session, layer, kv_head, only_count=False):
        positions = session.kept(layer, kv_head)
        return {"count": len(positions)} if only_count else {"positions": positions}

    def stored_by_position(self, session):
        stored = session.stored_by_position()
        return {"count": len(stored), "entries": round(sum(stored) * self.shape.layers * self.shape.kv_heads)}

    def kept_by_position(self, session):
        kept, attended = session.kept_by_position()
        return {"count": len(kept), "entries": round(sum(kept) * self.shape.layers * self.shape.kv_heads),
                "attention_in_thousandths": round(sum(attended) * 1000)}

    def stats(self, session):
        return self.pick(session.stats(), "position", "waiting", "entries", "evictions", "generated", "prefill_tokens")

    def memory(self, session):
        memory = session.memory()
        return {**self.pick(memory, "pool", "capacity"), "holds_some": memory.allocated > 0,
                "within_the_budget": memory.allocated <= memory.budget}

    def decided(self, session):
        return self.pick(session.options(), "pool", "chunk", "stabilizers", "local", "protect_init", "max_new", "select_prefill")

    def shrink(self, session, pool):
        return {"freed_some": session.shrink(pool) > 0}

    def close(self, session):
        session.close()
        return {"closed": True}

    def close_model(self):
        self.model.close()
        self.heads.close()
        return {"closed": True}


class Conformance(unittest.TestCase):
    def same(self, given, expected):
        """Numbers with a fraction may differ by a hundredth; everything else must be equal."""
        if isinstance(expected, dict):
            return isinstance(given, dict) and given.keys() == expected.keys() and all(
                self.same(given[key], expected[key]) for key in expected)
        if isinstance(expected, list):
            return isinstance(given, list) and len(given) == len(expected) and all(map(self.same, given, expected))
        if isinstance(expected, float):
            return abs(given - expected) <= 0.01
        return type(given) is type(expected) and given == expected

    def test_every_step_gives_what_the_script_says(self):
        script = json.loads((HERE.parent / "conformance" / "script.json").read_text())
        with tempfile.TemporaryDirectory() as folder:
            runner = Runner(folder)
            for step in script["steps"]:
                with self.subTest(step=step):
                    given = runner.run(step)
                    self.assertTrue(self.same(given, step["expect"]), f"gave {given}")


class Interrupts(unittest.TestCase):
    def setUp(self):
        self.model = thimble.Model(MODEL)
        self.ids = self.model.tokenize(BOOK.read_bytes(), bos=True)
        self.session = self.model.session(OPTIONS)

    def tearDown(self):
        self.session.close()
        self.model.close()

    def test_ctrl_c_stops_a_reading_which_then_goes_on(self):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started this in the background
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with self.assertRaises(KeyboardInterrupt):
            self.session.feed(self.ids)
        read = self.session.stats()
        self.assertLess(read.position - read.waiting, len(self.ids) / 2)
        short = self.ids[:1000]  # and the session is of use
        self.session.reset()
        self.session.feed(short)
        self.assertIsInstance(self.session.step(), int)

    def test_ctrl_c_while_the_reading_starts_stops_it(self):
        threads = []

        class Unstarted(threading.Thread):
            def start(self):
                threads.append(self)
                raise KeyboardInterrupt

        class Started(threading.Thread):
            def start(self):
                super().start()
                raise KeyboardInterrupt

        with unittest.mock.patch("threading.Thread", Unstarted), self.assertRaises(KeyboardInterrupt):
            self.session.feed(self.ids)
        threads[0].run()  # as one that the system starts later
        self.assertEqual(self.session.stats().position, 0)
        with unittest.mock.patch("threading.Thread", Started), self.assertRaises(KeyboardInterrupt):
            self.session.feed(self.ids)
        read = self.session.stats()
        self.assertLess(read.position - read.waiting, len(self.ids) / 2)

    def test_another_thread_stops_a_reading_and_the_same_call_goes_on(self):
        few = self.ids[:2000]
        timer = threading.Timer(0.05, self.session.interrupt)
        timer.start()
        # A busy machine may wake the timer after a reading has ended, so the session reads until it is stopped.
        readings = 1
        with self.assertRaises(thimble.ThimbleError) as raised:
            while True:
                self.session.feed(few)
                readings += 1
        self.assertEqual(raised.exception.name, "INTERRUPTED")
        self.session.feed(few)
        self.assertEqual(self.session.stats().position, readings * len(few))

    def test_a_ctrl_c_that_came_late_does_not_fail_the_next_call(self):
        self.session.interrupt()
        self.session._stopped_late = True  # as after a call that was over when the interrupt came
        self.session.feed(self.ids[:1000])
        self.assertEqual(self.session.stats().position, 1000)


class Lifetimes(unittest.TestCase):
    def test_a_session_holds_its_model(self):
        session = thimble.Model(MODEL).session(OPTIONS)
        gc.collect()
        session.feed(session.model.tokenize("Once upon a time"))
        self.assertIsInstance(session.step(), int)

    def test_a_model_that_is_closed_serves_its_sessions(self):
        with thimble.Model(MODEL) as model:
            ids = model.tokenize("Once upon a time")
            session = model.session(OPTIONS)
        session.feed(ids)
        self.assertTrue(all(session.generate(4)))
        session.close()

    def test_a_closed_session_says_so(self):
        with thimble.Model(MODEL) as model:
            session = model.session(OPTIONS)
            session.close()
            session.close()
            with self.assertRaisesRegex(ValueError, "closed"):
                session.stats()
        with self.assertRaisesRegex(ValueError, "closed"):
            model.info()

    def test_heads_of_another_model_are_refused(self):
        with thimble.Model(MODEL) as one, thimble.Model(MODEL) as other:
            heads = other.heads(ROOT / "models" / "thimble-demo-28m.locret.gguf")
            with self.assertRaisesRegex(ValueError, "another model"):
                one.session(thimble.Options(heads=heads))

    def test_errors_say_what_is_wrong(self):
        with self.assertRaises(thimble.ThimbleError) as raised:
            thimble.Model(ROOT / "no-such-file.gguf")
        self.assertEqual(raised.exception.name, "IO")
        self.assertIn("no-such-file.gguf", str(raised.exception))
        with thimble.Model(MODEL) as model, self.assertRaisesRegex(ValueError, "retention"):
            model.plan(thimble.Options(retention="everything"))


class Files(unittest.TestCase):
    def test_the_wheel_holds_all_that_it_needs(self):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, str(HERE / "make_wheel.py"), os.environ["THIMBLE_LIBRARY"], folder], check=True,
                           stdout=subprocess.DEVNULL)
            (wheel,) = pathlib.Path(folder).glob("*.whl")
            subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), folder], check=True)
            environment = {key: value for key, value in os.environ.items() if key != "THIMBLE_LIBRARY"}
            run = subprocess.run([sys.executable, "-c", "import thimble; print(thimble.__file__, thimble.version())"],
                                 cwd=folder, env=environment, check=True, capture_output=True, text=True)
            self.assertEqual(run.stdout.split(), [f"{folder}/thimble/__init__.py", thimble.version()])

    def test_the_example_streams_an_answer(self):
        with tempfile.TemporaryDirectory() as folder:
            text = pathlib.Path(folder) / "text.txt"
            text.write_bytes(BOOK.read_bytes()[:4000])
            run = subprocess.run([sys.executable, str(HERE / "example.py"), str(MODEL), str(text)], check=True,
                                 capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(HERE)})
            self.assertTrue(run.stdout.startswith("rilled with the thought of"), run.stdout)

    def test_the_processor_is_among_the_devices(self):
        self.assertIn("cpu", [device.name for device in thimble.devices()])


if __name__ == "__main__":
    unittest.main()
