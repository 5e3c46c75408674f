#!/bin/sh
# Run this bundle here. Needs Python 3.11 or newer (PYTHON names it) and a package index.
set -eu
scripts=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
environment=$("${PYTHON:-python3}" "$scripts/bootstrap.py")
PATH="$environment/bin:$PATH"
export PATH
exec @COMMAND@ "$(dirname -- "$scripts")" "$@"
