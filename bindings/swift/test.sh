#!/bin/sh
# test.sh CLANG FOLDER: imports the module with clang, as Swift does, and finds in it what Read.swift uses. FOLDER is clang's for
# modules.
set -eu
here=$(dirname "$(readlink -f "$0")")
{
  echo '#pragma clang module import CThimble'
  grep -oE '\b(thimble|THIMBLE)_\w+' "$here/Read.swift" | sort -u | sed 's/.*/typedef __typeof__(&) has_&;/'
  grep -oE '\b(options|error)\.\w+' "$here/Read.swift" | sort -u |
    sed -E 's/(.*)\.(.*)/typedef __typeof__(((thimble_session_\1*)0)->\2) has_\1_\2;/; s/thimble_session_error/thimble_error/'
} | "$1" -xc -std=c99 -Wall -Wextra -Wpedantic -Werror -fsyntax-only -fmodules -fmodules-cache-path="$2" \
  -fmodule-map-file="$here/module.modulemap" -
