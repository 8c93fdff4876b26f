"""OpenAI's own client works against the API unchanged."""

from typing import Any

import httpx
import numpy as np
import openai
import pytest
from api import MODEL
from engines import DOCUMENTS, QUESTION, TOP_K

from cacheblend.service import Engine
from cacheblend.service.http.schemas import OF_CLIENTS

MESSAGES = [{"role": "user", "content": QUESTION}]


def ask(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=MESSAGES, **options)


def test_chat(engine: Engine, openai_client: openai.OpenAI) -> None:
    """A chat of one question gives `Engine.answer`'s text, and usage tells what was cached and recomputed."""
    alone = engine.answer(QUESTION, num_chunks=TOP_K, max_tokens=20)
    chat = ask(openai_client, max_tokens=20, extra_body={"num_chunks": TOP_K, "return_chunks": True})
    assert chat.choices[0].message.content == alone.text
    assert chat.choices[0].finish_reason in ("stop", "length")
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (alone.plan.prompt_tokens, len(alone.token_ids))
    cached = sum(len(segment.token_ids) for segment in alone.plan.segments if segment.kind != "fresh")
    assert chat.usage.prompt_tokens_details.cached_tokens == cached
    assert chat.usage.prompt_tokens_details.recomputed_tokens == pytest.approx(alone.plan.recomputed_tokens, abs=1e-3)
    chunks = chat.cacheblend["chunks"]
    assert [(chunk["document_id"], chunk["position"]) for chunk in chunks] == [
        (scored.chunk.document_id, scored.chunk.position) for scored in alone.chunks
    ]
    assert all(chunk["source"] in ("ram", "nvme") for chunk in chunks)
    recomputed = sum(token["recomputed"] for chunk in chunks for token in chunk["tokens"])
    assert recomputed == pytest.approx(alone.plan.recomputed_tokens, abs=0.1)


def test_nothing_was_found(client: httpx.Client) -> None:
    """Where a retriever has found nothing, or nothing with a text, a chat is one without chunks, as one that asks for none."""
    answers = []
    for found in ({"num_chunks": 0}, {"documents": []}, {"documents": [{"id": 7, "text": " "}]}):
        body = {"messages": MESSAGES, "max_tokens": 4, **found}
        answer = client.post("/v1/chat/completions", json=body).json()
        answers.append((answer["choices"], answer["usage"]["prompt_tokens"]))
    assert answers == answers[:1] * 3
    texts = {"prompt": "for x in", "documents": [], "temperature": None}
    assert client.post("/v1/completions", json=texts).json()["usage"]["completion_tokens"] <= 16


def test_a_chat_that_follows_up(openai_client: openai.OpenAI) -> None:
    """A question that says nothing by itself finds what the one before asked for, and earlier ones do not matter."""

    def found(*questions: str) -> str:
        turns = [
            turn for text in questions for turn in ({"role": "user", "content": text}, {"role": "assistant", "content": "Yes"})
        ]
        extra = {"num_chunks": 1, "return_chunks": True}
        chat = openai_client.chat.completions.create(model=MODEL, messages=turns[:-1], max_tokens=1, extra_body=extra)
        return str(chat.cacheblend["chunks"][0]["document_id"])

    about = {name: f"What does the {name} statement do?" for name in ("while", "class")}
    for name, other in (("while", "class"), ("class", "while")):
        assert found(about[other], about[name], "Go on.") == name
        assert found(about[other], about[name]) == found(about[name]) == name


