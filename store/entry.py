"""A chunk's KV in the form in which it is stored: one encoded tensor a layer, and what is known of them.

Shapes: H KV heads, T tokens, D head size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
import xxhash

from cacheblend.base.errors import InputError
from cacheblend.base.memory import HUGE_PAGE_BYTES, BufferPool, Bytes

from .chunk import ChunkKV, LayerPair
from .codecs import CODECS, EncodedShape, LayerShape
from .direct_io import BLOCK_BYTES, aligned_blocks
from .key import ChunkKey

# As safetensors names dtypes, by their names in torch.
DTYPES = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
PIECE_BYTES = 8 * 2**20  # of memory; a larger entry lies in several pieces, which others can use again
PIECES = BufferPool(128 * 2**20, slack=9 / 8)  # what a piece's memory has too much, no budget counts


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """All that is known of an entry without reading its keys and values.

    Args:
        key: the entry's name.
        token_ids: the T token ids of the chunk.
        prefix_ids: the token ids that stood before it.
        model: what the `ChunkKV` said of its model: the key's model, or None.
        dtype: of the decoded keys and values.
        heads: KV heads and head size of each layer; hybrid models differ from layer to layer.
        context: names what stood between the prefix and the chunk; see `context_digest`.

    Attributes:
        nbytes: of all stored tensors.

    """

    key: ChunkKey
    token_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...]
    model: str | None
    dtype: torch.dtype
    heads: tuple[tuple[int, int], ...]
    context: str = ""
    nbytes: int = field(init=False, repr=False, compare=False)
    _shapes: tuple[EncodedShape, ...] = field(init=False, repr=False, compare=False)
    _sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Asked for many times by threads that hold up the computing one (see `host_bytes`), and mostly the same in all layers.
        shape_of = {heads: CODECS[self.key.codec].encoded_shape(self._layer_shape(heads)) for heads in set(self.heads)}
        shapes = tuple(map(shape_of.__getitem__, self.heads))
        sizes = tuple(shape.nbytes for shape in shapes)
        for name, value in (("_shapes", shapes), ("_sizes", sizes), ("nbytes", sum(sizes))):
            object.__setattr__(self, name, value)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.heads)

    def key_for(self, model: str) -> ChunkKey:
        """The key that these tokens, computed by a model, have."""
        return ChunkKey.of(
            self.token_ids,
            prefix_ids=self.prefix_ids,
            context=self.context,
            model=model,
            codec=self.key.codec,
            namespace=self.key.namespace,
        )

    def encoded_shape(self, layer: int) -> EncodedShape:
        """Shape and dtype of the layer's stored tensor."""
        return self._shapes[layer]

    def layer_bytes(self, layer: int) -> int:
        """Bytes of the layer's stored tensor."""
        return self._sizes[layer]

    def decode(self, layer: int, encoded: torch.Tensor) -> LayerPair:
        """`k_HTD` and `v_HTD` of a layer's stored tensor."""
        return CODECS[self.key.codec].decode(encoded, self._layer_shape(self.heads[layer]))

    def _layer_shape(self, heads: tuple[int, int]) -> LayerShape:
        kv_heads, head_dim = heads
        return LayerShape(kv_heads, len(self.token_ids), head_dim, self.dtype)


def checksum(stored: Bytes) -> str:
    """The xxh3-64 of contiguous bytes, in hex."""
    return xxhash.xxh3_64_hexdigest(stored.data)


def _layers_by_piece(info: EntryInfo) -> list[list[int]]:
    """Runs of layers that end on a block, of `PIECE_BYTES` and more where it can be; the last one may end anywhere."""
    pieces: list[list[int]] = [[]]
    at = begun = 0
    for layer in range(info.num_layers):
        if at - begun >= PIECE_BYTES and at % BLOCK_BYTES == 0:
            pieces.append([])
            begun = at
        pieces[-1].append(layer)
        at += info.layer_bytes(layer)
    return pieces


