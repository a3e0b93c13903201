#!/bin/sh
# test.sh JAVA FOLDER COROUTINES: compiles the Kotlin sources against what java/test.sh built in JAVA and against
# kotlinx.coroutines, runs the example, the conformance script, and the test of flows.
set -eu
java=$(readlink -f "$1")
mkdir -p "$2"
coroutines=$3
cd "$(dirname "$0")"
kotlinc -Werror -cp "$java/thimble.jar:$java/tests:$coroutines" Answers.kt Flows.kt Read.kt test/*.kt -include-runtime -d "$2/read.jar" \
  2>"$2/log" || { cat "$2/log" >&2; exit 1; }
THIMBLE_JNI=$java/libthimblejni.so
export THIMBLE_JNI
model=$THIMBLE_ROOT/models/thimble-demo-28m-q8_0.gguf
head -c 4000 "$THIMBLE_ROOT/models/demo-book.txt" >"$2/text.txt"
answer=$(java -cp "$2/read.jar:$java/thimble.jar" ReadKt "$model" "$2/text.txt")
case $answer in
"rilled with the thought of"*) ;;
*) echo "the example said: $answer" >&2; exit 1 ;;
esac
java -cp "$2/read.jar:$java/thimble.jar:$java/tests" thimble.ConformanceTestKt "$THIMBLE_ROOT" "$2/saved"
head -c 32000 "$THIMBLE_ROOT/models/demo-book.txt" >"$2/text.txt"
java -cp "$2/read.jar:$java/thimble.jar:$coroutines" FlowTestKt "$model" "$2/text.txt"
