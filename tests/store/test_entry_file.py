"""An entry's file: one contiguous region a layer, and no bytes that were not written."""

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from chunks import HEADS, MODEL, make_chunk, same
from safetensors import safe_open

from cacheblend.base.errors import DamagedEntryError
from cacheblend.store import ChunkKey, ChunkKV
from cacheblend.store.entry import EncodedEntry, pack_header
from cacheblend.store.entry_file import EntryFile, NewFile, write_files

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


KEY, KV = make_chunk(1)


def write(folder: Path, key: ChunkKey, kv: ChunkKV) -> Path:
    entry, path = EncodedEntry.from_chunk(key, kv), folder / "entry"
    write_files([NewFile(pack_header(entry.info, entry.checksums), entry, folder / "new", path)])
    return path


def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """A file's header, and what stands after it."""
    (header_bytes,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + header_bytes]), raw[8 + header_bytes :]


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_layer_is_one_region_in_layer_order(tmp_path: Path, dtype: torch.dtype) -> None:
    """Layer i + 1 starts where layer i ends, layer 10 after layer 2, its keys, then values; any safetensors reader reads it."""
    key, kv = make_chunk(1, dtype, heads=HEADS * 4)
    path = write(tmp_path, key, kv)
    (header, data), end = split(path.read_bytes()), 0
    del header["__metadata__"]
    assert list(header) == sorted(header)
    assert len(header) == 12
    assert (path.stat().st_size - len(data)) % 4096 == 0
    for tensor, (k_HTD, v_HTD) in zip(header.values(), kv.layers, strict=True):
        start, stop = tensor["data_offsets"]
        assert start == end
        end = stop
        assert tensor["shape"] == [2, *k_HTD.shape]
        stored = torch.frombuffer(bytearray(data[start:stop]), dtype=dtype).view(2, *k_HTD.shape)
        assert torch.equal(stored, torch.stack((k_HTD, v_HTD)))
    assert end == len(data)
    with safe_open(path, "pt") as file:
        assert list(file.offset_keys()) == list(header)
        for name, pair in zip(header, kv.layers, strict=True):
            assert torch.equal(file.get_tensor(name), torch.stack(pair))


def test_every_flipped_bit_and_every_cut_is_found(tmp_path: Path) -> None:
    """Whatever byte is altered, wherever the file ends, whatever length its header claims, it is damage, never other values."""
    key, kv = make_chunk(1, heads=((1, 2),))
    path = write(tmp_path, key, kv)
    whole = path.read_bytes()
    altered = [whole[:end] for end in (*range(0, 40), *range(40, len(whole), 97), len(whole) - 1)]
    altered += [struct.pack("<Q", length) + whole[8:] for length in (0, 5000, 10**9, 2**63, 2**64 - 1)]
    altered += [whole + b"\0", whole[:8] + b"\0" * (len(whole) - 8), b"\xff" * len(whole)]
    flips = (*range(1200), *range(1200, 4096, 61), *range(4096, len(whole)))
    altered += [whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :] for at in flips]
    for content in altered:
        path.write_bytes(content)
        with pytest.raises(DamagedEntryError), EntryFile.open(path, str(key)) as file:
            file.load()
    path.write_bytes(whole)
    with EntryFile.open(path, str(key)) as file:
        assert same(file.load().chunk(copy=False), kv)


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "offsets overlap": lambda header: header["layer_00002"].update(data_offsets=header["layer_00000"]["data_offsets"]),
    "dtype": lambda header: header["layer_00000"].update(dtype="I32"),
    "shape": lambda header: header["layer_00000"].update(shape=[2, 4, 5, 2]),
    "extra tensor": lambda header: header.update(layer_00003=header["layer_00002"]),
    "no metadata": lambda header: header.pop("__metadata__"),
    "other model": lambda header: header["__metadata__"].update(
        entry=header["__metadata__"]["entry"].replace("model-of-the-tests", "model-of-the-lies!")
    ),
}
OTHER_KINDS: list[tuple[str, object]] = [
    *(("checksums", None), ("checksums", ["00"]), ("checksums", [1, 2, 3])),
    *(("token_ids", ["1"]), ("prefix_ids", "12"), ("model", 7), ("kv_model", 7), ("context", None), ("format", 2)),
    *(("heads", [[2, 4.0], [1, 8], [2, 4]]), ("heads", [])),
]


def described(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    """Alters the description of the entry, and its checksum with it."""

    def lie(header: dict[str, Any]) -> None:
        text = json.dumps(json.loads(header["__metadata__"]["entry"]) | {name: value}, separators=(",", ":"))
        header["__metadata__"] = {"entry": text, "entry_xxh3": xxhash.xxh3_64_hexdigest(text.encode())}

    return lie


@pytest.mark.parametrize("lie", [*LIES.values(), *(described(*kind) for kind in OTHER_KINDS)])
def test_headers_that_lie(tmp_path: Path, lie: Callable[[dict[str, Any]], object]) -> None:
    """A well-formed header that is not the one of its entry is damage when the file is opened, not an error later."""
    path = write(tmp_path, KEY, KV)
    raw = path.read_bytes()
    header, data = split(raw)
    lie(header)
    path.write_bytes(raw[:8] + json.dumps(header, separators=(",", ":")).encode().ljust(len(raw) - 8 - len(data)) + data)
    with pytest.raises(DamagedEntryError, match="damaged header"):
        EntryFile.open(path, str(KEY))


def test_file_under_another_name(tmp_path: Path) -> None:
    """A complete entry in the place of another is damage: its key is in the file."""
    path = write(tmp_path, KEY, KV)
    with pytest.raises(DamagedEntryError, match="header of entry"):
        EntryFile.open(path, str(make_chunk(2)[0]))


def test_closing_waits_for_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is closed while a thread reads from it keeps its descriptor until the read is done."""
    file = EntryFile.open(write(tmp_path, KEY, KV), str(KEY))
    preadv = os.preadv

    def close_first(fd: int, to: list[memoryview], at: int) -> int:
        file.close()
        os.fstat(fd)
        return preadv(fd, to, at)

    monkeypatch.setattr(os, "preadv", close_first)
    assert torch.equal(file.read_layer(1)[0], KV.layers[1][0])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file._fd)


IN_CONTEXT = ChunkKey.of(KV.token_ids, prefix_ids=KV.prefix_ids, context="0f" * 16, model=MODEL)


@pytest.mark.parametrize(("key", "fields"), [(KEY, {"model": None, "prefix_ids": ()}), (IN_CONTEXT, {"context": "0f" * 16})])
def test_what_is_known_of_a_chunk_comes_back(tmp_path: Path, key: ChunkKey, fields: dict[str, Any]) -> None:
    """A chunk comes back with its context; one without a model is stored under any key, and comes back without one."""
    kv = replace(KV, **fields)
    with EntryFile.open(write(tmp_path, key, kv), str(key)) as file:
        assert same(file.load().chunk(copy=False), kv)
        assert file.info.key == key
