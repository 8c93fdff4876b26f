#!/bin/sh
# What a GPU must show, in one call: correctness, TTFT from RAM and NVMe, copy bandwidth, gaps. See scripts/gpu_check.py.
#     scripts/gpu_check.sh                                   # a GPU, Mistral-7B's shape in bf16, 6 x 512 and 16K tokens
#     scripts/gpu_check.sh --device cpu --shape tiny         # the same steps anywhere; a test runs it
set -eu
here=$(dirname "$0")
exec "${PYTHON:-$here/../.venv/bin/python}" "$here/gpu_check.py" "$@"
