#!/usr/bin/env bash
# Builds dist/*.tar.gz and dist/*.whl, checks them, and tries both in a clean environment. `make dist` calls it.
#
#   tools/dist.sh BIN        BIN: the folder of an environment with the extra `dist`
#
# The wheel is tried with a PATH that has no compiler. The builds have the time of the last commit as their date, so that the
# same commit gives the same bits.
set -euo pipefail
cd "$(dirname "$0")/.."
BIN=${1:-.venv/bin}
BIN=$(cd "$BIN" && pwd)
PYTHON=${PYTHON:-python3}
# setup.py takes the date of the commit; auditwheel has to be told
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export PIP_DISABLE_PIP_VERSION_CHECK=1

rm -rf dist build
"$BIN/python" -m build --outdir dist .

if [ "$(uname)" = Linux ]; then    # manylinux: the oldest system that has every symbol of the library
    PATH="$BIN:$PATH" "$BIN/auditwheel" repair --wheel-dir dist/repaired dist/*-linux_*.whl
    rm dist/*-linux_*.whl
    mv dist/repaired/*.whl dist/ && rmdir dist/repaired
fi
"$BIN/twine" check --strict dist/*
test "$(stat -c %s dist/*.whl 2>/dev/null || stat -f %z dist/*.whl)" -le 5242880 || { echo "the wheel is larger than 5 MB" >&2; exit 1; }

clean=$(mktemp -d)
trap 'rm -rf "$clean"' EXIT
mkdir "$clean/path"                # what is left of PATH: no compiler
for tool in bash env uname; do ln -s "$(command -v $tool)" "$clean/path/$tool"; done

"$PYTHON" -m venv "$clean/env"
try() {    # WHAT WANTED PATH: installs WHAT in place of the last one, and says whether the kernels are as WANTED
    PATH="$3" "$clean/env/bin/python" -m pip install --quiet --force-reinstall --no-deps --no-cache-dir "$1"
    (cd "$clean" && CREDO_WANTED=$2 PATH="$3" "$clean/env/bin/python" "$OLDPWD/tools/try_install.py")
}
wheel=$(echo dist/*.whl)
sdist=$(echo dist/*.tar.gz)
"$clean/env/bin/python" -m pip install --quiet --constraint constraints.txt "$wheel"    # torch and safetensors come along
try "$wheel" on "$clean/path"
try "$sdist" on "$PATH"
CXX='' try "$sdist" off "$clean/path"
ls -l dist
sha256sum dist/* 2>/dev/null || shasum -a 256 dist/*
