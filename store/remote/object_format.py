"""Objects of the remote tier: the bytes of an entry's file, after a seal where the deployment has a secret.

```
0            8 bytes    SEAL_MAGIC
8            4 bytes    number of layers, little-endian
12           32 bytes   tag of the header and of the tags that follow it
44           32 bytes   tag of each layer's tensor
n x 4096     the bytes of the entry's file: header and layers (docs/store.md)
```

A tag is HMAC-SHA256 over the object's name and the bytes, with a key that only the deployment's secret and the tenant give. So
layers are authenticated one by one as they come, and belong to this header of this entry; and nothing of a header is parsed
before its tag was checked. Without a secret there is no seal, and the checksums of the file are checked alone.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cacheblend.base.errors import DamagedEntryError
from cacheblend.base.memory import Bytes
from cacheblend.store.entry import (
    BLOCK_BYTES,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    EncodedEntry,
    EntryHeader,
    EntryInfo,
    checksum,
)
from cacheblend.store.key import ChunkKey

from .backend import ObjectRange

SEAL_MAGIC = b"CBSEAL2\0"
TAG_BYTES = 32
MAX_LAYERS = 4096
PREFIX_BYTES = 16 * 1024  # read of an object first: seal and header of nearly all entries
_SEAL_HEAD = struct.Struct("<8sI")


@dataclass(frozen=True, slots=True)
class ObjectLayout:
    """Content of an object's first bytes: its entry, and where and what its layers are.

    Args:
        name: of the object.
        header: of the entry's file.
        tags: of each layer's tensor; none without a secret.
        offsets: of each layer in the object, and its end.
    """

    name: str
    header: EntryHeader
    tags: Sequence[bytes]
    offsets: Sequence[int]

    @property
    def info(self) -> EntryInfo:
        """All but the keys and values."""
        return self.header.info

    def range_of(self, layer: int) -> ObjectRange:
        """Where the layer's tensor is."""
        return ObjectRange(self.name, self.offsets[layer], self.offsets[layer + 1])

    def whole(self) -> ObjectRange:
        """Where all layers are."""
        return ObjectRange(self.name, self.offsets[0], self.offsets[-1])


