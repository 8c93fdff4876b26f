"""Events of Anthropic's `/v1/messages`, read as its documentation and client have them."""

import json
from typing import Any

import httpx


def events_of(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, each named twice."""
    found = []
    for part in client.post("/v1/messages", json={**body, "stream": True}).text.strip().split("\n\n"):
        name, _, data = part.partition("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream makes up."""
    start, *events = events
    assert (start["type"], events[-1]) == ("message_start", {"type": "message_stop"})
    message: dict[str, Any] = start["message"]
    for event in events[:-1]:
        match event:
            case {"type": "content_block_start", "content_block": block, "index": index}:
                assert index == len(message["content"])
                message["content"].append(block)
            case {"type": "content_block_delta", "delta": delta, "index": index}:
                block = message["content"][index]
                if delta["type"] == "input_json_delta":
                    assert (block["type"], block["input"]) == ("tool_use", {})
                    block["input"] = json.loads(delta["partial_json"])
                else:
                    assert delta["type"] == f"{block['type']}_delta"
                    block[block["type"]] += delta[block["type"]]
            case {"type": "message_delta", "delta": delta, "usage": usage, "cacheblend": report}:
                message.update(delta, usage=usage, cacheblend=report)
    stopped = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert stopped == list(range(len(message["content"])))
    return message
