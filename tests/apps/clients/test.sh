#!/bin/sh
# test.sh FOLDER COMMAND SOURCE_FOLDER: runs the clients against thimble serve, in a folder into which it
# installs the packages of package-lock.json and requirements.txt. Clients of Python ask a real model, if it is
# where scripts/real-models puts it.
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

model=${THIMBLE_MODELS:-${XDG_CACHE_HOME:-$HOME/.cache}/thimble/models}/Qwen2.5-Coder-0.5B-Instruct-Q4_K_M.gguf
if [ ! -f "$model" ]; then
  echo "clients of Python SKIPPED: $model is missing; scripts/real-models fetches it"
  case ${THIMBLE_REQUIRE_MODELS:-} in *qwen-0.5b*) exit 1 ;; esac
  exit 0
fi
[ -d python ] || python3 -m venv python
cmp -s "$here/requirements.txt" installed.txt || python/bin/pip install -q --retries 5 -r "$here/requirements.txt"
cp "$here/requirements.txt" installed.txt
PYTHONDONTWRITEBYTECODE=1 python/bin/python "$here/clients.py" "$2" "$3" "$model"
