#!/bin/sh
# Run this bundle on this machine. This needs Python 3.11 or newer (PYTHON, by default python3) and a package index.
set -eu
scripts=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
environment=$("${PYTHON:-python3}" "$scripts/bootstrap.py")
PATH="$environment/bin:$PATH"
export PATH
exec @COMMAND@ "$(dirname -- "$scripts")" "$@"
