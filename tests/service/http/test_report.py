"""What a response tells of its chunks can be read."""

from __future__ import annotations

from fakes import tiny_tokenizer

from cacheblend.service.http.chat import token_texts

TEXT = "Ada Thornley plays the zither.\n\nHis café opened in 1988 🙂, as most people know"


def test_tokens_read_as_their_text() -> None:
    """The texts of a chunk's tokens are its text, also where a token alone loses its space, or is half a character."""
    tokenizer = tiny_tokenizer()
    token_ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    texts = token_texts(token_ids, tokenizer)
    assert len(texts) == len(token_ids) > 10
    assert "".join(texts) == tokenizer.decode(token_ids)
    assert "Ada Thornley plays" in "".join(texts)
