#!/usr/bin/env bash
# Run the Ray integration's tests in an environment of their own: Ray and Arrow beside the packages of .venv, made in half a minute.
#     scripts/check_ray.sh [pytest options]
set -euo pipefail
cd "$(dirname "$0")/.."
environment=.venv-ray
if [ ! -e "$environment/.installed" ]; then
    .venv/bin/python -m venv "$environment"
    packages="import sysconfig; print(sysconfig.get_path('purelib'))"
    echo "import site; site.addsitedir('$(.venv/bin/python -c "$packages")')" >"$("$environment/bin/python" -c "$packages")/beside.pth"
    requirement="import tomllib; print(tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['ray'][-1])"
    "$environment/bin/python" -m pip install --quiet "$("$environment/bin/python" -c "$requirement")"
    touch "$environment/.installed"
fi
exec "$environment/bin/python" -m pytest tests/integrations/ray "$@"
