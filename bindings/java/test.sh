#!/bin/sh
# test.sh FOLDER: builds into FOLDER, runs the tests and the example. THIMBLE_LIBRARY is the library, THIMBLE_LAYOUTS what
# layouts.py wrote, THIMBLE_ROOT the project's folder.
set -eu
cd "$(dirname "$0")"
./build.sh "$THIMBLE_LIBRARY" "$1"
THIMBLE_JNI=$(readlink -f "$1")/libthimblejni.so
export THIMBLE_JNI
rm -rf "$1/tests"
javac --release 17 -Xlint:all -Werror -cp "$1/classes" -d "$1/tests" test/*.java
java -Xcheck:jni -cp "$1/classes:$1/tests" thimble.BindingTest | tee "$1/log"
if ! grep -q ', 0 failed$' "$1/log" || grep '^WARNING' "$1/log"; then exit 1; fi # -Xcheck:jni warns on the standard output
head -c 4000 "$THIMBLE_ROOT/models/demo-book.txt" >"$1/text.txt"
answer=$(java -cp "$1/thimble.jar" Read.java "$THIMBLE_ROOT/models/thimble-demo-28m-q8_0.gguf" "$1/text.txt")
case $answer in
"rilled with the thought of"*) ;;
*) echo "the example said: $answer" >&2; exit 1 ;;
esac
