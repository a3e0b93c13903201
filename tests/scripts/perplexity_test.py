#!/usr/bin/env python3
"""scripts/perplexity with the demo model, whose texts begin with BOS. The library is the one that THIMBLE_LIBRARY names."""
import json
import math
import os
import subprocess
import sys
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, os.path.join(ROOT, "bindings", "python"))
import thimble

MODEL, TEXT = os.path.join(ROOT, "models", "thimble-demo-28m-q8_0.gguf"), os.path.join(ROOT, "models", "demo-book.txt")
AFTER, TOKENS = 64, 16


def run_script(*words):
    return subprocess.run([sys.executable, os.path.join(ROOT, "scripts", "perplexity"), TEXT, "-m", MODEL, "--after", str(AFTER),
                           "--tokens", str(TOKENS), "device=cpu", *words], check=True, capture_output=True, text=True).stdout


class Perplexity(unittest.TestCase):
    def test_puts_bos_before_each_part(self):
        with thimble.Model(MODEL) as model, open(TEXT, encoding="utf-8") as file:
            bos, tokens = [model.info().bos], model.tokenize(file.read())
            expected = []
            for first in (0, len(tokens) - AFTER - TOKENS):
                part = bos + tokens[first:first + AFTER + TOKENS]
                with model.session(thimble.Options(device="cpu", context=len(part))) as session:
                    session.feed(part[:-TOKENS])
                    expected.append(math.exp(-sum(session.score(part[-TOKENS:])) / TOKENS))
        printed = json.loads(run_script("--parts", "2"))
        self.assertEqual(len(printed["of_parts"]), len(expected))
        for got, want in zip(printed["of_parts"], expected):
            self.assertAlmostEqual(got, want, delta=0.001)  # the script rounds to three places
        self.assertGreater(printed["pool_bytes"], 0)

    def test_prints_a_row_for_each_policy(self):
        head, _, *rows = run_script("--policies", "--parts", "1", "pool=32").splitlines()
        self.assertEqual(head, "| after | policy | entries | pool, MiB | perplexity | of dense |")
        cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
        self.assertEqual([row[1] for row in cells],
                         ["dense", "keydiff", "tova", "reread", "window", "random", "tokenselect", "quest"])
        self.assertEqual([row[2] for row in cells], ["all"] + 7 * ["32"])
        dense = float(cells[0][4])
        for row in cells:
            self.assertAlmostEqual(float(row[5].rstrip(" %")), 100 * float(row[4]) / dense, delta=0.2)  # both are rounded


if __name__ == "__main__":
    unittest.main()
