"""The encoding of a text: UTF-8 although some bytes are damaged, UTF-16 and 32, or a code page: declared, or detected."""

import codecs
import re
from contextlib import suppress

from cacheblend.base.errors import needs_extra

MAX_SAMPLE_BYTES = 2**16  # that a text's encoding is detected by
DAMAGED_SHARE = 0.1  # of the characters beyond ASCII that may be damaged in UTF-8
NUL_SHARE = 0.3  # of a text's bytes: two of five and more in UTF-16, few where a disk lost what was written
MIN_CONFIDENCE = 0.1  # of chardet; with less, short texts look Hebrew or Korean unless old code pages are left out
# Of cp1252: the euro, quotes, dashes and other characters that stand in texts which are ASCII else.
_ASCII, _SYMBOLS = bytes(range(128)), b"\x80\x91\x92\x93\x94\x95\x96\x97\xa3\xa7\xa9\xae\xb0\xb1\xb5\xba\xbc\xbd\xbe"
# Where they stand in words, or before what is no ASCII: letters, and punctuation of Chinese, of other code pages.
_LETTERS = re.compile(rb"(?i)[a-z](?:[\x80\x91\x93-\x95\xa3-\xbe][a-z]|[\xb1\xbc-\xbe])|[\xb1\xbc-\xbe][a-z]|\xa3[\xb0-\xbf]")
_OLD = ("cp437", "cp850", "IBM866", "ISO-8859-2", "iso8859-15")  # chardet's names of what short texts are in all the same
_CONTROL_BYTES = bytes({*range(32), 127} - set(b"\0\b\t\n\v\f\r\x0e\x0f\x1a\x1b"))  # of DOS and printers, and ISO 2022
_MARKS = dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "utf-32")  # the first begins as one of UTF-16
_MARKS |= dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-16")
# Others may be slow, or are no encoding of characters; UTF shows itself.
_CODE_PAGE = re.compile(r"(?:x-)?((?:iso|cp|windows|latin|koi8|shift|sjis|euc|gb|big5|ks_?c|ibm|mac|tis)[\w-]*)", re.IGNORECASE)
# By Python's names: what is declared, and the larger encoding that browsers read in its place, as many texts need it.
_LARGER = {"gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs"}
_LARGER |= {"iso8859-1": "cp1252", "iso8859-9": "cp1254"}


def code_page(declared: str) -> str:
    """Python's name of a declared code page as browsers read it; empty for one that is unknown, and for UTF and ASCII."""
    with suppress(LookupError):
        found = _CODE_PAGE.fullmatch(declared)
        name = codecs.lookup(found[1]).name if found else ""
        return _LARGER.get(name, name)
    return ""


def decoded(raw: bytes, declared: str = "") -> str | None:
    """The text of some bytes, U+FFFD in place of those that are damaged; None if they are none.

    Those of which an encoding is `declared` are a text; it is theirs if they are no UTF.
    """
    encoding = next((name for mark, name in _MARKS.items() if raw.startswith(mark)), None)
    if encoding is None and raw.count(0) > NUL_SHARE * len(raw):
        encoding = "utf-16-le" if raw[1::2].count(0) > raw[::2].count(0) else "utf-16-be"
    elif encoding is None:
        raw = raw.replace(b"\0", b"")
        if not declared and len(raw.translate(None, _CONTROL_BYTES)) < len(raw):
            return None
        text = raw.decode("utf-8-sig", errors="replace")
        damaged, beyond = text.count("\ufffd"), len(text) - sum(map(str.isascii, text))
        if b"\x1b$" not in raw and (text.isascii() or damaged <= DAMAGED_SHARE * beyond):
            return text
        encoding = code_page(declared) or detected_encoding(raw)
    text = raw.decode(encoding or "ascii", errors="replace")
    is_text = "\0" not in text and text.count("\ufffd") <= DAMAGED_SHARE * len(text)
    return text if is_text else decoded(raw) if declared else None


def detected_encoding(raw: bytes) -> str | None:
    """The code page that the lines beyond ASCII are in, wherever they stand."""
    with needs_extra("rag"):
        import chardet

    sample = (b"\n".join(line for line in raw.splitlines() if not line.isascii()) or raw)[:MAX_SAMPLE_BYTES]
    if (beyond := sample.translate(None, _ASCII)) and not beyond.translate(None, _SYMBOLS) and not _LETTERS.search(sample):
        return "cp1252"
    found = chardet.detect(sample)
    encoding: str | None = found["encoding"]
    if found["confidence"] < MIN_CONFIDENCE and encoding not in _OLD:
        newer: str = chardet.detect(sample, encoding_era=chardet.EncodingEra.MODERN_WEB)["encoding"] or ""
        with suppress(UnicodeError, LookupError):
            raw.decode(newer)
            return newer
    return encoding