def test_num_chunks_and_top_k(openai_client: openai.OpenAI, engine: Engine) -> None:
    """`num_chunks` retrieves, as many as there are; `top_k` is sampling's, as vLLM's clients send it."""
    for document in DOCUMENTS[2:]:  # what is left fits into one prompt
        engine.documents.delete(str(document["id"]))
    greedy = ask(openai_client, max_tokens=8)
    options = {"num_chunks": 999, "top_k": 1, "return_chunks": True}
    many = ask(openai_client, max_tokens=1, extra_body=options)
    assert len(many.model_extra["cacheblend"]["chunks"]) == engine.retriever.chunk_count
    for top_k in (1, 40, 0, -1):
        sampled = ask(openai_client, max_tokens=8, temperature=1.5, extra_body={"top_k": top_k})
        assert sampled.usage.prompt_tokens == greedy.usage.prompt_tokens
        assert top_k != 1 or sampled.choices[0].message.content == greedy.choices[0].message.content


CHATS, TEXTS, ANTHROPIC, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings"
# What clients and gateways send that changes no answer: of every kind of answer, and of each.
NEUTRAL: dict[str, object] = {
    **{"service_tier": "auto", "verbosity": "low", "reasoning_effort": "low", "parallel_tool_calls": True, "drop_params": True},
    **{"n": 1.0, "seed": 7.0, "top_k": 40.0, "logit_bias": {}, "tools": [], "stop_token_ids": [], "cache_control": {}},
    **{"top_p": 0, "web_search_options": {}, "options": {}, "extra_body": {}, "transforms": [], "top_logprobs": 0},
    **{"min_tokens": 0.0, "ignore_eos": None, "skip_special_tokens": True, "repeat_penalty": 1.0, "include_reasoning": True},
    **{"response_format": {"type": "text"}, "stream_options": {"include_usage": True}, "not_known": None},
}
OF_KIND: dict[str, dict[str, object]] = {
    CHATS: {
        **{"tool_choice": "none", "functions": [], "function_call": "none", "logprobs": False, "modalities": ["text"]},
        **{"max_completion_tokens": 8.0, "thinking": {"type": "disabled"}, "continue_final_message": False},
        **{"stop": "", "add_generation_prompt": True},
    },
    TEXTS: {"echo": False, "best_of": 1, "suffix": "", "stop": [""]},
    ANTHROPIC: {
        **{"tool_choice": {"type": "auto"}, "mcp_servers": [], "thinking": {"type": "enabled", "budget_tokens": 1024}},
        **{"context_management": {"edits": []}, "stop_sequences": [""]},
    },
    EMBEDDINGS: {"dimensions": 64.0, "drop_params": True, "truncate": "END", "input_type": "query", "user": "ada"},
}


@pytest.mark.parametrize("path", [*OF_KIND])
def test_fields_that_change_nothing(client: httpx.Client, path: str, caplog: pytest.LogCaptureFixture) -> None:
    """Harmless fields that clients and gateways send change no answer, and each has at most one line in the log."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "messages": MESSAGES}
    body = {TEXTS: {**body, "prompt": QUESTION}, EMBEDDINGS: {"input": QUESTION}}.get(path, body)
    if path == TEXTS:
        del body["messages"]
    ignored = {field: {"any": ["value"]} for field in OF_CLIENTS.split()}
    with_all = {**body, **ignored, **({} if path == EMBEDDINGS else NEUTRAL), **OF_KIND[path]}
    answers = []
    with caplog.at_level("INFO", "cacheblend"):
        for asked in (body, with_all, {name: value for name, value in with_all.items() if value != ignored["user"]}):
            response = client.post(path, json=asked)
            assert response.status_code == 200, response.text
            answers.append(next(response.json()[name] for name in ("choices", "content", "data") if name in response.json()))
    assert answers == answers[:1] * 3
    lines = [record.getMessage() for record in caplog.records if "changes nothing" in record.getMessage()]
    assert len(lines) == len({*lines})


@pytest.mark.parametrize("path", [CHATS, TEXTS, ANTHROPIC])
def test_limits_of_tokens(client: httpx.Client, path: str) -> None:
    """A limit of -1 is the service's own, here 6, else as many as fit; 4.0 is 4; what is neither whole nor -1 is refused."""
    body: dict[str, Any] = {"prompt": QUESTION} if path == TEXTS else {"messages": MESSAGES, "num_chunks": 0}

    def tokens(limit: object) -> int:
        response = client.post(path, json={**body, "max_tokens": limit, "logit_bias": {"1": -100}})
        assert response.status_code == (200 if limit in (4, -1) or (path, limit) == (TEXTS, 0) else 400), response.text
        if response.status_code == 400:
            assert response.json()["error"]["message"].startswith("max_tokens: must be")
        usage = response.json().get("usage", {})
        return int(usage.get("completion_tokens", usage.get("output_tokens", 0)))

    assert [tokens(limit) for limit in (4, 4.0, -1, -1.0, 4.5, 0, -2)] == [4, 4, 6, 6, 0, 0, 0]


