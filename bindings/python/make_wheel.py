#!/usr/bin/env python3
"""make_wheel.py LIBTHIMBLE FOLDER: writes a wheel of the package with this library in it; needs nothing but Python.

The tag says linux_x86_64 and no more: the library asks for the system's libraries that it was built with.
"""
import base64
import hashlib
import pathlib
import re
import sys
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
TAG = "py3-none-linux_x86_64"


def main() -> None:
    library, folder = map(pathlib.Path, sys.argv[1:3])
    header = (HERE.parent.parent / "include" / "thimble" / "thimble.h").read_text()
    version = ".".join(re.findall(r"#define THIMBLE_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))
    info = f"thimble-{version}.dist-info"
    files = {f"thimble/{path.name}": path.read_bytes() for path in sorted((HERE / "thimble").iterdir()) if path.is_file()}
    files["thimble/libthimble.so"] = library.read_bytes()
    files[f"{info}/METADATA"] = (f"Metadata-Version: 2.1\nName: thimble\nVersion: {version}\nRequires-Python: >=3.9\n"
                                 "Summary: Reads long texts with a language model inside a byte budget\n"
                                 "License: MIT\n").encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: make_wheel\nRoot-Is-Purelib: false\nTag: {TAG}\n".encode()
    files[f"{info}/LICENSE"] = (HERE.parent.parent / "LICENSE").read_bytes()

    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()

    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"thimble-{version}-{TAG}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name)  # with the date 1980, so that the same files give the same wheel
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            out.writestr(entry, data)
    print(wheel)


if __name__ == "__main__":
    main()
