"""A chunk's KV in the form in which it is stored: one encoded tensor a layer, and what is known of them.

Shapes: H KV heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
import xxhash

from cacheblend.base.buffer_pool import HUGE_PAGE_BYTES, KeptMemory
from cacheblend.base.errors import InputError
from cacheblend.base.host_bytes import Bytes

from .chunk import ChunkKV, LayerPair
from .codec import EncodedShape, LayerShape
from .codecs import CODECS
from .direct_read import BLOCK_BYTES, aligned_blocks
from .key import ChunkKey

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PIECE_BYTES = 8 * 2**20  # of memory; a larger entry lies in several pieces, which others can use again
PIECES = KeptMemory(128 * 2**20, slack=9 / 8)  # what a piece's memory has too much, no budget counts


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
    def layers(self) -> int:
        """Number of layers."""
        return len(self.heads)

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
    for layer in range(info.layers):
        if at - begun >= PIECE_BYTES and at % BLOCK_BYTES == 0:
            pieces.append([])
            begun = at
        pieces[-1].append(layer)
        at += info.layer_bytes(layer)
    return pieces


def _empty_piece(count: int) -> Bytes:
    """Whole blocks of memory that begin on a block, for `count` bytes; zeros stand behind those."""
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
        pieces: what stands behind the header in its file, the layers' tensors without gaps, and zeros up to a whole block; each
            in memory that begins on a block, so that it is written past the page cache without a copy.
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
    def of(cls, key: ChunkKey, kv: ChunkKV) -> EncodedEntry:
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
        if kv.dtype not in DTYPES or not kv.nbytes:
            names = ", ".join(str(dtype) for dtype in DTYPES)
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
            rest = torch.from_numpy(piece)
            for _, same in groupby(layers, info.encoded_shape):  # hybrid models have layers of several shapes
                which = list(same)
                (dtype, shape), count = info.encoded_shape(which[0]), sum(map(info.layer_bytes, which))
                codec.encode([kv.layers[layer] for layer in which], rest[:count].view(dtype).view(len(which), *shape))
                rest = rest[count:]
            checksums += [checksum(entry.bytes[layer]) for layer in layers]  # while the processor's cache still has them
        return entry

    @property
    def nbytes(self) -> int:
        """Bytes of all encoded tensors."""
        return self.info.nbytes

    def read_layer(self, layer: int) -> torch.Tensor:
        """The layer's encoded tensor, not copied."""
        return torch.from_numpy(self.bytes[layer]).view(self.info.encoded_shape(layer).dtype)

    def chunk(self, *, copy: bool) -> ChunkKV:
        """The chunk's KV; with `copy` it shares no memory with this entry."""
        pairs = [self.info.decode(layer, self.read_layer(layer)) for layer in range(self.info.layers)]
        if copy:
            pairs = [(k_HTD.clone(), v_HTD.clone()) for k_HTD, v_HTD in pairs]
        return ChunkKV(pairs, self.info.token_ids, self.info.prefix_ids, self.info.model, self.info.context)