class ObjectFormat:
    """Names, seals and checks of objects.

    Equal entries of two tenants are two objects, each with its tenant's name and seal, so that a tenant finds and
    deletes its own alone.

    Args:
        secret: of the deployment; None for names that follow from tenant and key, and no seal.
        tenant: whose entries these are; None in a deployment without tenants.
    """

    def __init__(self, secret: bytes | None, tenant: str | None = None) -> None:
        self._tenant = tenant
        if secret is not None and tenant is not None:
            secret = hmac.digest(secret, b"tenant\0" + tenant.encode(), "sha256")
        self._keys = None if secret is None else tuple(hmac.digest(secret, use, "sha256") for use in (b"names", b"tags"))

    def name(self, digest: str) -> str:
        """The name of an entry's object."""
        if self._keys is not None:
            return hmac.digest(self._keys[0], digest.encode(), "sha256").hex()
        return digest if self._tenant is None else hashlib.sha256(f"{self._tenant}\0{digest}".encode()).hexdigest()

    def pack(self, entry: EncodedEntry) -> list[Bytes]:
        """The bytes of an entry's object, in parts; the entry's own memory is among them."""
        header, left = EntryHeader.of(entry).pack(), entry.nbytes
        parts = [np.frombuffer(self._seal(entry, header) + header, np.uint8)]
        for piece in entry.pieces:  # the last one has zeros after the last layer
            parts.append(piece[: min(left, len(piece))])
            left -= len(parts[-1])
        return parts

    def prefix_bytes(self, data: Bytes) -> int:
        """Bytes that stand before the first layer, given at least the first block of them.

        Raises:
            DamagedEntryError: they are not an object's.
        """
        seal_bytes = self._seal_bytes(data)
        start = data[seal_bytes : seal_bytes + LENGTH_BYTES]
        header_bytes = int.from_bytes(start.tobytes(), "little")
        if len(start) < LENGTH_BYTES or not 0 < header_bytes <= MAX_HEADER_BYTES:
            raise DamagedEntryError(f"an object of {len(data)} bytes or more says that its header has {header_bytes}")
        return seal_bytes + LENGTH_BYTES + header_bytes

    def parse(self, name: str, data: Bytes, digest: str | None = None) -> ObjectLayout:
        """The layout of an object, from its first `prefix_bytes` or more.

        Args:
            name: of the object.
            data: the bytes.
            digest: of the entry that it must be of; None for whichever the header names, if the object's name is that entry's.

        Raises:
            DamagedEntryError: they are not what was written for this entry, or not with this secret.
        """
        prefix_bytes = self.prefix_bytes(data)
        if len(data) < prefix_bytes:
            raise DamagedEntryError(f"object {name} ends in its header, after {len(data)} bytes")
        seal_bytes = self._seal_bytes(data)
        raw = data[seal_bytes:prefix_bytes].tobytes()
        tags = [] if self._keys is None else self._checked_tags(name, data[:seal_bytes].tobytes(), raw)
        try:
            header = EntryHeader.parse(raw[LENGTH_BYTES:], digest)
            info = header.info
            if self.name(info.key.digest) != name:
                raise ValueError("it is that of another object")
            if self._keys is not None and len(tags) != info.num_layers:
                raise ValueError(f"it has {info.num_layers} layers, and the seal {len(tags)}")
            self._check_key(info)
        except ValueError as error:  # `InputError` and texts that are no Unicode among them
            raise DamagedEntryError(f"object {name} has a damaged header: {error}") from error
        sizes = map(info.layer_bytes, range(info.num_layers))
        return ObjectLayout(name, header, tags, list(itertools.accumulate(sizes, initial=prefix_bytes)))

    def check(self, layout: ObjectLayout, layer: int, data: Bytes) -> None:
        """Refuse bytes that are not the layer's.

        Raises:
            DamagedEntryError: so.
        """
        info = layout.info
        if len(data) != info.layer_bytes(layer):
            raise DamagedEntryError(
                f"layer {layer} of object {layout.name} has {len(data)} bytes, not {info.layer_bytes(layer)}"
            )
        if self._keys is None:
            good = checksum(data) == layout.header.checksums[layer]
        else:
            good = hmac.compare_digest(self._layer_tag(layout.name, layer, data), layout.tags[layer])
        if not good:
            raise DamagedEntryError(f"layer {layer} of object {layout.name} is not what was written")

    def _check_key(self, info: EntryInfo) -> None:
        """Hold the header against the key: it says which tokens of which tenant and model these layers are of."""
        key = info.key
        own = ChunkKey.of(
            info.token_ids,
            prefix_ids=info.prefix_ids,
            context=info.context,
            model=key.model,
            codec=key.codec,
            namespace=key.namespace,
        )
        if own != key or info.model not in (None, key.model):
            raise ValueError("it is not that of its key")

    def _checked_tags(self, name: str, seal: bytes, header: bytes) -> list[bytes]:
        """The tags of an object's layers, once they and the header are known to be of this deployment."""
        _, layers = _SEAL_HEAD.unpack(seal[: _SEAL_HEAD.size])
        starts = range(_SEAL_HEAD.size, _SEAL_HEAD.size + TAG_BYTES * (1 + layers), TAG_BYTES)
        whole, *tags = [seal[start : start + TAG_BYTES] for start in starts]
        is_padded = not any(seal[starts.stop :])  # no tag covers it
        if not (hmac.compare_digest(whole, self._header_tag(name, header, tags)) and is_padded):
            raise DamagedEntryError(f"object {name} was not written with this deployment's secret, or altered")
        return tags

    def _seal(self, entry: EncodedEntry, header: bytes) -> bytes:
        if self._keys is None:
            return b""
        name = self.name(entry.info.key.digest)
        tags = [self._layer_tag(name, layer, stored.reshape(-1)) for layer, stored in enumerate(entry.bytes)]
        seal = _SEAL_HEAD.pack(SEAL_MAGIC, len(tags)) + self._header_tag(name, header, tags) + b"".join(tags)
        return seal.ljust(_whole_blocks(len(seal)), b"\0")

    def _seal_bytes(self, data: Bytes) -> int:
        if self._keys is None:
            return 0
        magic, layers = _SEAL_HEAD.unpack(data[: _SEAL_HEAD.size].tobytes().ljust(_SEAL_HEAD.size, b"\0"))
        if magic != SEAL_MAGIC or layers > MAX_LAYERS:
            raise DamagedEntryError("an object has no seal of this deployment")
        return _whole_blocks(_SEAL_HEAD.size + TAG_BYTES * (1 + layers))

    def _header_tag(self, name: str, header: bytes, tags: Sequence[bytes]) -> bytes:
        return self._tag(b"header", name, len(tags), b"".join(tags), header)

    def _layer_tag(self, name: str, layer: int, data: Bytes) -> bytes:
        return self._tag(b"layer", name, layer, data.data)

    def _tag(self, use: bytes, name: str, number: int, *parts: bytes | memoryview) -> bytes:
        assert self._keys is not None
        mac = hmac.new(self._keys[1], struct.pack("<8s64sI", use, name.encode(), number), hashlib.sha256)
        for part in parts:
            mac.update(part)
        return mac.digest()


def _whole_blocks(count: int) -> int:
    return -(-count // BLOCK_BYTES) * BLOCK_BYTES
