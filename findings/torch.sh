# Sourced by the scripts: installs the pinned torch, and defines `run`, which runs a Python program with it.
# FINDINGS_ENV: a folder to install into, so that several scripts share one installation. Default: a temporary one.
set -eu
VERSION=${VERSION:-2.14.1}
if [ -n "${FINDINGS_ENV:-}" ]; then
    folder=$FINDINGS_ENV
else
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
fi
if [ ! -x "$folder/bin/python" ]; then
    python3 -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet "torch==$VERSION" numpy
fi
run() { OMP_NUM_THREADS=1 "$folder/bin/python" -W ignore - ; }
