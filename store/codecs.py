"""The codecs there are, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .codec import Codec
from .fp8_codec import Fp8Codec
from .int4_codec import Int4Codec
from .int8_codec import Int8Codec
from .raw_codec import RawCodec

_ALL: tuple[Codec, ...] = (RawCodec(), Fp8Codec(), Int8Codec(), Int4Codec())
CODECS: Mapping[str, Codec] = MappingProxyType({codec.name: codec for codec in _ALL})
