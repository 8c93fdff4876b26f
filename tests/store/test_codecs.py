"""Each codec gives back what it was given, within the error that it promises, at the size that it promises."""

from dataclasses import replace

import pytest
import torch
from chunks import MODEL, same

from cacheblend.base.errors import InputError
from cacheblend.store import ChunkKey, ChunkKV
from cacheblend.store.codecs import CODECS, LayerShape

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LOSSY = [name for name in CODECS if name != "raw"]
SHAPES = [(2, 64, 32), (1, 5, 8), (3, 33, 80), (2, 1, 1), (1, 100, 7)]
BYTES_A_VALUE = {"raw": 4, "int8": 1, "int4": 0.5}


def make_pair(shape: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys with a channel that is large everywhere, as models have them, and values with a large token."""
    generator = torch.Generator().manual_seed(0)
    k_HTD, v_HTD = (torch.randn(shape, generator=generator) for _ in "kv")
    k_HTD[:, :, -1] = k_HTD[:, :, -1] * 0.1 + 40
    v_HTD[:, -1] *= 20
    return k_HTD.to(dtype), v_HTD.to(dtype)


def shape_of(k_HTD: torch.Tensor) -> LayerShape:
    return LayerShape(*k_HTD.shape, k_HTD.dtype)


def encode(name: str, k_HTD: torch.Tensor, v_HTD: torch.Tensor) -> torch.Tensor:
    """What is stored, in memory that held something else."""
    dtype, shape = CODECS[name].encoded_shape(shape_of(k_HTD))
    encoded = torch.full((1, *shape), 85, dtype=dtype)
    CODECS[name].encode([(k_HTD, v_HTD)], encoded)
    return encoded[0]


def there_and_back(name: str, k_HTD: torch.Tensor, v_HTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return CODECS[name].decode(encode(name, k_HTD, v_HTD), shape_of(k_HTD))


def group_span(x_HTD: torch.Tensor, dim: int) -> torch.Tensor:
    """The span of the group of 32 along `dim` that each value belongs to."""
    spans = [(group.amax(dim, keepdim=True) - group.amin(dim, keepdim=True)).expand_as(group) for group in x_HTD.split(32, dim)]
    return torch.cat(spans, dim)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LOSSY)
def test_error_bounds(name: str, shape: tuple[int, int, int]) -> None:
    """No value is further off than the codec's documented bound."""
    pair = make_pair(shape)
    for x_HTD, decoded_HTD, dim in zip(pair, there_and_back(name, *pair), (1, 2), strict=True):
        match name:
            case "int8":
                bound = x_HTD.abs().amax(dim, keepdim=True) / 254
            case "int4":
                bound = group_span(x_HTD, dim) / 30 + x_HTD.abs().amax() * 2**-10
        assert ((decoded_HTD - x_HTD).abs() <= bound * 1.001 + 1e-7).all()


@pytest.mark.parametrize(("name", "most"), [("int8", 0.011), ("int4", 0.08)])
def test_relative_error(name: str, most: float) -> None:
    """The mean error of a chunk, relative to the spread of its values and apart from a channel's offset, is small."""
    pair = make_pair((4, 256, 64))
    for x_HTD, decoded_HTD in zip(pair, there_and_back(name, *pair), strict=True):
        spread = (x_HTD - x_HTD.mean(1, keepdim=True)).norm()
        error = (decoded_HTD - x_HTD)[..., :-1].norm() / spread
        assert error < most


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CODECS)
def test_dtype_and_size(name: str, dtype: torch.dtype) -> None:
    """What comes back has the model's dtype; what is stored has the codec's size, scales and all."""
    pair = make_pair((4, 512, 128), dtype)
    for x_HTD, decoded_HTD in zip(pair, there_and_back(name, *pair), strict=True):
        assert (decoded_HTD.dtype, decoded_HTD.shape) == (dtype, x_HTD.shape)
    values = 2 * 4 * 512 * 128
    size = CODECS[name].encoded_shape(shape_of(pair[0])).nbytes
    plain = values * (dtype.itemsize if name == "raw" else BYTES_A_VALUE[name])
    assert plain <= size <= plain * 1.26


@pytest.mark.parametrize("name", LOSSY)
def test_decodes_where_the_bytes_are(name: str) -> None:
    """Bytes that stand after others in one buffer are decoded there, so that a device needs one copy for all."""
    codec, pair = CODECS[name], make_pair((3, 33, 7))
    encoded = encode(name, *pair)
    buffer = torch.cat((encoded, encoded))
    again = codec.decode(buffer[encoded.nbytes :], shape_of(pair[0]))
    for one, other in zip(again, codec.decode(encoded, shape_of(pair[0])), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", LOSSY)
def test_zeros(name: str) -> None:
    """Keys and values that are all zero stay so."""
    zeros_HTD = torch.zeros(2, 40, 8)
    for decoded_HTD in there_and_back(name, zeros_HTD, zeros_HTD):
        assert torch.equal(decoded_HTD, zeros_HTD)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", LOSSY)
def test_values_that_cannot_be_held(name: str, value: float) -> None:
    """Values that are not finite are refused with the codec that holds them."""
    k_HTD, v_HTD = make_pair((2, 9, 8))
    v_HTD[1, 3, 3] = value
    with pytest.raises(InputError, match=rf"codec '{name}' cannot hold values.*use codec 'raw'"):
        encode(name, k_HTD, v_HTD)


def test_int4_refuses_what_half_precision_cannot_hold() -> None:
    """The floors of groups are float16."""
    with pytest.raises(InputError, match="keys of size 100000"):
        encode("int4", torch.full((1, 2, 2), 1e5), torch.zeros(1, 2, 2))


@pytest.mark.parametrize("name", CODECS)
def test_in_a_store(open_store, name: str) -> None:
    """An entry of any codec comes back from both tiers as the codec gives it, one contiguous layer after the other."""
    shapes = [(2, 6, 8), (1, 6, 4), (2, 6, 8)]
    kv = ChunkKV([make_pair(shape) for shape in shapes], range(6), (1,), MODEL)
    key = ChunkKey.of(range(6), prefix_ids=(1,), model=MODEL, codec=name)
    open_store().put(key, kv)
    store = open_store()
    for tier in ("nvme", "ram"):
        with store.pin([key]) as (placement,):
            assert placement.tier == tier
            for layer, pair in enumerate(kv.layers):
                for one, other in zip(placement.read_layer(layer), there_and_back(name, *pair), strict=True):
                    assert torch.equal(one, other)
        assert same(store.get(key), replace(kv, layers=[there_and_back(name, *pair) for pair in kv.layers]))


@pytest.mark.parametrize("name", CODECS)
def test_layers_at_once(name: str) -> None:
    """Layers that are encoded together are stored as each alone is, views of a larger tensor too."""
    k_HTD, v_HTD = (x_HTD[:, 3:] for x_HTD in make_pair((2, 40 + 3, 32)))  # not contiguous
    layers = [(k_HTD, v_HTD), (k_HTD * 2, v_HTD), (k_HTD * 3, v_HTD)]
    dtype, shape = CODECS[name].encoded_shape(shape_of(layers[0][0]))
    encoded = torch.full((3, *shape), 85, dtype=dtype)
    CODECS[name].encode(layers, encoded)
    for pair, one in zip(layers, encoded, strict=True):
        assert one.view(torch.uint8).equal(encode(name, *pair).view(torch.uint8))
