"""A chunk's KV in the form in which it is stored: one encoded tensor a layer, behind a header.

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

from .chunk import ChunkKey, ChunkKV, host_bytes
from .codecs import CODECS, EncodedShape, LayerPair, LayerShape

BLOCK_BYTES = 4096  # of direct writes: offset, length and memory are multiples of it
PIECE_BYTES = 8 * 2**20  # of memory; a larger entry lies in several pieces, which others can use again
PIECES = BufferPool(128 * 2**20, slack=9 / 8)  # what a piece's memory has too much, no budget counts


def aligned_blocks(count: int) -> Bytes:
    """Memory that begins on a block, of full blocks for `count` bytes, padded with zeros."""
    size = -(-count // BLOCK_BYTES) * BLOCK_BYTES
    raw = host_bytes(torch.empty(size + BLOCK_BYTES, dtype=torch.uint8, device="cpu"))
    blocks = raw[-raw.ctypes.data % BLOCK_BYTES :][:size]
    blocks[count:] = 0
    return blocks


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """All that is known of an entry without reading its keys and values."""

    key: ChunkKey
    token_ids: tuple[int, ...]  # the T of the chunk
    prefix_ids: tuple[int, ...]  # of what stood before it
    model: str | None  # what the `ChunkKV` said of its model: the key's model, or None
    dtype: torch.dtype  # of the decoded keys and values
    heads: tuple[tuple[int, int], ...]  # KV heads and head size of each layer; hybrid models differ from layer to layer
    context: str  # names what stood between the prefix and the chunk; see `context_digest`
    shapes: tuple[EncodedShape, ...] = field(init=False, repr=False, compare=False)  # of each layer's stored tensor
    sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)  # its bytes
    nbytes: int = field(init=False, repr=False, compare=False)  # of all of them

    def __post_init__(self) -> None:
        # Asked for many times by threads that hold up the computing one (see `host_bytes`), and mostly the same in all layers.
        shape_of = {heads: CODECS[self.key.codec].encoded_shape(self._layer_shape(heads)) for heads in set(self.heads)}
        shapes = tuple(map(shape_of.__getitem__, self.heads))
        sizes = tuple(shape.nbytes for shape in shapes)
        for name, value in (("shapes", shapes), ("sizes", sizes), ("nbytes", sum(sizes))):
            object.__setattr__(self, name, value)

    @property
    def num_layers(self) -> int:
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

    def decode(self, layer: int, encoded: torch.Tensor) -> LayerPair:
        return CODECS[self.key.codec].decode(encoded, self._layer_shape(self.heads[layer]))

    def _layer_shape(self, heads: tuple[int, int]) -> LayerShape:
        kv_heads, head_dim = heads
        return LayerShape(kv_heads, len(self.token_ids), head_dim, self.dtype)


ENTRY_FORMAT = 1
MAX_HEADER_BYTES = 16 * 2**20
LENGTH_BYTES = 8
# As safetensors names dtypes, by their names in torch.
DTYPES = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
_STORED_NAMES = {**DTYPES, "torch.uint8": "U8"}
_TORCH_DTYPES = {name: getattr(torch, dtype.removeprefix("torch.")) for dtype, name in DTYPES.items()}


def pack_header(info: EntryInfo, checksums: Sequence[str]) -> bytes:
    """The file's bytes before the first layer, padded to full blocks; `checksums` are of each layer's tensor.

    Raises:
        InputError: more token ids than a header has room for.
    """
    entry = {
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
        "checksums": checksums,
        "context": info.context,
    }
    text = json.dumps(entry, separators=(",", ":"))
    table: dict[str, object] = {"__metadata__": {"entry": text, "entry_xxh3": xxhash.xxh3_64_hexdigest(text.encode())}}
    offset = 0
    for layer, (shape, size) in enumerate(zip(info.shapes, info.sizes, strict=True)):
        # Zero-padded, so that readers that sort the names keep the layers' order.
        dtype, offsets = _STORED_NAMES[str(shape.dtype)], [offset, offset + size]
        table[f"layer_{layer:05d}"] = {"dtype": dtype, "shape": shape.shape, "data_offsets": offsets}
        offset += size
    header = json.dumps(table, separators=(",", ":")).encode()
    header = header.ljust(-(-(LENGTH_BYTES + len(header)) // BLOCK_BYTES) * BLOCK_BYTES - LENGTH_BYTES)
    if len(header) > MAX_HEADER_BYTES:
        raise InputError(f"a chunk of {len(info.token_ids)} tokens is too long to be stored; split it")
    return len(header).to_bytes(LENGTH_BYTES, "little") + header


def parse_header(raw: bytes | bytearray, digest: str) -> tuple[EntryInfo, list[str]]:
    """Read the header of the entry `digest`, without its length field: the arguments of `pack_header`.

    Raises:
        ValueError: the bytes are not a header that `pack_header` made, or that of another entry.
    """
    try:
        entry = json.loads(json.loads(raw)["__metadata__"]["entry"])
        if entry["format"] != ENTRY_FORMAT:
            raise ValueError(f"format {entry['format']} is not {ENTRY_FORMAT}, the one that this version reads")
        if entry["key"] != digest:
            raise ValueError(f"it is the header of entry {entry['key']}")
        info = EntryInfo(
            key=ChunkKey(digest, str(entry["model"]), str(entry["codec"]), str(entry["namespace"])),
            token_ids=tuple(map(int, entry["token_ids"])),
            prefix_ids=tuple(map(int, entry["prefix_ids"])),
            model=None if entry["kv_model"] is None else str(entry["kv_model"]),
            dtype=_TORCH_DTYPES[entry["dtype"]],
            heads=tuple((int(kv_heads), int(head_dim)) for kv_heads, head_dim in entry["heads"]),
            context=str(entry["context"]),
        )
        checksums = list(map(str, entry["checksums"]))
        if len(checksums) != info.num_layers or min(map(min, info.heads)) < 1:
            raise ValueError("it has no layers, or not a checksum for each")
        # What was read as another kind, a flipped bit and a wrong table of tensors are found at once.
        if pack_header(info, checksums)[LENGTH_BYTES:] != raw:
            raise ValueError("it is not what was written")
        return info, checksums
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__} {error}") from error


def checksum(stored: Bytes) -> str:
    """The xxh3-64 of contiguous bytes, in hex."""
    return xxhash.xxh3_64_hexdigest(stored.data)


def _layers_by_piece(info: EntryInfo) -> list[list[int]]:
    """Runs of layers that end on a block, of `PIECE_BYTES` and more where it can be; the last one may end anywhere."""
    pieces: list[list[int]] = [[]]
    at = begun = 0
    for layer, size in enumerate(info.sizes):
        if at - begun >= PIECE_BYTES and at % BLOCK_BYTES == 0:
            pieces.append([])
            begun = at
        pieces[-1].append(layer)
        at += size
    return pieces


def _empty_piece(count: int) -> Bytes:
    """Full blocks of memory that begin on a block, for `count` bytes, padded with zeros."""
    if count < HUGE_PAGE_BYTES:
        return aligned_blocks(count)
    blocks = PIECES.empty(-(-count // BLOCK_BYTES) * BLOCK_BYTES)
    blocks[count:] = 0
    return blocks


class EncodedEntry:
    """An entry in memory, never written to once it is filled.

    Args:
        info: all but the keys and values.
        checksums: of each layer's tensor.

    Attributes:
        pieces: the file after its header: the layers' tensors without gaps, and zeros up to a full block; each piece in
            memory that begins on a block, so that it is written past the page cache without a copy.
        bytes: of the stored tensor of each layer, a view: its shape, the last axis in bytes.
    """

    def __init__(self, info: EntryInfo, checksums: Sequence[str]) -> None:
        self.info, self.checksums, self.nbytes = info, checksums, info.nbytes
        self.pieces: list[Bytes] = []
        self.bytes: list[Bytes] = []
        for layers in _layers_by_piece(info):
            self.pieces.append(_empty_piece(sum(info.sizes[layer] for layer in layers)))
            at = 0
            for layer in layers:
                dtype, shape = info.shapes[layer]
                end = at + info.sizes[layer]
                self.bytes.append(self.pieces[-1][at:end].reshape(*shape[:-1], shape[-1] * dtype.itemsize))
                at = end

    @classmethod
    def from_chunk(cls, key: ChunkKey, kv: ChunkKV) -> EncodedEntry:
        """Encode a chunk's KV; shares no memory with it.

        Raises:
            InputError: the KV has no tokens or is not of a floating dtype that can be stored, or the key is not its key.
        """
        if str(kv.dtype) not in DTYPES or not kv.nbytes:
            names = ", ".join(DTYPES)
            raise InputError(f"a KV of {kv.nbytes} bytes and dtype {kv.dtype} cannot be stored: it must be one of {names}")
        info = EntryInfo(
            key=key,
            token_ids=tuple(kv.token_ids),
            prefix_ids=tuple(kv.prefix_ids),
            model=kv.model,
            dtype=kv.dtype,
            heads=tuple(map(kv.heads, range(kv.num_layers))),
            context=kv.context,
        )
        if kv.model is not None and (own := info.key_for(kv.model)) != key:
            raise InputError(f"the KV has key {own}, not {key}; make it of its own token_ids, prefix_ids, context and model")
        checksums: list[str] = []
        entry = cls(info, checksums)
        for piece, layers in zip(entry.pieces, _layers_by_piece(info), strict=True):
            unfilled = torch.from_numpy(piece)
            for (dtype, shape), same in groupby(layers, info.shapes.__getitem__):  # hybrid models have layers of several shapes
                which = list(same)
                count = sum(info.sizes[layer] for layer in which)
                into = unfilled[:count].view(dtype).view(len(which), *shape)
                CODECS[key.codec].encode([kv.layers[layer] for layer in which], into)
                unfilled = unfilled[count:]
            checksums += [checksum(entry.bytes[layer]) for layer in layers]  # while the processor's cache still has them
        return entry

    def check(self) -> None:
        """Raise `ValueError` if a layer does not match its checksum."""
        for layer, stored in enumerate(self.bytes):
            if checksum(stored) != self.checksums[layer]:
                raise ValueError(f"layer {layer} does not match its checksum")

    def read_layer(self, layer: int) -> torch.Tensor:
        """The layer's encoded tensor, not copied."""
        return torch.from_numpy(self.bytes[layer]).view(self.info.shapes[layer].dtype)

    def read_layer_into(self, layer: int, to_2HTB: Bytes) -> None:
        """Copy a layer of a raw entry to where it is needed."""
        np.copyto(to_2HTB, self.bytes[layer])

    def load(self) -> EncodedEntry:
        """Itself, as it is in memory."""
        return self

    def close(self) -> None:
        """Nothing: memory needs no closing."""

    def chunk(self, *, copy: bool) -> ChunkKV:
        """The chunk's KV; with `copy` it shares no memory with this entry."""
        pairs = [self.info.decode(layer, self.read_layer(layer)) for layer in range(self.info.num_layers)]
        if copy:
            pairs = [(k_HTD.clone(), v_HTD.clone()) for k_HTD, v_HTD in pairs]
        return ChunkKV(pairs, self.info.token_ids, self.info.prefix_ids, self.info.model, self.info.context)
