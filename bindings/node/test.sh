#!/bin/sh
# test.sh FOLDER: runs the tests in a copy of this folder, where it installs what package-lock.json names.
set -eu
cd "$(dirname "$0")"
mkdir -p "$1"
cp ./*.js ./*.json "$1"
cd "$1"
cmp -s package-lock.json installed.json || npm ci --prefer-offline --fetch-retries 5 --ignore-scripts --no-audit --no-fund
cp package-lock.json installed.json
node --test test.js
