"""The anatomy of each layer of a decoder: how it caches, rotates and reads, found by running its attention on a few tokens.

No list of names tells it. A layer runs twice up to its attention, with the rotary embedding of real positions and with the
identity, and what reaches the cache and the attention shows whether, where and how the layer rotates; whether it keeps KV or
reads an earlier layer's; and the shapes of both. A family of which this is not enough is refused with the reason.

Shapes: Q query heads, H KV heads, S rows, N positions, X rotated numbers of a head, D and E sizes of a cached pair's heads, A
parallel hidden states (1 but in Gemma 3n), M hidden size.
"""

import math
import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import nn

from .interfaces import CosSin
from .layer_passes import CachePass, Pair

CACHE_NAMES = "past_key_values", "layer_past", "past_key_value"
SHARED_KV = "shared_kv_states"
PROBED = (0, 3, 4, 11, 40, 41, 77)  # positions of the tokens that are run
Turn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class UnblendableError(Exception):
    """A decoder that cannot be blended; the message completes "... models cannot be blended: "."""


class Attended(Exception):  # noqa: N818  # a signal, no error
    """A layer has run as far as it is needed, to its cache or to its attention."""


@dataclass(frozen=True, slots=True)
class TableForm:
    """The form in which a layer takes its rotary embedding: cosine and sine behind these axes, complex numbers, or none."""

    kind: str  # "pair", "complex", "none"
    axes: tuple[int, ...] = ()

    @classmethod
    def of(cls, given: Any) -> Self:
        """The form of what a decoder gave to a layer."""
        if given is None:
            return cls("none")
        table = given if isinstance(given, torch.Tensor) else given[0]
        return cls("complex" if isinstance(given, torch.Tensor) else "pair", tuple(table.shape[:-2]))

    def read(self, given: Any, tokens: int, device: torch.device) -> CosSin:
        """Cosine and sine (1, N, X) or (1, N, X / 2)."""
        if self.kind == "none":
            return torch.zeros(1, tokens, 0, device=device), torch.zeros(1, tokens, 0, device=device)
        pair = (given.real, given.imag) if self.kind == "complex" else given
        cos, sin = (table.reshape(-1, tokens, table.shape[-1])[:1] for table in pair)
        return cos, sin

    def written(self, cos_sin: CosSin) -> Any:
        """The form that the layer takes, from cosine and sine of its rows."""
        if self.kind == "none":
            return None
        if self.kind == "pair" and self.axes == (1,):
            return cos_sin
        cos, sin = (table.expand(*self.axes, *table.shape[-2:]) for table in cos_sin)
        return torch.complex(cos, sin) if self.kind == "complex" else (cos, sin)


