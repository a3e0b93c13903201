#!/usr/bin/env python3
"""Writes case_table.h, the letters' cases and the digits of text.cpp, as Python's str has them.

    case_table.py > case_table.h
"""
import unicodedata


def ranges(mapped):
    """(code point, mapped) in ascending order as [first, last, step, delta]."""
    found = []
    for value, to in mapped:
        delta = to - value
        if found:
            first, last, step, known = found[-1]
            if known == delta and (value - last == step or (first == last and value - last <= 2)):
                found[-1] = [first, value, value - last, delta]
                continue
        found.append([value, value, 1, delta])
    return found


def emit(kind, name, items):
    print(f"inline constexpr {kind} {name}[] = {{")
    row = ""
    for item in items:
        if len(row) + len(item) > 108:
            print(row.rstrip())
            row = ""
        row += item + ", "
    print(row.rstrip() + "\n};")


def literal(text):
    return '"' + "".join(f"\\x{b:02x}" for b in text.encode()) + '"'


def main():
    letters = [chr(c) for c in range(0x80, 0x110000) if not 0xD800 <= c < 0xE000]
    print(f"// Cases of letters and digits beyond ASCII, Unicode {unicodedata.unidata_version}: made by case_table.py, do not edit.")
    print("#pragma once\n\n#include <cstdint>\n\nnamespace thimble::jinja {\n")
    print("// Every step-th code point of a range differs from its counterpart by delta.\nstruct CaseRange {\n  uint32_t first, last, step;\n  int32_t delta;\n};")
    print("// Letters whose counterparts are several: large, and at the begin of a word.\nstruct WideCase {\n  uint32_t letter;\n  const char *upper, *title;\n};")
    print("struct DigitRange {\n  uint32_t first, last;\n};\n\n// clang-format off")
    for name, change in (("kUpper", str.upper), ("kLower", str.lower), ("kTitle", str.title)):
        known = [(ord(c), ord(change(c))) for c in letters if len(change(c)) == 1 and change(c) != c]
        if name == "kTitle":
            known = [(c, t) for c, t in known if chr(t) != chr(c).upper()]
        emit("CaseRange", name, ["{0x%x, 0x%x, %d, %d}" % tuple(r) for r in ranges(known)])
    emit("WideCase", "kWide", ["{0x%x, %s, %s}" % (ord(c), literal(c.upper()), literal(c.title()))
                               for c in letters if len(c.upper()) > 1])
    for name, holds in (("kDigits", str.isdigit), ("kDecimals", str.isdecimal)):
        found = []
        for c in map(ord, filter(holds, letters)):
            if found and found[-1][1] == c - 1:
                found[-1][1] = c
            else:
                found.append([c, c])
        emit("DigitRange", name, ["{0x%x, 0x%x}" % tuple(r) for r in found])
    print("// clang-format on\n\n}  // namespace thimble::jinja")


main()