def _empty_piece(count: int) -> Bytes:
    """Full blocks of memory that begin on a block, for `count` bytes, padded with zeros."""
    if count < HUGE_PAGE_BYTES:
        return aligned_blocks(count)
    blocks = PIECES.empty(-(-count // BLOCK_BYTES) * BLOCK_BYTES)
    blocks[count:] = 0
    return blocks


@dataclass(frozen=True, slots=True, eq=False)
class EncodedEntry:
    """An entry in memory, never written to once it is filled.

    Args:
        info: all but the keys and values.
        pieces: the file after its header: the layers' tensors without gaps, and zeros up to a full block; each piece in
            memory that begins on a block, so that it is written past the page cache without a copy.
        checksums: of each layer's tensor; see `checksum`.

    Attributes:
        bytes: of the stored tensor of each layer, a view: its shape, the last axis in bytes.

    """

    info: EntryInfo
    pieces: Sequence[Bytes]
    checksums: Sequence[str]
    bytes: tuple[Bytes, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        views = []
        for piece, layers in zip(self.pieces, _layers_by_piece(self.info), strict=True):
            at = 0
            for layer in layers:
                dtype, shape = self.info.encoded_shape(layer)
                end = at + self.info.layer_bytes(layer)
                views.append(piece[at:end].reshape(*shape[:-1], shape[-1] * dtype.itemsize))
                at = end
        object.__setattr__(self, "bytes", tuple(views))

    @classmethod
    def empty(cls, info: EntryInfo, checksums: Sequence[str]) -> EncodedEntry:
        """An entry that is yet to be filled, and has its checksums by then."""
        pieces = [sum(map(info.layer_bytes, layers)) for layers in _layers_by_piece(info)]
        return cls(info, tuple(map(_empty_piece, pieces)), checksums)

    @classmethod
    def from_chunk(cls, key: ChunkKey, kv: ChunkKV) -> EncodedEntry:
        """Encode a chunk's KV; shares no memory with it.

        Raises:
            InputError: the KV has no tokens or is not of a floating dtype that can be stored, or the key is not its key.

        """
        if kv.model is not None:
            own = ChunkKey.of(
                kv.token_ids,
                prefix_ids=kv.prefix_ids,
                context=kv.context,
                model=kv.model,
                codec=key.codec,
                namespace=key.namespace,
            )
            if own != key:
                raise InputError(
                    f"the KV of {len(kv.token_ids)} tokens of model {kv.model[:12]} has key {own}, not {key}; "
                    "make the key from the KV's own token_ids, prefix_ids, context and model"
                )
        if str(kv.dtype) not in DTYPES or not kv.nbytes:
            names = ", ".join(DTYPES)
            raise InputError(f"a KV of {kv.nbytes} bytes and dtype {kv.dtype} cannot be stored: it must be one of {names}")
        codec = CODECS[key.codec]
        info = EntryInfo(
            key=key,
            token_ids=tuple(kv.token_ids),
            prefix_ids=tuple(kv.prefix_ids),
            model=kv.model,
            dtype=kv.dtype,
            heads=tuple((k_HTD.shape[0], k_HTD.shape[2]) for k_HTD, _ in kv.layers),
            context=kv.context,
        )
        checksums: list[str] = []
        entry = cls.empty(info, checksums)
        for piece, layers in zip(entry.pieces, _layers_by_piece(info), strict=True):
            unfilled = torch.from_numpy(piece)
            for _, same in groupby(layers, info.encoded_shape):  # hybrid models have layers of several shapes
                which = list(same)
                (dtype, shape), count = info.encoded_shape(which[0]), sum(map(info.layer_bytes, which))
                codec.encode([kv.layers[layer] for layer in which], unfilled[:count].view(dtype).view(len(which), *shape))
                unfilled = unfilled[count:]
            checksums += [checksum(entry.bytes[layer]) for layer in layers]  # while the processor's cache still has them
        return entry

    @classmethod
    def filled(cls, header: EntryHeader, data: Bytes) -> EncodedEntry:
        """The entry of a header and a copy of its layers' tensors, which stand one after the other.

        Raises:
            ValueError: they are not the bytes that the header says.
        """
        info, at = header.info, 0
        if len(data) != info.nbytes:
            raise ValueError(f"its layers have {len(data)} bytes, not {info.nbytes}")
        entry = cls.empty(info, header.checksums)
        for layer, view in enumerate(entry.bytes):
            stored = data[at : at + info.layer_bytes(layer)]
            if checksum(stored) != header.checksums[layer]:
                raise ValueError(f"layer {layer} is not what was written")
            np.copyto(view, stored.reshape(view.shape))
            at += len(stored)
        return entry

    @property
    def nbytes(self) -> int:
        """Bytes of all encoded tensors."""
        return self.info.nbytes

    def parts(self) -> list[memoryview]:
        """The bytes of all encoded tensors, without copies, one after the other."""
        return [stored.reshape(-1).data for stored in self.bytes]

    def read_layer(self, layer: int) -> torch.Tensor:
        """The layer's encoded tensor, not copied."""
        return torch.from_numpy(self.bytes[layer]).view(self.info.encoded_shape(layer).dtype)

    def read_layer_into(self, layer: int, to_2HTB: Bytes) -> None:
        """Copy a layer of a raw entry to where it is needed."""
        np.copyto(to_2HTB, self.bytes[layer])

    def load(self) -> EncodedEntry:
        """Itself: see `StoredEntry`."""
        return self

    def close(self) -> None:
        """Nothing: see `StoredEntry`."""

    def chunk(self, *, copy: bool) -> ChunkKV:
        """The chunk's KV; with `copy` it shares no memory with this entry."""
        pairs = [self.info.decode(layer, self.read_layer(layer)) for layer in range(self.info.num_layers)]
        if copy:
            pairs = [(k_HTD.clone(), v_HTD.clone()) for k_HTD, v_HTD in pairs]
        return ChunkKV(pairs, self.info.token_ids, self.info.prefix_ids, self.info.model, self.info.context)


ENTRY_FORMAT = 1
MAX_HEADER_BYTES = 16 * 2**20
LENGTH_BYTES = 8
_DTYPES = {name: dtype.removeprefix("torch.") for dtype, name in DTYPES.items()}
_STORED_NAMES = {**DTYPES, "torch.uint8": "U8"}


@dataclass(frozen=True, slots=True)
class EntryHeader:
    """Header of an entry's file: `checksums` has the xxh3-64 of each layer's tensor, in hex."""

    info: EntryInfo
    checksums: Sequence[str]

    @classmethod
    def from_entry(cls, entry: EncodedEntry) -> EntryHeader:
        """The header for an entry in memory."""
        return cls(entry.info, entry.checksums)

    def pack(self) -> bytes:
        """The file's bytes before the first layer, padded to full blocks for direct reads.

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
                "dtype": DTYPES[str(info.dtype)],
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
    def parse(cls, raw: bytes | bytearray, digest: str | None) -> EntryHeader:
        """Read the header of the entry `digest`, or None for any entry, from its bytes, without their length field.

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
            if digest is not None and entry["key"] != digest:
                raise ValueError(f"it is the header of entry {entry['key']}")
            info = EntryInfo(
                key=ChunkKey(entry["key"], entry["model"], entry["codec"], entry["namespace"]),
                token_ids=tuple(entry["token_ids"]),
                prefix_ids=tuple(entry["prefix_ids"]),
                model=entry["kv_model"],
                dtype=getattr(torch, _DTYPES[entry["dtype"]]),
                heads=tuple((kv_heads, head_dim) for kv_heads, head_dim in entry["heads"]),
                context=_context(entry.get("context")),
            )
            if table != _table(info):
                raise ValueError("the table of tensors is not the one of the entry")
            checksums = entry["checksums"]
            if not isinstance(checksums, list) or [type(each) for each in checksums] != [str] * info.num_layers:
                raise ValueError("there is not a checksum for each layer")
            for name, kind in (("token_ids", int), ("prefix_ids", int), ("key", str), ("model", str), ("namespace", str)):
                values = entry[name] if kind is int else [entry[name]]
                if not isinstance(values, list) or any(type(value) is not kind for value in values):
                    raise ValueError(f"{name} is {str(entry[name])[:60]!r}")
            if any(type(value) is not int or value < 1 for heads in info.heads for value in heads):
                raise ValueError(f"heads is {str(entry['heads'])[:60]!r}")
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
    for layer in range(info.num_layers):
        shape = info.encoded_shape(layer)
        offsets = [offset, offset + shape.nbytes]
        table[f"layer_{layer:05d}"] = {
            "dtype": _STORED_NAMES[str(shape.dtype)],
            "shape": list(shape.shape),
            "data_offsets": offsets,
        }
        offset += shape.nbytes
    return table