class LayerCall:
    """A layer's arguments as its decoder gave them for `tokens` rows, to call it again with others.

    Attributes:
        hidden, tables, extra: the hidden state, the rotary embedding, and a row's further input (1, S, ...) of this layer.
        hidden_name, tables_name, extra_name: their places or names in a call, for `argument`.
        mask: the attention mask.
        form: of the rotary embedding.
    """

    @staticmethod
    def argument(args: tuple[Any, ...], kwargs: dict[str, Any], name: Any) -> Any:
        """A call's argument by its place or its name; None for none of that name."""
        return args[name] if isinstance(name, int) else kwargs.get(name)

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int) -> None:
        given: dict[Any, Any] = dict(enumerate(args)) | kwargs
        self._positional, self.hidden_name = len(args), 0 if args else "hidden_states"
        self.hidden: torch.Tensor = given.pop(self.hidden_name)
        self._constants = dict[Any, Any]()
        self._positions = dict[Any, tuple[int, ...]]()
        self.tables_name: Any = None
        self.extra_name: Any = None
        self.mask: Any = None
        for name, value in given.items():
            match _role(name, value, tokens):
                case "tables":
                    self.tables_name = name
                case "positions":
                    self._positions[name] = tuple(value.shape[:-1])
                case "extra":
                    self.extra_name = name
                case "mask":
                    self._constants[name], self.mask = None, value
                case "constant":
                    self._constants[name] = value
        self._caches = [name for name in CACHE_NAMES if name in given]
        self.tables, self.extra = given.get(self.tables_name), given.get(self.extra_name)
        self.form = TableForm.of(self.tables)

    def identity(self, rows: int, dtype: torch.dtype, device: torch.device) -> CosSin:
        """Cosine and sine of rows that are not turned."""
        cos, sin = self.form.read(self.tables, len(PROBED), device)
        return torch.ones_like(cos[:, :1]).expand(-1, rows, -1), torch.zeros_like(sin[:, :1]).expand(-1, rows, -1)

    def filled(
        self, hidden: torch.Tensor, positions_S: torch.Tensor, cos_sin: CosSin, cache: Any, extra: torch.Tensor | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for rows at these positions, by place and by name."""
        given = {**self._constants, self.hidden_name: hidden}
        for name, axes in self._positions.items():
            given[name] = positions_S.expand(*axes, len(positions_S))
        for name in self._caches:
            given[name] = cache
        if SHARED_KV in given:
            given[SHARED_KV] = cache
        if self.tables_name is not None:
            given[self.tables_name] = self.form.written(cos_sin)
        if self.extra_name is not None:
            given[self.extra_name] = extra
        return tuple(given.pop(place) for place in range(self._positional)), given


def _role(name: Any, value: Any, tokens: int) -> str:
    """Part that an argument plays in a layer's call: one of "tables", "positions", "extra", "cache", "mask", "constant"."""
    if name == "position_embeddings" or _is_table(value, tokens):
        return "tables"
    if name == "attention_mask":
        return "mask"
    if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.shape[-1:] == (tokens,):
        return "positions"
    if isinstance(value, torch.Tensor) and value.ndim >= 3 and value.shape[1] == tokens:
        return "extra"
    return "cache" if name in CACHE_NAMES else "constant"


def _is_table(value: Any, tokens: int) -> bool:
    """Whether an argument is a rotary embedding: two tensors of cosines and sines, or a complex one."""
    if isinstance(value, torch.Tensor):
        return value.is_complex()
    is_pair = isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(x, torch.Tensor) for x in value)
    return is_pair and all(x.ndim >= 2 and x.shape[-2] == tokens for x in value)


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Turns the numbers `start` to `stop` of each head to their positions.

    With a `scale` (a norm's weight that the layer applies after it has rotated) heads are divided by it before.
    """

    turn: Turn
    start: int
    stop: int
    scale_D: torch.Tensor | None = None

    def __call__(self, x_1HSD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x_1HSD = x_1HSD if self.scale_D is None else x_1HSD / self.scale_D
        turned = self.turn(x_1HSD[..., self.start : self.stop], cos, sin)
        if turned.shape[-1] < x_1HSD.shape[-1]:
            turned = torch.cat([x_1HSD[..., : self.start], turned, x_1HSD[..., self.stop :]], dim=-1)
        return turned if self.scale_D is None else turned * self.scale_D


def _halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The two halves of each head turned against each other; cosines of one half, or of both."""
    if cos.shape[-1] < x.shape[-1]:
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    one, two = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-two, one], -1) * sin[:, None]


