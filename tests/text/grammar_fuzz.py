#!/usr/bin/env python3
"""grammar_fuzz.py TOOL FOLDER [COUNT [SEED [VOCABULARY.gguf]]]: compares grammars of JSON schemas with an independent validator.

TOOL is the program grammar_tool. The PyPI package jsonschema, and its source archive, which contains the official suite of JSON
schema cases, are installed in FOLDER. Without the network the exit code is 77 (skipped).

- The official suite (draft 2020-12, the files of FILES): no document that is invalid may be reached. A valid one must be reached if
  it is valid under the reading that docs/grammars.md states (strict()). Schemas that are refused are counted.
- COUNT random schemas: every text that random logits generate is valid, and random valid documents are reached.
"""
import glob
import json
import os
import random
import re
import subprocess
import sys
import tarfile

VERSION = "4.26.0"
FILES = """additionalProperties allOf anyOf boolean_schema const default defs enum exclusiveMaximum exclusiveMinimum items
maxItems maxLength maximum minItems minLength minimum multipleOf pattern properties ref required type not oneOf
infinite-loop-detection optional/format/date optional/format/time optional/format/date-time optional/format/uuid
optional/format/ipv4 optional/format/ipv6 optional/format/email optional/format/hostname optional/format/duration""".split()
SKIPPED = 77
# Constants are generated as the schema writes them.
AS_WRITTEN = ["same object with different property order is valid", "integer -2 is valid"]


def install(folder):
    """The folder with the suite's cases. Continues in a Python that has jsonschema."""
    python = f"{folder}/venv/bin/python"
    try:
        if not os.path.exists(f"{folder}/installed-{VERSION}"):
            run = lambda *words: subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=500)
            os.makedirs(folder, exist_ok=True)
            run(sys.executable, "-m", "venv", f"{folder}/venv")
            run(python, "-m", "pip", "-q", "install", f"jsonschema=={VERSION}")
            run(python, "-m", "pip", "-q", "download", "--no-deps", "--no-binary", "jsonschema", f"jsonschema=={VERSION}", "-d", folder)
            with tarfile.open(f"{folder}/jsonschema-{VERSION}.tar.gz") as archive:
                archive.extractall(folder)
            open(f"{folder}/installed-{VERSION}", "w").close()
    except (subprocess.SubprocessError, OSError) as failure:
        print("SKIPPED: jsonschema cannot be installed:", failure, getattr(failure, "stderr", b"")[-300:])
        sys.exit(SKIPPED)
    if os.path.realpath(sys.prefix) != os.path.realpath(f"{folder}/venv"):
        os.execv(python, [python, *sys.argv])
    return f"{folder}/jsonschema-{VERSION}/json/tests/draft2020-12"


