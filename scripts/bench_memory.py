"""Peak memory of a fuse against that of the Hugging Face full prefill on the same tokens.

    python scripts/bench_memory.py                 # 16,384 tokens, ratio 0.15, the shape of bench_fusor.py

Each side runs in a process of its own that first loads the same model and precomputes the same chunks, then measures. Figures:
`peak_over_start` is the growth of the resident set over what was there before the call (weights and the chunks' KV in RAM);
`peak` is the whole resident set. Linux only (`/proc/self/clear_refs` resets the high-water mark). The last stdout line
is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path

import torch
from bench_fusor import make_fusor, make_prompts

from cacheblend.blend import FusionConfig

CHUNK_TOKENS = 512


def resident_bytes(field: str) -> int:
    """`VmRSS` or `VmHWM` of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure(side: str, tokens: int, ratio: float) -> dict[str, int]:
    """Peak of one side, in this process."""
    torch.set_num_threads(2)
    fusor = make_fusor()
    chunks = (tokens - 32) // CHUNK_TOKENS
    (segments,) = make_prompts(fusor, chunks, CHUNK_TOKENS, tokens - 1 - chunks * CHUNK_TOKENS, 1)
    token_ids = [token for segment in segments for token in segment.token_ids]
    if side == "full":
        segments = []
    gc.collect()
    start = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    if side == "full":
        fusor.prefill(token_ids)
    else:
        fusor.fuse(segments, FusionConfig(recompute_ratio=ratio))
    peak = resident_bytes("VmHWM")
    return {"tokens": len(token_ids), "start": start, "peak": peak, "peak_over_start": peak - start}


def main() -> None:
    """Measure both sides and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--side", choices=["full", "fuse"], help="measure this one alone, in this process")
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(options.side, options.tokens, options.ratio)))
        return
    sides = {}
    for side in ("full", "fuse"):
        command = [sys.executable, __file__, "--side", side, "--tokens", str(options.tokens), "--ratio", str(options.ratio)]
        sides[side] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        figures = {name: f"{value / 2**20:,.0f} MiB" for name, value in sides[side].items() if name != "tokens"}
        print(f"{side}: {figures}", file=sys.stderr)
    ratios = {name: sides["fuse"][name] / sides["full"][name] for name in ("peak", "peak_over_start")}
    print(json.dumps({"tokens": sides["full"]["tokens"], "ratio": options.ratio, "fuse_over_full": ratios, **sides}))


if __name__ == "__main__":
    main()
