"""A chunk's KV and its key: `ChunkKey` names it, `ChunkKV` has it in memory, `KVHandle` is the interface of every kind of KV.

Shapes: H KV heads, T tokens of the chunk, D head size, B bytes of a head's vector.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.base.memory import Bytes

from .codecs import CODECS, LayerPair

KEY_FORMAT = 1
PASSAGES = "passages:"  # namespaces that begin so have entries that are evicted first, within a budget for each
_MAX_ID = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """The key of one chunk's KV; `str(key)` is its SHA-256 in hex. Make one with `ChunkKey.of`."""

    digest: str
    model: str
    codec: str
    namespace: str

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        *,
        prefix_ids: Sequence[int] = (),
        context: str = "",
        model: str,
        codec: str = "raw",
        namespace: str = "",
    ) -> Self:
        """The key of a chunk's KV.

        Args:
            token_ids: the chunk's own token ids.
            prefix_ids: the token ids that stand before it while its KV is computed.
            context: names what stands between those and the chunk; see `context_digest`.
            model: fingerprint of the model.
            codec: one of `CODECS`.
            namespace: whose entry it is; tenants with different namespaces never see each other's entries.

        Raises:
            ConfigError: an unknown codec.
            InputError: no token ids, or an id that is not in 0..2**63-1.
        """
        if codec not in CODECS:
            raise ConfigError("codec", codec, f"use one of {', '.join(sorted(CODECS))}")
        if not len(token_ids):
            raise InputError("a ChunkKey needs at least one token id; got none")
        fields = (
            struct.pack("<q", KEY_FORMAT),
            model.encode(),
            codec.encode(),
            _packed("prefix_ids", prefix_ids),
            _packed("token_ids", token_ids),
            namespace.encode(),
            *([context.encode()] if context else []),
        )
        return cls(hashlib.sha256(length_prefixed(fields)).hexdigest(), model, codec, namespace)

    def __str__(self) -> str:
        return self.digest


def length_prefixed(fields: Iterable[bytes]) -> bytes:
    """Fields, each after its length in bytes, so that no two lists of fields give the same bytes."""
    return b"".join(struct.pack("<q", len(field)) + field for field in fields)


def context_digest(filler_ids: Sequence[int], earlier: Iterable[Sequence[int]]) -> str:
    """Names the context of a chunk's KV: 128 bits of a SHA-256, in hex; empty for none.

    Args:
        filler_ids: token ids of filler passages.
        earlier: token ids of each chunk of the document that stood between them and the chunk.
    """
    texts = (filler_ids, [token for chunk in earlier for token in chunk])
    if not any(map(len, texts)):
        return ""
    packed = b"".join(struct.pack(f"<q{len(ids)}q", len(ids), *ids) for ids in texts)
    return hashlib.sha256(packed).hexdigest()[:32]


def _packed(name: str, ids: Sequence[int]) -> bytes:
    """Ids as little-endian int64."""
    values = [int(token) for token in ids]
    for token in values:
        if not 0 <= token <= _MAX_ID:
            raise InputError(f"{name} holds {token}: token ids are whole numbers from 0 to 2**63-1")
    return struct.pack(f"<{len(values)}q", *values)


def host_bytes(tensor: torch.Tensor) -> Bytes:
    """View a CPU tensor as bytes; the last axis, which must be contiguous, counts bytes instead of numbers."""
    view: Bytes = tensor.view(torch.uint8).numpy()
    return view


class EncodedLayer(NamedTuple):
    """A layer in its codec's form on the CPU, read-only, and the function that decodes it on any device to `k_HTD`, `v_HTD`."""

    tensor: torch.Tensor
    decode: Callable[[torch.Tensor], LayerPair]


class KVHandle(Protocol):
    """The KV of T tokens, wherever it lies: a `ChunkKV`, a `Placement` in a tier, a part of it, a `PrefixRun`. Thread-safe."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The T token ids of the KV."""

    @property
    def prefix_ids(self) -> Sequence[int]:
        """The token ids of the prefix that the KV was computed after."""

    @property
    def model(self) -> str | None:
        """Fingerprint of the model that computed it; None where unknown."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""

    @property
    def rotated(self) -> bool:
        """Whether the keys have their rotary embedding, so that they are right only at the prompt's start."""

    @property
    def tier(self) -> str:
        """Name of the tier that holds it; "memory" if none does."""

    @property
    def in_memory(self) -> bool:
        """Whether reading a layer is a copy, which waits for no device."""

    def heads(self, layer: int) -> tuple[int, int]:
        """KV heads and head size of one layer."""

    def layer_bytes(self, layer: int) -> int:
        """Bytes that are loaded for one layer."""

    def read_layer(self, layer: int) -> LayerPair:
        """`k_HTD` and `v_HTD` of one layer, read-only.

        Raises:
            DamagedEntryError: a stored entry's bytes are not the ones that were written.
            StoreError: the KV was released.
        """

    def read_layer_into(self, layer: int, to_2HTB: Bytes) -> None:
        """Read one layer to CPU memory, in which each head's (T, B) is contiguous, in this thread only.

        Raises as `read_layer` does, and `InputError` if the memory has another shape than the layer.
        """

    def copy_layer(self, layer: int, to_2HTD: torch.Tensor) -> None:
        """Copy one layer to a tensor on any device, by all of PyTorch's threads; raises as `read_layer` does."""

    def encoded_layer(self, layer: int) -> EncodedLayer | None:
        """One layer as it is stored; None if that is plain keys and values. Raises as `read_layer` does."""