class Tool:
    def __init__(self, path, *args):
        self.process = subprocess.Popen([path, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")

    def ask(self, request):
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the tool ended at: {request}"
        return answer.rstrip("\n")

    def schema(self, schema):
        """None, or why the schema is refused."""
        answer = self.ask("schema " + json.dumps(schema))
        return None if answer == "ok" else answer

    def reaches(self, text):
        return self.ask("accepts " + json.dumps(text, ensure_ascii=False)) == "yes"

    def sample(self, seed):
        answer = self.ask(f"sample {seed}")
        return None if answer == "unfinished" else json.loads(answer)


# ---- the official suite ----

OF_TYPES = {"object": ["properties", "required", "additionalProperties"], "array": ["items", "minItems", "maxItems"],
            "string": ["minLength", "maxLength", "pattern", "format"],
            "number": ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]}


def strict(schema):
    """The schema with what we add to it: keywords of a type demand it, and listed properties are the only ones."""
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    for key in ("properties", "$defs"):
        if isinstance(out.get(key), dict):
            out[key] = {name: strict(value) for name, value in out[key].items()}
    for key in ("anyOf", "allOf"):
        if key in out:
            out[key] = [strict({**{k: v for k, v in out.items() if k not in (key, "$defs", "$schema")}, **branch}
                               if isinstance(branch, dict) else branch) for branch in out[key]]
    for key in ("items", "additionalProperties"):
        if key in out:
            out[key] = strict(out[key])
    if "type" not in out and not {"enum", "const", "$ref", "anyOf", "allOf"} & out.keys():
        types = [t for t, keys in OF_TYPES.items() if any(key in out for key in keys)]
        if types:
            out["type"] = types
    if out.get("properties") and "additionalProperties" not in out and not {"anyOf", "allOf"} & out.keys():
        out["additionalProperties"] = False
        for name in out.get("required", []):
            out["properties"].setdefault(name, True)
    return out


def ordered(data, schema, root):
    """The document with members in the order of the schema, as far as that is easily found."""
    if isinstance(schema, dict) and "$ref" in schema:
        target = root
        for part in schema["$ref"].split("/")[1:]:
            part = part.replace("%25", "%").replace("%22", '"').replace("~1", "/").replace("~0", "~")
            target = target[int(part)] if isinstance(target, list) else target[part]
        return ordered(data, target, root)
    if not isinstance(schema, dict):
        return data
    for branch in schema.get("anyOf", []) + schema.get("allOf", []):
        data = ordered(data, branch, root)
    if isinstance(data, dict):
        names = list(schema.get("properties", {})) + list(schema.get("required", []))
        first = {name: ordered(data[name], schema.get("properties", {}).get(name, {}), root) for name in names if name in data}
        return {**first, **{name: value for name, value in data.items() if name not in first}}
    if isinstance(data, list):
        return [ordered(item, schema.get("items", {}), root) for item in data]
    return data


def whole_floats(data):
    """Whether the document has 1.0, which is an integer to JSON schema, and which is not generated for one."""
    if isinstance(data, dict):
        return any(map(whole_floats, data.values()))
    if isinstance(data, list):
        return any(map(whole_floats, data))
    return isinstance(data, float) and data.is_integer()


def official(tool, folder):
    from jsonschema import Draft202012Validator
    checker = Draft202012Validator.FORMAT_CHECKER
    counts = {"schemas": 0, "refused": 0, "invalid": 0, "valid": 0, "not of our reading": 0}
    wrong = []
    for name in FILES:
        for case in json.load(open(f"{folder}/{name}.json")):
            counts["schemas"] += 1
            schema = case["schema"]
            if tool.schema(schema) is not None:
                counts["refused"] += 1
                continue
            for test in case["tests"]:
                try:
                    text = json.dumps(ordered(test["data"], schema, schema), ensure_ascii=False)
                    text.encode()
                except UnicodeEncodeError:
                    continue
                reached = tool.reaches(text)
                # The suite of `format` itself takes formats as annotations; with a checker they are assertions.
                valid = test["valid"] and Draft202012Validator(schema, format_checker=checker).is_valid(test["data"])
                if test["description"] in AS_WRITTEN:
                    counts["not of our reading"] += 1
                elif not test["valid"]:
                    counts["invalid"] += 1
                    if reached:
                        wrong.append(f"{name}: {case['description']}: {test['description']}: reached but invalid")
                elif valid and not whole_floats(test["data"]) and Draft202012Validator(strict(schema)).is_valid(test["data"]):
                    counts["valid"] += 1
                    if not reached and not name.startswith("optional/format"):
                        wrong.append(f"{name}: {case['description']}: {test['description']}: valid but not reached")
                else:
                    counts["not of our reading"] += 1
    print("official suite:", ", ".join(f"{n} {what}" for what, n in counts.items()))
    for sentence in wrong:
        print("WRONG", sentence)
    return not wrong


# ---- random schemas ----

PATTERNS = [("^[a-z]{2,5}$", lambda r: "".join(r.choices("abcxyz", k=r.randint(2, 5)))),
            ("^(foo|bar)+[0-9]?$", lambda r: "".join(r.choices(["foo", "bar"], k=r.randint(1, 3))) + r.choice(["", "7"])),
            ("x", lambda r: r.choice(["x", "axb", 'x"', "\nx", "éx"])),
            ('^["\\\\/]*\\.$', lambda r: "".join(r.choices('"\\/', k=r.randint(0, 3))) + "."),
            ("^[^a]\\d{3}$", lambda r: r.choice(["é", "b", "\t", "你"]) + "123")]
FORMATS = [("date", lambda r: f"{r.randint(1, 9999):04}-{r.randint(1, 12):02}-{r.randint(1, 28):02}"),
           ("time", lambda r: f"{r.randint(0, 23):02}:{r.randint(0, 59):02}:{r.randint(0, 59):02}{r.choice(['Z', '+01:30', '.25Z'])}"),
           ("date-time", lambda r: f"2024-02-29T{r.randint(0, 23):02}:00:00{r.choice(['Z', '-08:00'])}"),
           ("uuid", lambda r: "-".join("".join(r.choices("0123456789abcdefABCDEF", k=k)) for k in (8, 4, 4, 4, 12))),
           ("ipv4", lambda r: ".".join(str(r.randint(0, 255)) for _ in range(4)))]
CHARACTERS = ["a", "b", " ", '"', "\\", "/", "\n", "\x01", "é", "你", "😀", "\u2028", "{", "]", ",", ":", "0"]
NAMES = ["a", "b", "ab", "name", "id", 'q"q', "é", "x y", "tab\t", "", "longer_name"]


def words(r, least, most):
    return "".join(r.choices(CHARACTERS, k=r.randint(least, most)))


def any_value(r, depth):
    kind = r.randint(0, 6 if depth > 0 else 4)
    if kind == 5:
        return [any_value(r, depth - 1) for _ in range(r.randint(0, 3))]
    if kind == 6:
        return {words(r, 0, 4): any_value(r, depth - 1) for _ in range(r.randint(0, 3))}
    return [None, True, r.randint(-999, 999), r.choice([0.5, -1.25, 1e30, 1e-7]), words(r, 0, 8)][kind]


class Schema:
    """A random schema, and a function that makes documents that it allows."""

    def __init__(self, r, depth, defs):
        self.r, self.defs = r, defs
        kinds = ["string", "pattern", "format", "integer", "number", "boolean", "null", "enum", "const", "any", "multiple"]
        if depth > 0:
            kinds += ["object"] * 6 + ["array"] * 4 + ["anyOf"] * 2 + ["types", "map"] + ["ref"] * (2 if defs is not None else 0)
        getattr(self, "make_" + r.choice(kinds))(depth)

    def inner(self, depth):
        return Schema(self.r, depth - 1, self.defs)

    def make_string(self, depth):
        r, low = self.r, self.r.choice([0, 0, 1, 3])
        high = r.choice([None, low, low + 4, 40])
        self.schema = {"type": "string", **({"minLength": low} if low else {}), **({} if high is None else {"maxLength": high})}
        self.document = lambda: words(r, low, 12 if high is None else high)

    def make_pattern(self, depth):
        pattern, make = self.r.choice(PATTERNS)
        self.schema, self.document = {"type": "string", "pattern": pattern}, lambda: make(self.r)

    def make_format(self, depth):
        name, make = self.r.choice(FORMATS)
        self.schema, self.document = {"type": "string", "format": name}, lambda: make(self.r)

    def make_integer(self, depth):
        r, low = self.r, self.r.choice([None, -1000, -15, 0, 1, 7, 99])
        high = r.choice([None, 5000 if low is None else low + r.choice([0, 1, 9, 13, 250, 12345])])
        self.schema = {"type": "integer"}
        if low is not None:
            self.schema.update(r.choice([{"minimum": low}, {"exclusiveMinimum": low - 1}, {"minimum": low - 0.5}]))
        if high is not None:
            self.schema.update(r.choice([{"maximum": high}, {"exclusiveMaximum": high + 1}]))
        low_bound = low if low is not None else (high if high is not None else 0) - 20000
        self.document = lambda: r.randint(low_bound, high if high is not None else low_bound + 30000)

    def make_number(self, depth):
        r, low = self.r, self.r.choice([None, -2.5, 0, 0.125, 3])
        high = r.choice([None, (4 if low is None else low) + r.choice([0.25, 1, 10.5])])
        self.schema = {"type": "number"}
        if low is not None:
            self.schema[r.choice(["minimum", "exclusiveMinimum"])] = low
        if high is not None:
            self.schema[r.choice(["maximum", "exclusiveMaximum"])] = high
        first, last = low if low is not None else (high or 0) - 9, high if high is not None else (low or 0) + 9
        def make():
            for _ in range(20):
                value = round(r.uniform(first, last), r.randint(1, 4))
                if first < value < last and "e" not in str(value):
                    return value
            return (first + last) / 2
        self.document = make

    def make_multiple(self, depth):
        n = self.r.choice([1, 2, 7, 10, 64, 100])
        self.schema, self.document = {"type": "integer", "multipleOf": n}, lambda: n * self.r.randint(-99, 999)

    def make_boolean(self, depth):
        self.schema, self.document = {"type": "boolean"}, lambda: self.r.random() < 0.5

    def make_null(self, depth):
        self.schema, self.document = {"type": "null"}, lambda: None

    def make_enum(self, depth):
        values = [any_value(self.r, 1) for _ in range(self.r.randint(1, 5))]
        self.schema, self.document = {"enum": values}, lambda: self.r.choice(values)

    def make_const(self, depth):
        value = any_value(self.r, 2)
        self.schema, self.document = {"const": value}, lambda: value

    def make_any(self, depth):
        self.schema, self.document = self.r.choice([True, {}, {"description": "any"}]), lambda: any_value(self.r, 2)

    def make_types(self, depth):
        self.schema, self.document = {"type": ["string", "null"], "maxLength": 3}, lambda: self.r.choice([None, words(self.r, 0, 3)])

    def make_object(self, depth):
        r, names = self.r, self.r.sample(NAMES, self.r.randint(0, 5))
        inner = {name: self.inner(depth) for name in names}
        required = [name for name in names if r.random() < 0.5]
        more = r.choice([False, False, False, "any", "schema"])
        extra = self.inner(depth) if more == "schema" else None
        self.schema = {"type": "object", "properties": {name: s.schema for name, s in inner.items()}, "required": required,
                       "additionalProperties": extra.schema if extra else more == "any"}
        def make():
            out = {name: s.document() for name, s in inner.items() if name in required or r.random() < 0.5}
            for _ in range(r.randint(0, 2) if more else 0):
                name = words(r, 0, 3)
                if name not in inner:
                    out[name] = extra.document() if extra else any_value(r, 1)
            return out
        self.document = make

    def make_map(self, depth):
        inner = self.inner(depth)
        self.schema = {"type": "object", "additionalProperties": inner.schema}
        self.document = lambda: {words(self.r, 0, 4): inner.document() for _ in range(self.r.randint(0, 3))}

    def make_array(self, depth):
        r, inner, low = self.r, self.inner(depth), self.r.choice([0, 0, 1, 2, 5])
        high = r.choice([None, low, low + 2, low + 6])
        self.schema = {"type": "array", "items": inner.schema, "minItems": low, **({} if high is None else {"maxItems": high})}
        self.document = lambda: [inner.document() for _ in range(r.randint(low, low + 4 if high is None else high))]

    def make_anyOf(self, depth):
        ways = [self.inner(depth) for _ in range(self.r.randint(1, 3))]
        self.schema, self.document = {"anyOf": [w.schema for w in ways]}, lambda: self.r.choice(ways).document()

    def make_ref(self, depth):
        """A list that refers to itself, with its element somewhere in the definitions."""
        name = f"d{len(self.defs)}"
        self.defs[name] = None
        inner = self.inner(depth)
        self.defs[name] = {"type": "object", "properties": {"value": inner.schema, "next": {"anyOf": [
            {"$ref": f"#/$defs/{name}"}, {"type": "null"}]}}, "required": ["value", "next"], "additionalProperties": False}
        def make(left):
            return {"value": inner.document(), "next": make(left - 1) if left else None}
        self.schema, self.document = {"$ref": f"#/$defs/{name}"}, lambda: make(self.r.randint(0, 3))


def random_schemas(tool, count, seed):
    from jsonschema import Draft202012Validator
    r = random.Random(seed)
    texts = unfinished = documents = 0
    for number in range(count):
        defs = {}
        made = Schema(r, r.randint(1, 4), defs)
        schema = made.schema
        if defs:
            schema = {**(schema if isinstance(schema, dict) else {}), "$defs": defs}
        refused = tool.schema(schema)
        assert refused is None, f"{refused}\n{json.dumps(schema)}"
        validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        for _ in range(6):
            text_seed = r.randrange(1 << 60)
            text = tool.sample(text_seed)
            if text is None:
                unfinished += 1
                continue
            texts += 1
            errors = list(validator.iter_errors(json.loads(text)))
            assert not errors, f"{text}\nis not valid: {errors[0].message}\n{json.dumps(schema)}\nseed {text_seed}"
            assert tool.reaches(text), f"{text}\nwas generated but is not reached\n{json.dumps(schema)}"
        for _ in range(4):
            document = made.document()
            if not validator.is_valid(document):  # a round number that is just outside, or two properties of one name
                continue
            documents += 1
            text = json.dumps(document, ensure_ascii=False, separators=r.choice([None, (",", ":"), (",\n", ": ")]))
            assert tool.reaches(text), f"{text}\nis valid but is not reached\n{json.dumps(schema)}"
    print(f"{count} random schemas: {texts} texts valid, {unfinished} not finished in 2000 tokens, {documents} documents reached")
    return unfinished <= texts / 10


def main():
    tool_path, folder = sys.argv[1:3]
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 300
    seed = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    suite = install(os.path.abspath(folder))
    tool = Tool(tool_path, *sys.argv[5:])
    good = official(tool, suite)
    good = random_schemas(tool, count, seed) and good
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
