#!/bin/sh
# test.sh FOLDER: builds into FOLDER, runs the tests and the example. THIMBLE_LIBRARY is the library, THIMBLE_LAYOUTS what
# layouts.py wrote, THIMBLE_ROOT the project's folder.
set -eu
cd "$(dirname "$0")"
CARGO_TARGET_DIR=$1
LD_LIBRARY_PATH=$(dirname "$THIMBLE_LIBRARY")
export CARGO_TARGET_DIR LD_LIBRARY_PATH
cargo test --offline --locked
head -c 4000 "$THIMBLE_ROOT/models/demo-book.txt" >"$1/text.txt"
answer=$(cargo run --offline --locked --quiet --example read "$THIMBLE_ROOT/models/thimble-demo-28m-q8_0.gguf" "$1/text.txt")
case $answer in
"rilled with the thought of"*) ;;
*) echo "the example said: $answer" >&2; exit 1 ;;
esac
