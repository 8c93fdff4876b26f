#!/bin/sh
# What a GPU must show, in one call of ten minutes: correctness, TTFT from RAM and NVMe, decoding, memory. See gpu_check.py.
#     scripts/gpu_check.sh --out gpu.json                    # a GPU, shapes of 8B and 32B in bfloat16, 4k to 64k tokens
#     scripts/gpu_check.sh --device cpu --shapes tiny        # the same steps anywhere; a test runs it
set -eu
here=$(dirname "$0")
exec "${PYTHON:-$here/../.venv/bin/python}" "$here/gpu_check.py" "$@"
