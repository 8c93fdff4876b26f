#!/usr/bin/env bash
# Install PyTorch into the environment of the given Python: the CPU build where there is no NVIDIA GPU.
#     scripts/install_torch.sh .venv/bin/python
set -euo pipefail
python=${1:?usage: install_torch.sh PYTHON}
if "$python" -c "import torch" 2>/dev/null; then
    exit 0
fi
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    exec "$python" -m pip install "torch>=2.11,<2.14"
fi
# The plain name would bring gigabytes of CUDA. Where PyTorch's own index cannot be reached, or has no such build (macOS), the
# package index's build is taken, at a fixed version so that a local build of it is found.
if ! "$python" -m pip install --quiet --retries 0 --timeout 10 --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu" 2>/dev/null; then
    echo "PyTorch's own index has no CPU build for this machine, or cannot be reached: taking the package index's"
    "$python" -m pip install "torch==2.13.0"
fi
