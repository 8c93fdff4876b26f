"""The price of context: what shows of a text that is not in the prompt, and what another head than the server's costs.

    python scripts/measure_context.py --model smollm2-135m --data DIR --cases 24

For each question of a data set whose answer stands in one passage: the passages without that one are the prompt, and each of
them is computed after the head, the filler and the passage that is left out, as if that stood before them in one document. The
answer must not be likelier than full recompute of the same prompt finds it. Beside it: the same prompt after a head of its own
(another instruction) over chunks computed after the server's head, after their own, and after BOS alone.

The last line on stdout is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cacheblend.blend import ChunkContext, FusionConfig, FusionResult, Fusor, Segment
from cacheblend.eval.data import Example, FileSource, Preset
from cacheblend.eval.data.file_source import find_file, read_examples
from cacheblend.eval.data.source import prompt_renderer
from cacheblend.eval.metrics import answer_nll_nats
from cacheblend.retriever import Document, PlainTokenizer
from cacheblend.service.engine.chunk_contexts import chunk_context
from cacheblend.service.engine.prompt import PromptRenderer
from cacheblend.service.serving.quality_guard import first_token_kl_nats

OTHER_INSTRUCTION = "You are a careful clerk. Read what follows, then answer the last question as briefly as you can.\n\n"
RATIOS = (0.0, 0.15)
MAX_PASSAGES = 8


class Bench:
    """Prompts of one model, blended from chunks computed after a head and a context.

    Args:
        fusor: the model.
        renderer: of the server's prompts.
    """

    def __init__(self, fusor: Fusor, renderer: PromptRenderer) -> None:
        self.fusor, self.renderer = fusor, renderer
        self._plain = PlainTokenizer(fusor.tokenizer)
        self.context = chunk_context(fusor, "auto", 0)
        bos = fusor.tokenizer.bos_token_id
        self.bos = () if bos is None else (int(bos),)

    def ids(self, text: str) -> tuple[int, ...]:
        """Token ids of a passage."""
        return tuple(self._plain.ids(text + "\n\n"))

    def blend(
        self,
        head: Sequence[int],
        chunks: Sequence[Sequence[int]],
        tail: Sequence[int],
        ratio: float,
        prefix_ids: Sequence[int],
        context: ChunkContext,
    ) -> FusionResult:
        """The prompt blended from chunks computed after a prefix and a context."""
        kvs = self.fusor.precompute_documents([([chunk], [0]) for chunk in chunks], prefix_ids, context)
        segments = [Segment(chunk, replace(kv, prefix_ids=())) for chunk, kv in zip(chunks, kvs, strict=True)]
        exact = Segment(head, self.fusor.precompute(head), exact=True)
        return self.fusor.fuse([exact, *segments, Segment(tail)], FusionConfig(recompute_ratio=ratio))

    def case(self, example: Example) -> dict[str, float]:
        """What one case shows; empty where its answer does not stand in just one of its passages."""
        passages = [Document.of({"title": each.title, "text": each.text}) for each in example.passages[:MAX_PASSAGES]]
        answer = example.answers[0]
        gold = [passage for passage in passages if answer.lower() in passage.content.lower()]
        if len(gold) != 1 or len(passages) < 3:
            return {}
        others = [self.ids(passage.content) for passage in passages if passage is not gold[0]]
        told, tail = self.ids(gold[0].content), self.renderer.question(example.question).suffix
        head, gold_ids = self.renderer.prefix, self.renderer.answer_ids(answer)
        without = self.fusor.prefill([*head, *(token for chunk in others for token in chunk), *tail])
        within = self.fusor.prefill([*head, *told, *(token for chunk in others for token in chunk), *tail])
        base = answer_nll_nats(self.fusor, without, gold_ids)
        found = {
            "gold nll, full recompute": base,
            "gold in the prompt, over": answer_nll_nats(self.fusor, within, gold_ids) - base,
        }
        leaking = ChunkContext(filler_ids=(*self.context.filler_ids, *told), document_tokens=0)
        for name, context in (("passage in the context", leaking), ("filler alone", self.context)):
            for ratio in RATIOS:
                fused = self.blend(head, others, tail, ratio, head, context)
                found[f"{name}, ratio {ratio}, over"] = answer_nll_nats(self.fusor, fused, gold_ids) - base
        other_head = (*self.bos, *self._plain.ids(OTHER_INSTRUCTION))
        full = self.fusor.prefill([*other_head, *(token for chunk in others for token in chunk), *tail])
        prefixes = {
            "own head": (other_head, self.context),
            "server's head": (head, self.context),
            "bos": (self.bos, ChunkContext(document_tokens=0)),
        }
        for name, (prefix_ids, context) in prefixes.items():
            fused = self.blend(other_head, others, tail, RATIOS[-1], prefix_ids, context)
            found[f"another head, chunks after {name}, KL"] = first_token_kl_nats(full.logits, fused.logits)
        return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--data-set", default="squad_shared")
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    fusor = Fusor.from_pretrained(options.model, dtype=options.dtype)
    source = FileSource(name=options.data_set, data=options.data, preset=Preset(prompt="few-shot"))
    bench = Bench(fusor, prompt_renderer(fusor.tokenizer, source.wording))
    found: dict[str, list[float]] = defaultdict(list)
    cases = 0
    for example in read_examples(find_file(options.data_set, options.data)):
        measured = bench.case(example)
        cases += bool(measured)
        for name, value in measured.items():
            found[name].append(value)
        print(f"\r{cases} of {options.cases} cases", end="", file=sys.stderr)
        if cases == options.cases:
            break
    means = {name: statistics.fmean(values) for name, values in found.items()}
    print(file=sys.stderr)
    for name, mean in means.items():
        print(f"{name:<50} {mean:+.3f} nats")
    print(json.dumps({"model": Path(options.model).name, "data_set": options.data_set, "cases": cases, **means}))


if __name__ == "__main__":
    main()
