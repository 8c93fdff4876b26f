"""A chunk's KV in the form in which it is stored: one encoded tensor a layer, and what is known of them.

Shapes: H KV heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import xxhash

from .chunk import ChunkKV, LayerPair
from .codec import EncodedShape, LayerShape
from .codecs import CODECS
from .direct_read import BLOCK_BYTES, aligned_blocks
from .document_context import DocumentContext
from .errors import InputError
from .host_bytes import Bytes, host_bytes
from .key import ChunkKey

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PIECE_BYTES = 8 * 2**20  # malloc gives freed pieces of up to 32 MiB again; larger ones are new memory each time, which is slow


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
        context: what the text before the chunk in its document does to it; None where that is not known.

    """

    key: ChunkKey
    token_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...]
    model: str | None
    dtype: torch.dtype
    heads: tuple[tuple[int, int], ...]
    context: DocumentContext | None = None

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.heads)

    def layer_shape(self, layer: int) -> LayerShape:
        """Shape and dtype of the layer's decoded keys."""
        kv_heads, head_dim = self.heads[layer]
        return LayerShape(kv_heads, len(self.token_ids), head_dim, self.dtype)

    def encoded_shape(self, layer: int) -> EncodedShape:
        """Shape and dtype of the layer's stored tensor."""
        return CODECS[self.key.codec].encoded_shape(self.layer_shape(layer))

    def layer_bytes(self, layer: int) -> int:
        """Bytes of the layer's stored tensor."""
        return self.encoded_shape(layer).nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(map(self.layer_bytes, range(self.layers)))

    def decode(self, layer: int, encoded: torch.Tensor) -> LayerPair:
        """`k_HTD` and `v_HTD` of a layer's stored tensor."""
        return CODECS[self.key.codec].decode(encoded, self.layer_shape(layer))


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


@dataclass(frozen=True, slots=True, eq=False)
class EncodedEntry:
    """An entry in memory, never written to once it is filled.

    Args:
        info: all but the keys and values.
        pieces: what stands behind the header in its file, the layers' tensors without gaps, and zeros up to a whole block; each
            in memory that begins on a block, so that it is written past the page cache without a copy.
        checksums: of each layer's tensor; see `checksum`.

    Attributes:
        encoded: the stored tensor of each layer, a view.
        bytes: the same as bytes.

    """

    info: EntryInfo
    pieces: Sequence[Bytes]
    checksums: Sequence[str]
    encoded: tuple[torch.Tensor, ...] = field(init=False, repr=False)
    bytes: tuple[Bytes, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        views = []
        for piece, layers in zip(self.pieces, _layers_by_piece(self.info), strict=True):
            rest = torch.from_numpy(piece)
            for shape in map(self.info.encoded_shape, layers):
                views.append(rest[: shape.nbytes].view(shape.dtype).view(shape.shape))
                rest = rest[shape.nbytes :]
        object.__setattr__(self, "encoded", tuple(views))
        object.__setattr__(self, "bytes", tuple(map(host_bytes, views)))

    @classmethod
    def empty(cls, info: EntryInfo, checksums: Sequence[str]) -> EncodedEntry:
        """An entry that is yet to be filled, and has its checksums by then."""
        pieces = (sum(map(info.layer_bytes, layers)) for layers in _layers_by_piece(info))
        return cls(info, tuple(map(aligned_blocks, pieces)), checksums)

    @classmethod
    def of(cls, key: ChunkKey, kv: ChunkKV) -> EncodedEntry:
        """Encode a chunk's KV; shares no memory with it.

        Raises:
            InputError: the KV has no tokens or is not of a floating dtype that can be stored, or the key is not its key.

        """
        if kv.model is not None:
            own = ChunkKey.of(kv.token_ids, prefix_ids=kv.prefix_ids, model=kv.model, codec=key.codec, namespace=key.namespace)
            if own != key:
                raise InputError(
                    f"the KV of {len(kv.token_ids)} tokens of model {kv.model[:12]} has key {own}, not {key}; "
                    "make the key from the KV's own token_ids, prefix_ids and model"
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
        for (k_HTD, v_HTD), encoded, layer_bytes in zip(kv.layers, entry.encoded, entry.bytes, strict=True):
            codec.encode(k_HTD, v_HTD, encoded)
            checksums.append(checksum(layer_bytes))  # while the processor's cache still has it
        return entry

    @property
    def nbytes(self) -> int:
        """Bytes of all encoded tensors."""
        return self.info.nbytes

    def read_layer(self, layer: int) -> torch.Tensor:
        """The layer's encoded tensor, not copied."""
        return self.encoded[layer]

    def chunk(self, *, copy: bool) -> ChunkKV:
        """The chunk's KV; with `copy` it shares no memory with this entry."""
        pairs = [self.info.decode(layer, encoded) for layer, encoded in enumerate(self.encoded)]
        if copy:
            pairs = [(k_HTD.clone(), v_HTD.clone()) for k_HTD, v_HTD in pairs]
        return ChunkKV(pairs, self.info.token_ids, self.info.prefix_ids, self.info.model, self.info.context)
