#!/usr/bin/env bash
# build_wheel.sh [FOLDER]: the wheel of the last commit into dist/ or a folder; the same bytes wherever and whenever it is built
# with the same Python and setuptools.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:-dist}" && cd "${1:-dist}" && pwd)
python=$PWD/.venv/bin/python
umask 022
export SOURCE_DATE_EPOCH
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
git archive HEAD | tar --extract --no-same-permissions --directory "$source"
cd "$source"
"$python" -m build --quiet --wheel ${BUILD_ARGS:-} --outdir "$out" .
sha256sum "$out"/cacheblend-*.whl
