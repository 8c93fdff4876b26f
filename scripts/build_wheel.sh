#!/usr/bin/env bash
# build_wheel.sh [FOLDER]: the wheel and the sdist of the last commit into dist/ or a folder; the same bytes wherever and whenever
# they are built with the same Python and setuptools.
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
"$python" -m build --quiet --sdist --wheel ${BUILD_ARGS:-} --outdir "$out" .
# setuptools gives an sdist's folders and metadata the time of day.
for sdist in "$out"/cacheblend-*.tar.gz; do
    "$python" - "$sdist" <<'PY'
import gzip
import os
import sys
import tarfile
from io import BytesIO

packed, time = BytesIO(), int(os.environ["SOURCE_DATE_EPOCH"])
with tarfile.open(sys.argv[1]) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as new:
    for member in sorted(old.getmembers(), key=lambda member: member.name):
        member.mtime, member.uid, member.gid, member.uname, member.gname, member.pax_headers = time, 0, 0, "", "", {}
        new.addfile(member, old.extractfile(member) if member.isfile() else None)
with open(sys.argv[1], "wb") as file:
    file.write(gzip.compress(packed.getvalue(), mtime=time))
PY
done
sha256sum "$out"/cacheblend-*.whl "$out"/cacheblend-*.tar.gz
