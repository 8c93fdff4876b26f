"""Entries' files are written past the page cache where that is possible, and are the same bytes where it is not."""

import errno
import fcntl
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from chunks import MODEL

from cacheblend.store import ChunkKey, ChunkKV, entry_file
from cacheblend.store.entry import BLOCK_BYTES, EncodedEntry, pack_header
from cacheblend.store.entry_file import EntryFile, NewFile, write_files


def make_entry(tokens: int, layers: int = 2, size: int = 8) -> EncodedEntry:
    """An entry of so many tokens, eight times `size` bytes each in every layer."""
    generator = torch.Generator().manual_seed(tokens)
    kv = [tuple(torch.randn(1, tokens, size, generator=generator) for _ in "kv") for _ in range(layers)]
    ids = list(range(tokens))
    return EncodedEntry.from_chunk(ChunkKey.of(ids, model=MODEL), ChunkKV(kv, ids, (), MODEL))


def new_file(folder: Path, entry: EncodedEntry) -> NewFile:
    digest = str(entry.info.key)
    return NewFile(pack_header(entry.info, entry.checksums), entry, folder / f"{digest}.new", folder / digest)


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def check(file: NewFile) -> None:
    """The file is header and layers, and no byte more; nothing is left under the temporary name."""
    assert file.final.read_bytes() == file.header + b"".join(stored.tobytes() for stored in file.entry.bytes)
    assert not file.temporary.exists()
    with EntryFile.open(file.final, str(file.entry.info.key)) as opened:
        assert all(map(np.array_equal, opened.load().bytes, file.entry.bytes))


def check_memory(entry: EncodedEntry) -> None:
    """The entry's memory is whole blocks: its layers without gaps, and zeros after the last one."""
    assert all(piece.ctypes.data % BLOCK_BYTES == len(piece) % BLOCK_BYTES == 0 for piece in entry.pieces)
    whole = b"".join(piece.tobytes() for piece in entry.pieces)
    assert whole == b"".join(layer.tobytes() for layer in entry.bytes).ljust(len(whole), b"\0")


def write_and_check(folder: Path, entry: EncodedEntry) -> None:
    file = new_file(folder, entry)
    write_files([file])
    check(file)


def test_several(tmp_path: Path) -> None:
    """Files of any length, written together or after larger ones, have their own bytes and hold nothing of each other."""
    # 4096 bytes of header, then 128 a token: shorter than a block, whole blocks, and one token beside each.
    for counts in ([150, 3], [40], [], *([tokens] for tokens in (1, 31, 32, 33, 95, 96, 97))):
        files = [new_file(tmp_path, make_entry(tokens)) for tokens in counts]
        write_files(files)
        for file in files:
            check(file)


def test_synced_before_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file has its name before all are synced, and names are synced last, a folder once."""
    calls: list[str] = []
    for name in ("fsync", "replace"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, call=call: calls.append(name) or call(*given))
    write_files([new_file(tmp_path, make_entry(tokens)) for tokens in (3, 40, 150)])
    assert calls == ["fsync"] * 3 + ["replace"] * 3 + ["fsync"]


@pytest.mark.parametrize(("tokens", "size", "pieces"), [(97, 8, 1), (128, 8192, 2)])
def test_memory_is_whole_blocks(tmp_path: Path, tokens: int, size: int, pieces: int) -> None:
    """What is encoded, and what is read again, can be written past the page cache from where it is."""
    entry = make_entry(tokens, size=size)
    file = new_file(tmp_path, entry)
    write_files([file])
    with EntryFile.open(file.final, str(entry.info.key)) as opened:
        again = opened.load()
    assert again.checksums == entry.checksums
    for one in (entry, again):
        assert len(one.pieces) == pieces
        check_memory(one)


def test_memory_of_an_entry_is_used_again(tmp_path: Path) -> None:
    """What an entry leaves, another of its size takes, with zeros after its last layer; two at once share nothing."""
    left = make_entry(99, size=4001)
    address, size = left.pieces[0].ctypes.data, len(left.pieces[0])
    for piece in left.pieces:
        piece[:] = 255
    del left, piece
    first, second = make_entry(99, size=4001), make_entry(99, size=4001)
    assert first.pieces[0].ctypes.data == address != second.pieces[0].ctypes.data
    assert len(first.pieces[0]) == size
    for entry in (first, second):
        write_and_check(tmp_path, entry)
        check_memory(entry)


def test_a_file_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the flag is refused, or every direct write, the file is written through the page cache."""
    write, direct = os.write, []

    def refusing(fd: int, data: memoryview) -> int:
        direct.append(is_direct(fd))
        if direct[-1]:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(fd, data)

    monkeypatch.setattr(os, "write", refusing)
    write_and_check(tmp_path, make_entry(97))
    assert direct.count(True) <= 1

    def no_flag(_: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(entry_file, "make_direct", no_flag)
    del direct[:]
    write_and_check(tmp_path, make_entry(98))
    assert direct
    assert not any(direct)


def test_a_write_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a write leaves over, which is no whole block, is written all the same."""
    write = os.write

    def short(fd: int, data: memoryview) -> int:
        return write(fd, data[: BLOCK_BYTES if is_direct(fd) else 100])

    monkeypatch.setattr(os, "write", short)
    write_and_check(tmp_path, make_entry(97))
