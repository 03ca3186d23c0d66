# Sourced with pinned packages: sets PY to a Python that has them, in a temporary environment that is removed at the end.
# PY_WITH_PACKAGES=/path/to/python skips the installation.
set -e
if [ -n "$PY_WITH_PACKAGES" ]; then
    PY=$PY_WITH_PACKAGES
else
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    python3 -m venv "$folder"
    PY=$folder/bin/python
    "$PY" -m pip install --quiet --disable-pip-version-check "$@"
fi
"$PY" -c 'import importlib.metadata as m, sys
for name in sys.argv[1:]:
    print(name.split("==")[0], m.version(name.split("==")[0]))' "$@"
