"""The safetensors header of an entry's file: what the entry is, and where its layers are.

`__metadata__` holds all that is known of the entry as JSON (`entry`), with a checksum of its own. The table of tensors
follows from it, so a reader compares the table instead of trusting it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash

from cacheblend.base.errors import InputError

from .direct_read import BLOCK_BYTES
from .entry import EncodedEntry, EntryInfo
from .key import ChunkKey

ENTRY_FORMAT = 1
MAX_HEADER_BYTES = 16 * 2**20
LENGTH_BYTES = 8
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_STORED_NAMES = {**_NAMES, torch.uint8: "U8"}


@dataclass(frozen=True, slots=True)
class EntryHeader:
    """What a file says of its entry: `checksums` has the xxh3-64 of each layer's tensor, in hex."""

    info: EntryInfo
    checksums: Sequence[str]

    @classmethod
    def of(cls, entry: EncodedEntry) -> EntryHeader:
        """The header for an entry in memory."""
        return cls(entry.info, entry.checksums)

    def pack(self) -> bytes:
        """The bytes that stand before the first layer, padded to a whole number of blocks for direct reads.

        Raises:
            InputError: more token ids than a header has room for.

        """
        info = self.info
        text = json.dumps(
            {
                "format": ENTRY_FORMAT,
                "key": info.key.digest,
                "model": info.key.model,
                "codec": info.key.codec,
                "namespace": info.key.namespace,
                "kv_model": info.model,
                "dtype": _NAMES[info.dtype],
                "heads": info.heads,
                "prefix_ids": info.prefix_ids,
                "token_ids": info.token_ids,
                "checksums": self.checksums,
                "context": info.context,
            },
            separators=(",", ":"),
        )
        metadata = {"entry": text, "entry_xxh3": xxhash.xxh3_64_hexdigest(text.encode())}
        header = json.dumps({"__metadata__": metadata, **_table(info)}, separators=(",", ":")).encode()
        header = header.ljust(-(-(LENGTH_BYTES + len(header)) // BLOCK_BYTES) * BLOCK_BYTES - LENGTH_BYTES)
        if len(header) > MAX_HEADER_BYTES:
            raise InputError(f"a chunk of {len(info.token_ids)} tokens is too long to be stored; split it")
        return len(header).to_bytes(LENGTH_BYTES, "little") + header

    @classmethod
    def parse(cls, raw: bytes | bytearray, digest: str) -> EntryHeader:
        """Read the header of the entry `digest` from its bytes, without their length field.

        Raises:
            ValueError: they are not a header that `pack` made, or that of another entry.

        """
        try:
            table = json.loads(raw)
            metadata = table.pop("__metadata__")
            if xxhash.xxh3_64_hexdigest(metadata["entry"].encode()) != metadata["entry_xxh3"]:
                raise ValueError("the description of the entry does not match its checksum")
            entry = json.loads(metadata["entry"])
            if entry["format"] != ENTRY_FORMAT:
                raise ValueError(f"format {entry['format']} is not {ENTRY_FORMAT}, the one that this version reads")
            if entry["key"] != digest:
                raise ValueError(f"it is the header of entry {entry['key']}")
            info = EntryInfo(
                key=ChunkKey(entry["key"], entry["model"], entry["codec"], entry["namespace"]),
                token_ids=tuple(entry["token_ids"]),
                prefix_ids=tuple(entry["prefix_ids"]),
                model=entry["kv_model"],
                dtype=_DTYPES[entry["dtype"]],
                heads=tuple((kv_heads, head_dim) for kv_heads, head_dim in entry["heads"]),
                context=_context(entry.get("context")),
            )
            if table != _table(info):
                raise ValueError("the table of tensors is not the one of the entry")
            checksums = entry["checksums"]
            if not isinstance(checksums, list) or [type(each) for each in checksums] != [str] * info.layers:
                raise ValueError("there is not a checksum for each layer")
            for name, kind in (("token_ids", int), ("prefix_ids", int), ("model", str), ("namespace", str)):
                values = entry[name] if kind is int else [entry[name]]
                if not isinstance(values, list) or any(type(value) is not kind for value in values):
                    raise ValueError(f"{name} is {str(entry[name])[:60]!r}")
            if not isinstance(info.model, str | None):
                raise ValueError(f"kv_model is {str(info.model)[:60]!r}")
            return cls(info, checksums)
        except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"{type(error).__name__} {error}") from error


def _context(found: object) -> str:
    """Files that older versions wrote have none, or what the document did to the chunk: their KV was computed without one."""
    return found if isinstance(found, str) else ""


def _table(info: EntryInfo) -> dict[str, dict[str, object]]:
    """The table of tensors; names are zero-padded, so that readers that sort them keep the layers' order."""
    table: dict[str, dict[str, object]] = {}
    offset = 0
    for layer in range(info.layers):
        shape = info.encoded_shape(layer)
        offsets = [offset, offset + shape.nbytes]
        table[f"layer_{layer:05d}"] = {"dtype": _STORED_NAMES[shape.dtype], "shape": list(shape.shape), "data_offsets": offsets}
        offset += shape.nbytes
    return table
