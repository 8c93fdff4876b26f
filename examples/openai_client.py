"""OpenAI's own client against `cacheblend serve`: upload documents, ask, read the stream.

cacheblend serve --model path/to/model &
python examples/openai_client.py
"""

from __future__ import annotations

import argparse

from openai import OpenAI

DOCUMENTS = [
    {"id": "travel", "title": "Travel", "text": "Journeys abroad are signed off by the head of the department."},
    {"id": "leave", "title": "Leave", "text": "Everyone has thirty days of leave."},
]


def run(client: OpenAI, question: str = "How many days of leave are there?") -> str:
    """Upload, and print the answer as it comes."""
    client.post("/documents?wait=true", body={"documents": DOCUMENTS}, cast_to=object)
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        stream=True,
        extra_body={"num_chunks": 2},  # chunks; also: documents, method, recompute_ratio, cache_salt
    )
    text = ""
    for event in stream:
        piece = event.choices[0].delta.content or ""
        print(piece, end="", flush=True)
        text += piece
    print()
    return text


def main() -> None:
    """Run it against a service."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    options = parser.parse_args()
    with OpenAI(base_url=options.base_url, api_key=options.api_key) as client:
        run(client)


if __name__ == "__main__":
    main()
