#!/bin/sh
# build.sh LIBTHIMBLE FOLDER: makes FOLDER/libthimblejni.so, linked with this libthimble, and FOLDER/thimble.jar. Asks for a JDK of
# version 17 or newer.
set -eu
library=$(readlink -f "$1")
mkdir -p "$2"
out=$(readlink -f "$2")
cd "$(dirname "$0")"
jdk=$(dirname "$(dirname "$(readlink -f "$(command -v javac)")")")
${CC:-cc} -std=c99 -O2 -Wall -Wextra -Wpedantic -shared -fPIC -fvisibility=hidden -I../../include -I"$jdk/include" \
  -I"$jdk/include/linux" thimblejni.c "$library" -o "$out/libthimblejni.so"
rm -rf "$out/classes"
javac --release 17 -Xlint:all -Werror -d "$out/classes" thimble/*.java
jar --create --file "$out/thimble.jar" -C "$out/classes" .
