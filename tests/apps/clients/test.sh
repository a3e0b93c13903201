#!/bin/sh
# test.sh FOLDER COMMAND SOURCE_FOLDER: runs the clients against thimble serve, in a folder into which it
# installs the packages of package-lock.json.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
cd "$1"
cp "$here"/*.mjs "$here"/*.json .
cmp -s package-lock.json installed.json || npm ci --prefer-offline --fetch-retries 5 --ignore-scripts --no-audit --no-fund
cp package-lock.json installed.json
# Write a model that calls tools.
PYTHONPATH=$here/.. PYTHONDONTWRITEBYTECODE=1 python3 -c 'import sys, serve_tools; serve_tools.write_model(sys.argv[3])' "$2" "$3" chain.gguf
node openai.mjs "$2" "$3"
node anthropic.mjs "$2" "$3"
