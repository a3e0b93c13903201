#!/usr/bin/env python3
"""The ten questions of scripts/demo: its command, with the thimble that THIMBLE_COMMAND names."""
import json
import os
import re
import shlex
import subprocess
import tempfile
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


def demo_arguments():
    with open(os.path.join(ROOT, "scripts", "demo"), encoding="utf-8") as file:
        command = re.search(r"build-demo/bin/thimble (run .*?)\n\n", file.read(), re.DOTALL).group(1)
    return shlex.split(command.replace("\\\n", ""))


class Demo(unittest.TestCase):
    def test_answers_also_what_it_evicted(self):
        with tempfile.TemporaryDirectory() as folder:
            session = os.path.join(folder, "demo.session")
            arguments = [session if word == "$session" else word for word in demo_arguments()]
            run = json.loads(subprocess.run([os.environ["THIMBLE_COMMAND"], *arguments, "--json"], cwd=ROOT, check=True,
                                            env={**os.environ, "TMPDIR": folder}, stdout=subprocess.PIPE, text=True).stdout)
        self.assertEqual(run["judged"], 10)
        # Without the store, the three quotes are wrong. On another machine, rounding may change one answer.
        self.assertGreaterEqual(run["right"], 9, [(q["answer"], q["expected"]) for q in run["questions"] if not q["correct"]])
        self.assertEqual(run["budget_bytes"], 64 << 20)
        self.assertLessEqual(run["memory"]["allocated"], run["budget_bytes"])


if __name__ == "__main__":
    unittest.main()