def test_many_stop_strings(openai_client: openai.OpenAI) -> None:
    """Any number of stop strings, of 4,096 characters, end an answer, which says by which; messages have OpenAI's fields."""
    plain = ask(openai_client, max_tokens=12).choices[0].message.content
    stop = plain[3:5]
    asked = {"max_tokens": 12, "stop": [*(f"{number} never comes" for number in range(200)), stop]}
    choice = ask(openai_client, **asked).choices[0]
    assert (choice.message.content, choice.finish_reason, choice.stop_reason) == (plain.partition(stop)[0], "stop", stop)
    assert choice.message.to_dict()["refusal"] is None
    pieces = [piece.choices[0] for piece in ask(openai_client, stream=True, **asked)]
    assert "".join(piece.delta.content or "" for piece in pieces) == choice.message.content
    assert (pieces[0].delta.to_dict()["refusal"], pieces[-1].stop_reason) == (None, stop)


TEXT_PART = {"type": "text", "text": "Nothing."}
IMAGES = [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "image", "source": {}}]
BACK: dict[str, Any] = {
    **dict.fromkeys(("refusal", "audio", "function_call", "tool_calls", "images"), None),
    **{"annotations": [], "provider_specific_fields": {"refusal": None}, "thinking_blocks": [{"type": "thinking"}], "id": "1"},
}


@pytest.mark.parametrize(
    ("turn", "same_as"),
    [
        ({"role": "assistant", "content": "Nothing.", **BACK}, None),
        ({"role": "assistant", "content": [{**TEXT_PART, "cache_control": {"type": "ephemeral"}}]}, None),
        ({"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, TEXT_PART]}, None),
        ({"role": "assistant", "content": None, "refusal": "Nothing."}, None),
        ({"role": "assistant", "content": [{"type": "text", "text": part} for part in ("Noth", "ing.")]}, None),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "Nothing."}]}, None),
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        ({"role": "system", "content": ""}, {"role": "system", "content": None}),
        ({"role": "user", "content": [TEXT_PART, *IMAGES]}, {"role": "user", "content": "Nothing."}),
        ({"role": "user", "content": IMAGES}, {"role": "user", "content": ""}),
    ],
)
def test_turns_that_come_back(client: httpx.Client, turn: dict[str, Any], same_as: dict[str, Any] | None) -> None:
    """What services and libraries add to an answer changes nothing of the prompt, nor do images of an earlier turn."""

    def prompt_tokens(own: dict[str, Any]) -> int:
        body = {"messages": [*MESSAGES, own, *MESSAGES], "max_tokens": 1, "num_chunks": 0}
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return int(response.json()["usage"]["prompt_tokens"])

    assert prompt_tokens(turn) == prompt_tokens(same_as or {"role": "assistant", "content": "Nothing."})


def test_last_messages_that_do_not_ask(openai_client: openai.OpenAI) -> None:
    """A chat may end with one, over the chunks of the user's question, or be nothing else, and then nothing is searched."""
    for role, content in (("system", "Name a keyword."), ("developer", "Name a keyword."), ("user", " "), ("assistant", "A")):
        brief: Any = {"role": role, "content": content}
        for messages, num_chunks in (([brief], 0), ([*MESSAGES, brief], 6)):
            answer = openai_client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
            assert answer.cacheblend["num_chunks"] == num_chunks


