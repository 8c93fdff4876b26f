#!/usr/bin/env bash
# Run the Ray integration's tests in an environment of their own: Ray and Arrow beside the packages of .venv, half a minute to install.
#     scripts/check_ray.sh [pytest options]
set -euo pipefail
cd "$(dirname "$0")/.."
environment=.venv-ray
if [ ! -e "$environment/.installed" ]; then
    .venv/bin/python -m venv "$environment"
    .venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" >"$("$environment/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/beside.pth"
    "$environment/bin/python" -m pip install --quiet "$(.venv/bin/python -c "
import tomllib
print(next(one for one in tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['ray'] if one.startswith('ray')))")"
    touch "$environment/.installed"
fi
exec "$environment/bin/python" -m pytest tests/integrations/ray "$@"
