#!/usr/bin/env python3
"""layouts.py OUT.json: the layouts that the C compiler computes from thimble.h, for the bindings' tests to compare with.

Writes {"structs": {NAME: {"size": N, "fields": {FIELD: [OFFSET, SIZE]}}}, "constants": {NAME: VALUE}, "functions": [NAME]}. The
header's declarations are found by their form, the numbers come from a C program. What no binding has (LEFT_OUT) is not in it, so
that a test may ask for all of the rest. CC names the compiler; the default is cc.

Fails if a binding's list of session options (OPTION_LISTS) lacks an option of the header.
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

BINDINGS = pathlib.Path(__file__).resolve().parent
INCLUDE = BINDINGS.parent / "include"

# Bindings read texts; training and inspecting models are done with the command. Names with these prefixes are left out.
LEFT_OUT = re.compile(r"thimble_training|thimble_heads_(import|info|open_)|thimble_model_(open_|kv_heads|metadata|tensor)|thimble_tensor"
                      r"|thimble_device_(rates|measure)|thimble_progress|thimble_message|thimble_chat_text|thimble_token_bytes"
                      r"|thimble_session_(save_fd|restore_fd|file_bytes|plan_heads)|thimble_status_text|thimble_retention_traits|THIMBLE_TRAIT|THIMBLE_TRAINING|THIMBLE_VERSION"
                      r"|THIMBLE_CHAT_CONTINUE|THIMBLE_CHAT_PARSE_CONTENT"
                      r"|THIMBLE_TOKENIZE_CONTINUE|thimble_tokenize_cut")

# Where a binding lists the session options: the file, and the part of it. Names are written like_this or likeThis.
OPTION_LISTS = [("python/thimble/_c.py", r"^class thimble_session_options\b.*?\)\]$"),
                ("python/thimble/__init__.py", r"^class Options:.*?\n\n\n"),
                ("node/c.js", r"^  thimble_session_options:.*?\}\),$"),
                ("node/index.d.ts", r"^export interface SessionOptions \{.*?^\}$"),
                ("rust/thimble-sys/src/lib.rs", r"^    thimble_session_options \{.*?\}$"),
                ("rust/thimble/src/options.rs", r"^impl Options \{.*?^\}$"),
                ("java/thimblejni.c", r"^#define STRUCT thimble_session_options$.*?^#undef STRUCT$"),
                ("java/thimble/Options.java", r"^public final class Options \{.*?^\}$")]
# Fields that are not options, or that bindings have in another form.
OTHER_FIELDS = {"struct_size", "reserved", "progress", "progress_user", "device", "heads", "draft_model"}


def missing_options(fields):
    """A sentence for each list of options that lacks one of these fields."""
    for file, part in OPTION_LISTS:
        options = re.search(part, (BINDINGS / file).read_text(), re.MULTILINE | re.DOTALL).group()
        written = {re.sub(r"([A-Z])", lambda capital: "_" + capital.group().lower(), word) for word in re.findall(r"\w+", options)}
        for field in fields:
            if field not in OTHER_FIELDS and field not in written:
                yield f"bindings/{file} lacks the session option {field} of thimble.h; add it to the list there"


def declarations(header):
    """The header's structs as (name, fields), and the names of its constants and functions."""
    code = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    structs = []
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", code, re.DOTALL):
        fields = []
        for declaration in filter(None, map(str.strip, body.split(";"))):
            # "uint32_t layers, d_model", "char name[32]", "const char* device": names come last, before any bounds.
            fields += [re.search(r"(\w+)(?:\[\w+\])?$", part.strip()).group(1) for part in declaration.split(",")]
        structs.append((name, fields))
    constants = re.findall(r"#define (THIMBLE_\w+) +(?:\d|UINT32_MAX)", code)
    for body in re.findall(r"\benum \{(.*?)\}", code, re.DOTALL):
        constants += re.findall(r"\b(THIMBLE_\w+) *=", body)
    functions = re.findall(r"^THIMBLE_API .*?\b(thimble_\w+)\(", code, re.MULTILINE)
    # Declarations in any other form than the above must cause an error.
    assert len(structs) == len(re.findall(r"\bstruct \w+ \{", code)), "a struct of another form"
    assert len(functions) == len(re.findall(r"^THIMBLE_API", code, re.MULTILINE)), "a function of another form"
    return structs, constants, functions


def program(structs, constants):
    """A C program that prints their numbers as JSON."""
    lines = ['#include <stdio.h>', '#include "thimble/thimble.h"', "int main(void) {", 'printf("{\\"structs\\":{");']
    for index, (name, fields) in enumerate(structs):
        lines.append(f'printf("{"," if index else ""}\\"{name}\\":{{\\"size\\":%zu,\\"fields\\":{{", sizeof({name}));')
        for at, field in enumerate(fields):
            lines.append(f'printf("{"," if at else ""}\\"{field}\\":[%zu,%zu]", offsetof({name}, {field}), '
                         f"sizeof((({name}*)0)->{field}));")
        lines.append('printf("}}");')
    lines.append('printf("},\\"constants\\":{");')
    for index, name in enumerate(constants):
        lines.append(f'printf("{"," if index else ""}\\"{name}\\":%lld", (long long)({name}));')
    return "\n".join(lines + ['printf("}}");', "return 0;", "}"])


def main():
    structs, constants, functions = declarations((INCLUDE / "thimble" / "thimble.h").read_text())
    structs = [(name, fields) for name, fields in structs if not LEFT_OUT.match(name)]
    missing = list(missing_options(dict(structs)["thimble_session_options"]))
    if missing:
        sys.exit("\n".join(missing))
    constants = [name for name in constants if not LEFT_OUT.match(name)]
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "layouts.c"
        source.write_text(program(structs, constants))
        compiler = os.environ.get("CC", "cc").split()
        subprocess.run([*compiler, "-I", str(INCLUDE), str(source), "-o", f"{folder}/layouts"], check=True)
        layouts = json.loads(subprocess.run([f"{folder}/layouts"], check=True, capture_output=True).stdout)
    layouts["functions"] = [name for name in functions if not LEFT_OUT.match(name)]
    pathlib.Path(sys.argv[1]).write_text(json.dumps(layouts, indent=1) + "\n")
    print(f"{len(structs)} structs, {len(constants)} constants, {len(layouts['functions'])} functions")


if __name__ == "__main__":
    main()
