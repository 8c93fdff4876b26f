#!/usr/bin/env bash
# Run the Ray integration's tests in an environment of their own: Ray and Arrow beside the packages of .venv, made in half a minute.
#     scripts/check_ray.sh [pytest options]
# Where Ray cannot be installed it says so, and the exit code is 77.
set -euo pipefail
cd "$(dirname "$0")/.."
environment=.venv-ray
if [ ! -e "$environment/.installed" ]; then
    .venv/bin/python -m venv "$environment"
    packages="import sysconfig; print(sysconfig.get_path('purelib'))"
    echo "import site; site.addsitedir('$(.venv/bin/python -c "$packages")')" >"$("$environment/bin/python" -c "$packages")/beside.pth"
    requirement="import tomllib; print(tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['ray'][-1])"
    if ! "$environment/bin/python" -m pip install --quiet "$("$environment/bin/python" -c "$requirement")"; then
        echo "Ray cannot be installed here: the tests of the ingest on Ray are left out" >&2
        exit 77
    fi
    touch "$environment/.installed"
fi
exec "$environment/bin/python" -m pytest tests/integrations/ray "$@"
