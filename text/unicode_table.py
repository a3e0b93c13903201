#!/usr/bin/env python3
"""Writes unicode_table.h, the character classes of expression.cpp, from the Unicode Character Database.

    unicode_table.py UnicodeData.txt VERSION > unicode_table.h      (Debian: package unicode-data)
"""
import sys

SPACES = {*range(0x9, 0xE), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}


# A class of its own for each kind of letter, one after the other; the others by their first character.
NAMES = {"Lu": "kUpper", "Lt": "kTitle", "Ll": "kLower", "Lm": "kModifier", "Lo": "kLetter", "M": "kMark", "N": "kNumber",
         "P": "kPunctuation", "S": "kSymbol"}


def char_class(code_point, category):
    return "kSpace" if code_point in SPACES else NAMES.get(category, NAMES.get(category[0]))


def code_points(path):
    first = None
    for line in open(path, encoding="ascii"):
        value, name, category = line.split(";")[:3]
        value = int(value, 16)
        if name.endswith(", First>"):
            first = value
            continue
        for v in range(value if first is None else first, value + 1):
            yield v, category
        first = None


def main():
    path, version = sys.argv[1:]
    ranges = []
    for value, category in code_points(path):
        c = char_class(value, category)
        if c is None:
            continue
        if ranges and ranges[-1][1] == value - 1 and ranges[-1][2] == c:
            ranges[-1][1] = value
        else:
            ranges.append([value, value, c])
    print(f"// Character classes of Unicode {version}: made by unicode_table.py, do not edit.\n// Ascending; what is in no range is kOther.")
    print("#pragma once\n\n#include <cstdint>\n\nnamespace thimble {\n")
    print("enum class CharClass : uint8_t {\n" + "".join(f"  {name},\n" for name in ["kOther", *NAMES.values(), "kSpace"]) + "};\n")
    print("struct CharRange {\n  uint32_t first, last;\n  CharClass is;\n};\n")
    print("// clang-format off\ninline constexpr CharRange kCharRanges[] = {")
    row = ""
    print("#define R(first, last, is) {0x##first, 0x##last, CharClass::is},")
    for first, last, c in ranges:
        item = f"R({first:X}, {last:X}, {c}) "
        if len(row) + len(item) > 118:
            print(row.rstrip())
            row = ""
        row += item
    print(row.rstrip() + "\n#undef R\n};\n// clang-format on\n\n}  // namespace thimble")


main()
