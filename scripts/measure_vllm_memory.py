"""Memory of a vLLM that blends, stage by stage: start, its own prefills, chunks computed and stored, blends.

    python scripts/measure_vllm_memory.py MODEL [--dtype bfloat16] [--blends 8] [--plain]

Run it in the environment that scripts/check_vllm.sh makes, with VLLM_CPU_OMP_THREADS_BIND=0. `--plain` is vLLM without the
connector. A stage's line has the resident memory at its end, its peak, what the C library has in use (`in_use`) and has freed
but not given back (`freed`), in MB. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
CHUNK_TOKENS = 500
MIB = 2**20


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]
    ]


class Stages:
    """Memory of this process at the end of each stage, and the peak within it.

    Attributes:
        found: in MB, by the stage's name.
    """

    def __init__(self) -> None:
        self.found: dict[str, dict[str, int]] = {}
        self._mallinfo = ctypes.CDLL(None).mallinfo2
        self._mallinfo.restype = _Mallinfo

    def end(self, name: str) -> None:
        """Take the figures, and have the next stage's peak begin here."""
        lines = Path("/proc/self/status").read_text().splitlines()
        kilobytes = {line.partition(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Vm")}
        heap = self._mallinfo()
        self.found[name] = {
            "resident": kilobytes["VmRSS"] // 1024,
            "peak": kilobytes["VmHWM"] // 1024,
            "in_use": (heap.uordblks + heap.hblkhd) // MIB,
            "freed": heap.fordblks // MIB,
        }
        print(f"{name:12}", self.found[name], file=sys.stderr, flush=True)
        Path("/proc/self/clear_refs").write_text("5")


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16", help="vLLM's (default: %(default)s)")
    parser.add_argument("--blends", type=int, default=8)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()

    from pydoc_data.topics import topics

    from vllm import LLM, SamplingParams

    stages = Stages()
    stages.end("imports")
    with tempfile.TemporaryDirectory() as store:
        transfer = {
            "kv_connector": "CacheBlendConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store_dir": store},
        }
        llm = LLM(
            options.model,
            dtype=options.dtype,
            enforce_eager=True,
            max_model_len=3600,
            max_num_batched_tokens=2048,
            disable_log_stats=True,
            **({} if options.plain else {"kv_transfer_config": transfer}),
        )
        stages.end("start")
        tokenizer = llm.get_tokenizer()
        text = tokenizer("\n".join(topic for _, topic in sorted(topics.items())), add_special_tokens=False)["input_ids"]
        pool = [text[start : start + CHUNK_TOKENS] for start in range(0, 6 * CHUNK_TOKENS, CHUNK_TOKENS)]
        draw = random.Random(0)

        def ask(*, is_marked: bool) -> Any:
            """The answer to the chunks in a new order."""
            ids, spans = list(text[-12:]), list[list[int]]()
            for chunk in draw.sample(pool, len(pool)):
                spans.append([len(ids), len(ids) + len(chunk)])
                ids += chunk
            llm.reset_prefix_cache()
            extra = {"kv_transfer_params": {"cacheblend": {"chunks": spans}}} if is_marked else {}
            params = SamplingParams(max_tokens=1, temperature=0.0, extra_args=extra)
            return llm.generate([{"prompt_token_ids": [*ids, *text[-32:-12]]}], params, use_tqdm=False)[0]

        for number in range(2):
            ask(is_marked=False)
            stages.end(f"exact {number + 1}")
        if not options.plain:
            llm.collective_rpc("cacheblend_precompute", args=([[chunk] for chunk in pool], None, None))
            stages.end("precompute")
            for number in range(options.blends):
                answer = ask(is_marked=True).kv_transfer_params["cacheblend"]
                assert answer["blended"], answer
                stages.end(f"blend {number + 1}")
        llm.llm_engine.engine_core.shutdown()
    peak = max(stage["peak"] for stage in stages.found.values())
    print(json.dumps({"dtype": options.dtype, "plain": options.plain, "peak_mb": peak, "stages": stages.found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
