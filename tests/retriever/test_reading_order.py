"""The order that found chunks stand in a prompt."""

from __future__ import annotations

from cacheblend.retriever import Chunk, ScoredChunk, in_reading_order


def scored(document_id: str, position: int, distance: float) -> ScoredChunk:
    return ScoredChunk(Chunk(document_id, "v", position, "", "text", (1,)), distance)


def test_chunks_of_a_document_stand_in_its_order_and_documents_by_their_nearest_chunk():
    found = [scored("b", 1, 0.1), scored("a", 0, 0.2), scored("b", 0, 0.3), scored("c", 2, 0.4), scored("a", 3, 0.5)]
    order = [(each.chunk.document_id, each.chunk.position) for each in in_reading_order(found)]
    assert order == [("b", 0), ("b", 1), ("a", 0), ("a", 3), ("c", 2)]
    assert in_reading_order([]) == []
