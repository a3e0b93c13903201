#!/usr/bin/env python3
"""Reads a text inside 64 MiB and streams what comes next: example.py MODEL.gguf TEXT.txt"""
import sys

import thimble


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: example.py MODEL.gguf TEXT.txt", file=sys.stderr)
        return 2
    options = thimble.Options(budget_bytes=64 << 20, retention="window", pool=1024)
    try:
        with thimble.Model(sys.argv[1]) as model, model.session(options) as session, open(sys.argv[2], "rb") as text:
            session.feed(model.tokenize(text.read(), bos=True))  # Ctrl-C stops it
            for piece in session.generate(64):
                print(piece, end="", flush=True)
            print()
    except thimble.ThimbleError as error:
        print(f"example: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
