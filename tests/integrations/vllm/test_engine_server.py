"""`vllm serve` with the connector, in processes of its own, as OpenAI's clients see it."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllm_engines import BLOCK, POSITIONS, RECIPES, MakeModel
from waiting import wait_until

DOCS = [
    {"title": "Travel", "text": "Trains are booked by the office, and a night away is paid. " * 3},
    {"title": "Lunch", "text": "Lunch is at noon in the hall, and it is free on every Friday. " * 3},
    {"title": "Badges", "text": "A badge opens the doors from seven, and is never lent to others. " * 3},
]
ANSWER = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's address."""
    folder, port = make_model("llama", positions=POSITIONS), 18763
    store = tmp_path_factory.mktemp("store")
    extra = {"store_dir": str(store), "context_filler": "none"}
    config = {"kv_connector": "CacheBlendConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += f"--served-model-name tiny --dtype float32 --max-model-len {POSITIONS} --block-size {BLOCK}".split()
    command += ["--enforce-eager", "--enable-auto-tool-choice", "--tool-call-parser", "pythonic"]
    command += ["--kv-transfer-config", json.dumps(config)]
    environment = {
        **os.environ,
        "VLLM_PLUGINS": "cacheblend",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    log = Path(store) / "log"
    with log.open("wb") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process:
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 300
            while True:
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                try:
                    if httpx.get(f"{url}/health", timeout=30).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def post(server: str, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{server}{path}", json={"model": "tiny", **ANSWER, **body}, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def post_until_hits(server: str, hits: int, path: str = "/v1/chat/completions", **body: Any) -> Any:
    """The answer to a request that is sent until so many chunks' KV is found; what is stored is found a little later.

    A request that came too early leaves its blocks in vLLM's prefix cache, and its texts would be no hits: it is emptied.
    """
    answers: list[Any] = []

    def found() -> bool:
        assert httpx.post(f"{server}/reset_prefix_cache", timeout=60).status_code == 200
        answers.append(post(server, path, **body))
        return bool(answers[-1]["kv_transfer_params"]["cacheblend"].get("hits") == hits)

    wait_until(found)
    return answers[-1]


def test_documents_of_a_chat_are_blended_in_any_order(server: str) -> None:
    """Documents are stored through the running engine; a chat over them in another order has only hits, and says so."""
    stored = httpx.post(f"{server}/v1/cacheblend/documents", json={"documents": DOCS}, timeout=120).json()
    assert stored["stored_chunks"] == stored["chunks"] == stored["documents"] == 3
    question = [{"role": "user", "content": "When is lunch?"}]
    plain = post(server, "/v1/chat/completions", messages=question)
    assert plain["kv_transfer_params"] is None
    for order in ((2, 0, 1), (1, 2, 0)):
        answer = post_until_hits(server, 3, messages=question, documents=[DOCS[index] for index in order])
        report = answer["kv_transfer_params"]["cacheblend"]
        assert (report["blended"], report["chunks"]) == (True, 3), report
        assert report["recompute_ratio"] == pytest.approx(0.14, abs=0.03)
        assert answer["choices"][0]["message"]["role"] == "assistant"


def test_passages_in_messages_are_blended_from_the_third_request_on(server: str) -> None:
    """Texts that an application wrote into its message are hits in another order, once they came twice."""
    said = ("The bird lives in a cage. It sings at noon, and eats seeds. ", "Our horse was bought last May; nobody rides yet. ")
    texts = [3 * one for one in said]

    def messages(order: str, question: str) -> list[dict[str, str]]:
        sources = "\n".join(f'<source id="{index}">{texts[int(index)].strip()}</source>' for index in order)
        return [{"role": "user", "content": f"Answer.\n<context>\n{sources}\n</context>\n{question}"}]

    first = post(server, "/v1/chat/completions", messages=messages("01", "Who sleeps?"))
    assert first["kv_transfer_params"] is None
    second = post(server, "/v1/chat/completions", messages=messages("10", "Who sings?"))
    assert second["kv_transfer_params"]["cacheblend"] == {"blended": False, "reason": "not_stored"}
    third = post_until_hits(server, 2, messages=messages("01", "Who sleeps?"))
    assert third["kv_transfer_params"]["cacheblend"]["blended"]
    assert third["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]


def test_ingested_texts_in_a_plain_prompt_are_blended(server: str) -> None:
    """A document's text is a hit of its KV in a completion's prompt, whatever stands around it; the prompt is vLLM's own."""
    said = ("The pool is open from nine to five. Ask at the desk, or call. ", "Members find three bicycles in our gym. ")
    texts = [3 * one for one in said]
    documents = [{"title": "Hours", "text": text.strip()} for text in texts]
    assert httpx.post(f"{server}/v1/cacheblend/documents", json={"documents": documents}, timeout=120).json()["chunks"] == 2
    prompt = f"Answer from ({texts[1].strip()}) and|{texts[0].strip()}|. When?"
    answer = post_until_hits(server, 2, "/v1/completions", prompt=prompt)
    exact = post(server, "/v1/completions", prompt=prompt, kv_transfer_params={"other": 1})
    assert answer["kv_transfer_params"]["cacheblend"]["hit_tokens"] > 0.8 * answer["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens"] == exact["usage"]["prompt_tokens"]


@pytest.mark.parametrize("name", RECIPES["requests"])
def test_recipes_of_applications(server: str, name: str) -> None:
    """Of requests as applications' own libraries write them the third has the texts' KV, in another order; see
    test_engine_recipes.py for their answers.
    """
    *before, last = RECIPES["requests"][name]
    for one in before:
        post(server, one["path"], **one["body"], cache_salt=name)
    sources = "\n".join(f"<source>{text}</source>" for text in RECIPES["texts"])
    post_until_hits(server, 4, messages=[{"role": "user", "content": sources}], cache_salt=name)
    report = post(server, last["path"], **last["body"], cache_salt=name)["kv_transfer_params"]["cacheblend"]
    assert (report["blended"], report["hits"]) == (True, 4)


def test_streamed_answers_and_metrics(server: str) -> None:
    """A streamed chat over documents streams, bad documents are a client's error, and the counters are on vLLM's own page."""
    body = {"model": "tiny", **ANSWER, "stream": True, "messages": [{"role": "user", "content": "Who?"}], "documents": DOCS}
    with httpx.stream("POST", f"{server}/v1/chat/completions", json=body, timeout=120) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data:")]
    assert len(lines) > 4
    assert lines[-1] == "data: [DONE]"
    refused = httpx.post(f"{server}/v1/chat/completions", json={**body, "documents": ["text"]}, timeout=60)
    assert refused.status_code == 400
    for counter, label in (("requests", 'outcome="blended"'), ("tokens", 'kind="hit"')):
        sample = re.compile(rf"^cacheblend_vllm_{counter}_total\{{.*{label}", re.MULTILINE)
        wait_until(lambda sample=sample: sample.search(httpx.get(f"{server}/metrics").text) is not None)