class PlainKV:
    """The parts of a `KVHandle` that follow from `read_layer`, for keys and values on any device that are not encoded."""

    rotated: bool = False  # these three: see `KVHandle`
    tier: str = "memory"
    in_memory: bool = True

    def read_layer_into(self: KVHandle, layer: int, to_2HTB: Bytes) -> None:
        check_shape(self, layer, to_2HTB)
        for to_HTB, x_HTD in zip(to_2HTB, self.read_layer(layer), strict=True):
            x_HTD = x_HTD.detach().cpu()
            # A copy by PyTorch would start an OpenMP team for this thread, which slows all other threads' parallel regions.
            np.copyto(to_HTB, host_bytes(x_HTD if x_HTD.stride(-1) == 1 else x_HTD.contiguous()))

    def copy_layer(self: KVHandle, layer: int, to_2HTD: torch.Tensor) -> None:
        for to_HTD, x_HTD in zip(to_2HTD, self.read_layer(layer), strict=True):
            to_HTD.copy_(x_HTD)

    def encoded_layer(self, layer: int) -> EncodedLayer | None:
        return None


class KVPart(PlainKV):
    """The KV of a run of a chunk's tokens, of which `start` is the first: a `KVHandle`."""

    def __init__(self, kv: KVHandle, start: int, token_ids: Sequence[int]) -> None:
        self._kv, self._part, self.token_ids = kv, slice(start, start + len(token_ids)), token_ids
        self.prefix_ids, self.model, self.dtype, self.num_layers = kv.prefix_ids, kv.model, kv.dtype, kv.num_layers
        self.tier, self.in_memory, self.heads, self.layer_bytes = kv.tier, kv.in_memory, kv.heads, kv.layer_bytes

    def read_layer(self, layer: int) -> LayerPair:
        k_HTD, v_HTD = self._kv.read_layer(layer)
        return k_HTD[:, self._part], v_HTD[:, self._part]


def check_shape(kv: KVHandle, layer: int, to_2HTB: Bytes) -> None:
    """Refuse memory whose shape differs from the layer's bytes, with an `InputError`."""
    kv_heads, head_dim = kv.heads(layer)
    needed = (2, kv_heads, len(kv.token_ids), head_dim * kv.dtype.itemsize)
    if to_2HTB.shape != needed:
        raise InputError(f"layer {layer} of the KV has bytes {needed}, and the memory for it {to_2HTB.shape}")


@dataclass(frozen=True, slots=True, eq=False)
class ChunkKV(PlainKV):
    """The KV cache of one chunk, computed after a prefix and a context (paper §4.2, where both are empty).

    Args:
        layers: one pair a layer, `k_HTD` and `v_HTD`, both of the model's dtype. Keys are as the key projection (and key
            norm) returns them, before the rotary embedding, so that a chunk can stand anywhere.
        token_ids: the T token ids of the chunk; the prefix is not among them.
        prefix_ids: the token ids that stood before the chunk while it was computed.
        model: fingerprint of the model that computed it; None where the caller does not know.
        context: names what stood between the prefix and the chunk, see `context_digest`; empty for nothing.

    Raises:
        InputError: no layers, or tensors whose shape does not fit the token ids.
    """

    layers: Sequence[LayerPair]
    token_ids: Sequence[int]
    prefix_ids: Sequence[int] = ()
    model: str | None = None
    context: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple((k_HTD, v_HTD) for k_HTD, v_HTD in self.layers))
        object.__setattr__(self, "token_ids", tuple(map(int, self.token_ids)))
        object.__setattr__(self, "prefix_ids", tuple(map(int, self.prefix_ids)))
        if not self.layers:
            raise InputError("a ChunkKV needs the keys and values of at least one layer; got none")
        for layer, (k_HTD, v_HTD) in enumerate(self.layers):
            if k_HTD.dim() != 3 or k_HTD.shape != v_HTD.shape or k_HTD.shape[1] != len(self.token_ids):
                wanted, found = f"(kv_heads, {len(self.token_ids)} tokens, head_dim)", [*map(tuple, (k_HTD.shape, v_HTD.shape))]
                raise InputError(f"layer {layer} of a ChunkKV must be two tensors {wanted}; got {found}")
            if k_HTD.dtype != v_HTD.dtype or k_HTD.dtype != self.dtype:
                raise InputError(f"layer {layer} of a ChunkKV has dtypes {k_HTD.dtype} and {v_HTD.dtype}, not {self.dtype}")

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0][0].dtype

    def heads(self, layer: int) -> tuple[int, int]:
        k_HTD = self.layers[layer][0]
        return k_HTD.shape[0], k_HTD.shape[2]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def nbytes(self) -> int:
        return sum(map(self.layer_bytes, range(len(self.layers))))

    def layer_bytes(self, layer: int) -> int:
        return sum(x_HTD.nbytes for x_HTD in self.layers[layer])

    def read_layer(self, layer: int) -> LayerPair:
        """The layer's own tensors, on their device."""
        return self.layers[layer]
