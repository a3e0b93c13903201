#!/bin/sh
# test.sh JAVA FOLDER: compiles the Kotlin sources against what java/test.sh built in JAVA, and runs the example.
set -eu
java=$(readlink -f "$1")
mkdir -p "$2"
cd "$(dirname "$0")"
kotlinc -cp "$java/thimble.jar" Answers.kt Read.kt -include-runtime -d "$2/read.jar" 2>"$2/log" || { cat "$2/log" >&2; exit 1; }
THIMBLE_JNI=$java/libthimblejni.so
export THIMBLE_JNI
head -c 4000 "$THIMBLE_ROOT/models/demo-book.txt" >"$2/text.txt"
answer=$(java -cp "$2/read.jar:$java/thimble.jar" ReadKt "$THIMBLE_ROOT/models/thimble-demo-28m-q8_0.gguf" "$2/text.txt")
case $answer in
"rilled with the thought of"*) ;;
*) echo "the example said: $answer" >&2; exit 1 ;;
esac
