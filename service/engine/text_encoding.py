"""The encoding of a text: UTF-8 although some bytes are damaged, UTF-16 and 32, or a code page that is detected."""

from __future__ import annotations

import codecs

from cacheblend.base.errors import needs_extra

MAX_SAMPLE_BYTES = 2**16  # that a text's encoding is detected by
DAMAGED_SHARE = 0.1  # of the characters beyond ASCII that may be damaged in UTF-8
NUL_SHARE = 0.3  # of a text's bytes: two of five and more in UTF-16, few where a disk lost what was written
_CONTROL_BYTES = bytes({*range(32), 127} - set(b"\0\t\n\r\f\x0e\x0f\x1b"))  # the last three change ISO 2022's characters
_MARKS = dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "utf-32")  # the first begins as one of UTF-16
_MARKS |= dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-16")


def decoded(raw: bytes) -> str | None:
    """The text of some bytes, U+FFFD in place of those that are damaged; None if they are none."""
    encoding = next((name for mark, name in _MARKS.items() if raw.startswith(mark)), None)
    if encoding is None and raw.count(0) > NUL_SHARE * len(raw):
        encoding = "utf-16-le" if raw[1::2].count(0) > raw[::2].count(0) else "utf-16-be"
    elif encoding is None:
        raw = raw.replace(b"\0", b"")
        if len(raw.translate(None, _CONTROL_BYTES)) < len(raw):
            return None
        text = raw.decode("utf-8-sig", errors="replace")
        damaged, beyond = text.count("\ufffd"), len(text) - sum(map(str.isascii, text))
        if b"\x1b$" not in raw and (text.isascii() or damaged <= DAMAGED_SHARE * beyond):
            return text
        encoding = detected_encoding(raw)
    text = raw.decode(encoding or "ascii", errors="replace")
    return None if "\0" in text or text.count("\ufffd") > DAMAGED_SHARE * len(text) else text


def detected_encoding(raw: bytes) -> str | None:
    """The code page that the lines beyond ASCII are in, wherever they stand."""
    with needs_extra("rag"):
        import chardet

    sample = b"\n".join(line for line in raw.splitlines() if not line.isascii())[:MAX_SAMPLE_BYTES]
    encoding: str | None = chardet.detect(sample or raw[:MAX_SAMPLE_BYTES])["encoding"]
    return encoding
