"""Metadata over HTTP: uploaded with texts and files, filtered by in requests, and returned with chunks."""

import json
from typing import Any

import httpx
import pytest

TEXT = "The lighthouse at Kap Arkona was built by Karl Friedrich Schinkel."
QUESTION = {"messages": [{"role": "user", "content": "Who built the lighthouse?"}], "max_tokens": 1, "return_chunks": True}


def cited(client: httpx.Client, **options: Any) -> list[dict[str, Any]]:
    answer = client.post("/v1/chat/completions", json={**QUESTION, **options}).raise_for_status().json()
    return answer["cacheblend"]["chunks"]


def test_uploaded_filtered_returned(client: httpx.Client) -> None:
    """Texts and files have metadata, a line's own before the form's; a question finds those of its filter alone."""
    documents = [{"id": str(year), "text": f"{TEXT} {year}", "metadata": {"year": year}} for year in (1998, 2024)]
    documents.append({"id": "put", "text": f"{TEXT} put", "metadata": {"lang": "fr"}})
    client.post("/v1/documents?wait=true", json={"documents": documents}).raise_for_status()
    lines = "".join(
        json.dumps({"id": id_, "text": f"{TEXT} {id_}", "metadata": own}) + "\n"
        for id_, own in (("a", {"year": 1}), ("b", {"year": []}), ("c", {f"field {number}": 1 for number in range(64)}))
    )
    form = {"metadata": '{"lang": "de", "year": 2030}'}
    files = {"file": ("lines.jsonl", lines.encode())}
    [fault] = client.post("/v1/documents?wait=true", files=files, data=form).raise_for_status().json()["faults"]
    assert "line 3: document 'c': metadata must be an object of at most 64 fields" in fault
    assert client.get("/v1/documents/a").json()["metadata"] == {"lang": "de", "year": 1}
    listed = client.get("/v1/documents").json()["data"]
    assert {one["id"]: one["metadata"] for one in listed if "metadata" in one} == {
        "1998": {"year": 1998},
        "2024": {"year": 2024},
        "a": {"lang": "de", "year": 1},
        "b": {"lang": "de", "year": 2030},
        "put": {"lang": "fr"},
    }
    for wanted, ids in (
        ({"year": {"gte": 2020}}, {"2024", "b"}),
        ({"lang": ["de", "fr"]}, {"a", "b", "put"}),
        ({"lang": "none"}, set()),
    ):
        chunks = cited(client, filter=wanted)
        assert {chunk["document_id"] for chunk in chunks} == ids
        assert all(chunk["metadata"] for chunk in chunks)
    for fields, reason in (
        ({"filter": {"lang": "none"}}, "no document meets the filter"),
        ({"filter": {"Year": 1, "lang": "de"}, "stream": True}, "no document has the filter's 'Year'"),
        ({"filter": {"lang": "de"}, "num_chunks": 0}, "nothing was searched"),
        ({"filter": {"lang": "de"}}, None),
        ({"num_chunks": 0}, None),
    ):
        text = client.post("/v1/chat/completions", json={**QUESTION, **fields}).text
        assert ("no_chunks_reason" in text, reason is None or reason in text) == (reason is not None, True)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/chat/completions", {**QUESTION, "filter": {"year": {"near": 1}}}, "filter", "'near' is no operator"),
        ("/v1/chat/completions", {**QUESTION, "filter": [1]}, "filter", "valid dictionary"),
        ("/v1/chat/completions", {**QUESTION, "filter": {"a": 1}, "documents": [{"text": "x"}]}, "filter", "beside documents"),
        (
            "/v1/documents",
            {"documents": [{"text": "x", "metadata": {"a": {"b": 1}}}]},
            "documents.0.metadata",
            "no plain value",
        ),
    ],
)
def test_refused(client: httpx.Client, path: str, body: dict[str, Any], param: str, words: str) -> None:
    """A filter or metadata that cannot be used are a 400 with the field's name."""
    answer = client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("metadata", ["no JSON", "[1]", '{"a": {"b": 1}}'])
def test_refused_in_a_form(client: httpx.Client, metadata: str) -> None:
    """So are a form's."""
    answer = client.post("/v1/documents", files={"file": ("a.txt", TEXT.encode())}, data={"metadata": metadata})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata"), answer.text


def test_metadata_of_texts_that_a_request_brings(client: httpx.Client) -> None:
    """Other services' metadata of texts that a request brings may be of any form, and say nothing."""
    assert cited(client, documents=[{"text": TEXT, "metadata": {"source": {"nested": [1]}}}])