def test_several_prompts(engine: Engine, openai_client: openai.OpenAI) -> None:
    """Texts and token ids in one request have the answers that each has by itself, in their order; ids are the very prompt."""
    texts = ["for x in", "while", "The else clause of"]
    ids = [engine.fusor.tokenizer(text)["input_ids"] for text in texts]

    def complete(prompt: Any, **options: Any) -> Any:
        return openai_client.completions.create(model=MODEL, prompt=prompt, max_tokens=5, **options)

    def choices(prompt: Any, **options: Any) -> list[tuple[int, str]]:
        return [(choice.index, choice.text) for choice in complete(prompt, **options).choices]

    apart = [complete(text) for text in texts]
    for prompts in (texts, ids):
        together = complete(prompts)
        assert [choice.text for choice in together.choices] == [one.choices[0].text for one in apart]
        assert together.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in apart) == sum(map(len, ids))
        assert len(together.cacheblend) == len(texts)
    assert complete(ids[2]).choices[0].text == apart[2].choices[0].text
    sampled = {"n": 2, "temperature": 1.0, "seed": 3}
    drawn = choices(texts[:2], **sampled)
    assert [index for index, _ in drawn] == [0, 1, 2, 3]
    assert [text for _, text in drawn] == [text for one in texts[:2] for _, text in choices(one, **sampled)]
    streamed = dict.fromkeys(range(4), "")
    for piece in complete(texts[:2], stream=True, **sampled):
        streamed[piece.choices[0].index] += piece.choices[0].text
    assert list(streamed.items()) == drawn
    over = {"documents": [{"text": "A loop."}]}
    first, second = complete([texts[0], ids[0]], extra_body=over).choices
    assert first.text == second.text


@pytest.mark.parametrize("n", [1, 2])
def test_echo(engine: Engine, openai_client: openai.OpenAI, n: int) -> None:
    """The prompt's text comes before each choice's, of token ids too, whole and streamed; 0 tokens are none."""
    text = "The else clause of"
    ids = engine.fusor.tokenizer(text)["input_ids"]
    decoded, create = engine.fusor.tokenizer.decode(ids), openai_client.completions.create
    said = create(model=MODEL, prompt=text, max_tokens=4).choices[0].text
    for prompts, echoed, max_tokens in (([text, ids], [text, decoded], 4), ([text], [text], 0), ([text], [""], 0)):
        asked: Any = {"model": MODEL, "prompt": prompts, "echo": echoed != [""], "max_tokens": max_tokens, "n": n}
        expected = [one + said * bool(max_tokens) for one in echoed for _ in range(n)]
        whole = create(**asked)
        assert [choice.text for choice in whole.choices] == expected
        assert whole.usage.completion_tokens == max_tokens * len(expected)
        assert {choice.finish_reason for choice in whole.choices} == {"length"}
        streamed = [""] * len(expected)
        for piece in create(**asked, stream=True):
            streamed[piece.choices[0].index] += piece.choices[0].text
        assert streamed == expected


def test_embeddings(engine: Engine, openai_client: openai.OpenAI) -> None:
    """OpenAI's client gets the embedder's very vectors, as floats and in the base64 that it asks for by itself."""
    texts = [QUESTION, "Another text, of other words.", "  注意力机制 and naïve café 🙂 "]
    expected = engine.retriever.embedder.encode(texts)
    name, size = engine.retriever.embedder.name, engine.retriever.embedder.dimensions
    for options in ({"model": name}, {"model": MODEL, "encoding_format": "float"}, {"model": name, "dimensions": size}):
        answer = openai_client.embeddings.create(input=texts, **options)
        assert [one.index for one in answer.data] == [0, 1, 2]
        np.testing.assert_allclose(np.array([one.embedding for one in answer.data]), expected, rtol=1e-6)
        assert answer.usage.prompt_tokens > len(texts)