def _pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Neighbours of each head turned against each other; cosines of a pair, or of both of it."""
    if cos.shape[-1] < x.shape[-1]:
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    return (x * cos[:, None] + turned * sin[:, None]).to(x.dtype)


def _turns(attention: nn.Module) -> list[Turn]:
    """The rotations to try: the family's own first, which has the family's rounding."""
    own: Any = vars(sys.modules[type(attention).__module__]).get("apply_rotary_pos_emb")
    family: list[Turn] = [] if own is None else [lambda x, cos, sin: own(x, x[:, :0], cos, sin)[0], own]
    return [*family, _halves, _pairs, lambda x, cos, sin: _halves(x, cos, -sin)]  # the last is the other way round: nanochat's


def find_rotation(plain: torch.Tensor, turned: torch.Tensor, cos_sin: CosSin, attention: nn.Module) -> Rotation | None:
    """The rotation that makes one from the other; None if they are equal.

    Raises:
        UnblendableError: none does.
    """
    if torch.equal(plain, turned):
        return None
    size, tables = plain.shape[-1], cos_sin[0].shape[-1]
    places = dict.fromkeys([*((at, at + x) for x in (tables, 2 * tables) if x <= size for at in (0, size - x)), (0, size)])
    weights = [weight for weight in attention.parameters() if weight.shape == (size,)]
    allowed = (1e-4 if plain.dtype == torch.float32 else 3e-2) * float(turned.abs().max())
    tried = list[tuple[float, Rotation]]()
    for scale in (None, *weights):
        for start, stop in places:
            for turn in _turns(attention):
                rotation = Rotation(turn, start, stop, scale)
                with suppress(RuntimeError, TypeError, ValueError, IndexError):
                    tried.append((float((rotation(plain, *cos_sin) - turned).abs().max()), rotation))
    off, best = min(tried, key=lambda one: one[0], default=(math.inf, None))  # of equals the first: the family's own
    if off <= allowed:
        return best
    raise UnblendableError("its keys are not turned by a rotation that is known")


@dataclass(frozen=True, slots=True, eq=False)
class LayerAnatomy:
    """One layer's KV and attention.

    Attributes:
        source: the layer whose KV it reads; itself where it keeps KV.
        cache_index: its place in transformers' cache.
        kind: its kind of rotary embedding, a key of `Decoder.rotary`'s mapping.
        key_heads: of the cached pair.
        sizes: head sizes D and E of the cached pair.
        rotated: which of the pair the layer rotates, 0 or 1.
        rotation: of that one as it is stored; None if the layer has no rotary embedding.
        query_rotation: of the queries.
        caches_keys: whether attention reads the cached pair itself; else it is expanded (multi-head latent attention).
        query_heads, query_size: of the queries in the attention.
        attention: the attention's module.
    """

    source: int
    cache_index: int
    kind: Hashable
    key_heads: int
    sizes: tuple[int, int]
    rotated: int
    rotation: Rotation | None
    query_rotation: Rotation | None
    caches_keys: bool
    query_heads: int
    query_size: int
    attention: nn.Module = field(repr=False)

    @property
    def is_packed(self) -> bool:
        """Whether keys and values have heads of different sizes, and are stored as two halves of both together."""
        return self.sizes[0] != self.sizes[1]

    @property
    def head_dim(self) -> int:
        """Size of a stored head."""
        return sum(self.sizes) // 2

    def pack(self, one_1HSD: torch.Tensor, other_1HSE: torch.Tensor) -> Pair:
        """A cached pair as it is stored, the rotated one first."""
        pair = (other_1HSE, one_1HSD) if self.rotated else (one_1HSD, other_1HSE)
        if not self.is_packed:
            return pair
        first, second = torch.cat(pair, dim=-1).split(self.head_dim, dim=-1)
        return first, second

    def unpack(self, k_1HSD: torch.Tensor, v_1HSD: torch.Tensor) -> Pair:
        """The cached pair from what is stored."""
        if self.is_packed:
            sizes = self.sizes[::-1] if self.rotated else self.sizes
            k_1HSD, v_1HSD = torch.cat([k_1HSD, v_1HSD], dim=-1).split(sizes, dim=-1)
        return (v_1HSD, k_1HSD) if self.rotated else (k_1HSD, v_1HSD)

    def rotate(self, k_1HSD: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        """Stored keys rotated to their positions."""
        return k_1HSD if self.rotation is None else self.rotation(k_1HSD, *cos_sin)

    def rotate_queries(self, q_1QSD: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        """Queries rotated to their positions."""
        return q_1QSD if self.query_rotation is None else self.query_rotation(q_1QSD, *cos_sin)


class Projection(CachePass):
    """Stands in for the cache: notes what a layer caches, and ends its forward there."""

    cached: Pair

    def update(self, one: torch.Tensor, other: torch.Tensor, layer: int, *_: object) -> Pair:
        self.cached = one, other
        raise Attended

    def attend(self, module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **kw: Any) -> torch.Tensor:
        raise AssertionError("a layer attends before it caches")


class Probe(CachePass):
    """Stands in for the cache: notes what a layer caches, and what its attention is given."""

    def __init__(self, states: dict[Any, Any], *, stops: bool = True) -> None:
        self._states, self._stops = states, stops
        self.cached: Pair | None = None
        self.cache_index = 0
        self.query = torch.empty(0)
        self.seen: Pair = torch.empty(0), torch.empty(0)
        self.attention: Any = None

    def update(self, one: torch.Tensor, other: torch.Tensor, layer: int, *_: object) -> Pair:
        self.cached, self.cache_index = (one, other), layer
        return one, other

    def attend(self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **kw: Any) -> Any:
        if mask is not None:
            raise UnblendableError("its attention has a mask of its own, which depends on the tokens")
        self.query, self.seen, self.attention = q, (k, v), module
        if self._stops:
            raise Attended
        return v.new_zeros(1, q.shape[2], q.shape[1], v.shape[-1])

    def __getitem__(self, name: Any) -> Any:
        return self._states[name]

    def __setitem__(self, name: Any, state: Any) -> None:
        self._states[name] = state


Run = Callable[[int, CosSin, Probe], Any]


def examine(run: Run, tables: Sequence[tuple[Hashable, CosSin]]) -> list[LayerAnatomy]:
    """The anatomy of every layer.

    Args:
        run: runs a layer up to its attention, with this rotary embedding and cache.
        tables: each layer's kind of rotary embedding, and its cosine and sine.

    Raises:
        UnblendableError: a layer is not to be understood.
    """
    found = list[LayerAnatomy]()
    plain_states, turned_states = dict[Any, Any](), dict[Any, Any]()
    keepers = dict[int, int]()  # by the identity of what a layer's attention read: the layer
    kept = list[torch.Tensor]()
    for layer, (table, cos_sin) in enumerate(tables):
        probes = Probe(plain_states), Probe(turned_states)
        identity = torch.ones_like(cos_sin[0]), torch.zeros_like(cos_sin[1])
        for probe, given in zip(probes, (identity, cos_sin), strict=True):
            run(layer, given, probe)
            if probe.attention is None:
                raise UnblendableError("its attention is its own code, which transformers' attention interface does not reach")
        plain, turned = probes
        if plain.cached is None or turned.cached is None:
            if id(plain.seen[0]) not in keepers:
                raise UnblendableError("a layer keeps no KV and reads no earlier layer's")
            shared = found[keepers[id(plain.seen[0])]]
            found.append(replace(shared, kind=(table, "shared"), **_attention_of(plain, turned, cos_sin)))
            continue
        keepers[id(plain.seen[0])] = layer
        kept.append(plain.seen[0])  # an identity is unique as long as its tensor lives
        found.append(_keeper(layer, table, cos_sin, plain, turned))
    sources = [anatomy.source for anatomy in found]
    keeping = sum(source == layer for layer, source in enumerate(sources))
    if sources[:keeping] != list(range(keeping)):
        raise UnblendableError("layers that keep KV come after layers that read an earlier layer's")
    return found


def _keeper(layer: int, table: Hashable, cos_sin: CosSin, plain: Probe, turned: Probe) -> LayerAnatomy:
    """The anatomy of a layer that keeps KV."""
    assert plain.cached is not None
    assert turned.cached is not None
    differs = [not torch.equal(x, y) for x, y in zip(plain.cached, turned.cached, strict=True)]
    if all(differs):
        raise UnblendableError("its values depend on their positions")
    rotated = int(differs[1])
    rotation = find_rotation(plain.cached[rotated], turned.cached[rotated], cos_sin, plain.attention)
    (_, heads, _, one), (_, other_heads, _, other) = (x.shape for x in plain.cached)
    if heads != other_heads or (one + other) % 2:
        raise UnblendableError("its keys and values have different numbers of heads")
    if rotation is not None and rotation.stop > (one + other) // 2:
        raise UnblendableError("more of its keys is rotated than half of keys and values together")
    own_scale = 0 if rotation is None or rotation.scale_D is None else layer + 1  # layers with a scale each rotate their way
    return LayerAnatomy(
        source=layer,
        cache_index=plain.cache_index,
        kind=(table, heads, one + other, own_scale if rotation is not None else None),
        key_heads=heads,
        sizes=(one, other),
        rotated=rotated,
        rotation=rotation,
        caches_keys=all(x is y for x, y in zip(plain.seen, plain.cached, strict=True)),
        **_attention_of(plain, turned, cos_sin),
    )


def _attention_of(plain: Probe, turned: Probe, cos_sin: CosSin) -> dict[str, Any]:
    """The fields of `LayerAnatomy` that tell of a layer's queries and attention, whoever keeps its KV."""
    return {
        "query_rotation": find_rotation(plain.query, turned.query, cos_sin, plain.attention),
        "query_heads": plain.query.shape[1],
        "query_size": plain.query.shape[-1],
        "attention": plain.attention,
    }


def find_layers(tree: Any, count: int) -> tuple[str, str]:
    """Names of the module that has a model's decoder layers, and of the list in it.

    Raises:
        UnblendableError: there is no such list.
    """
    decoder = tree.get_decoder()
    inside = next((name for name, module in tree.named_modules() if module is decoder), "")
    for prefix in dict.fromkeys((inside, "")):  # some models' decoder is their head
        for name, module in tree.get_submodule(prefix).named_modules(prefix=prefix):
            if isinstance(module, nn.ModuleList) and 0 < len(module) == count:
                owner, _, own = name.rpartition(".")
                return owner, own
    raise UnblendableError(f"its decoder has no list of {count} layers, one for each KV")
