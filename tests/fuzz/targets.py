"""Fuzzing targets: what comes from clients and disks, altered at random, and what may become of it.

A target is a context manager that gives a function of hypothesis data. The function draws an input and raises where something
unforeseen happens: a wrong byte or text, an error that is none of the project's, a status of 500.
The tests run a target for seconds, or for as many examples as FUZZ_EXAMPLES says.
"""

import gzip
import io
import json
import shutil
import socket
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import xxhash
from api import MODEL, connected, listening
from chunks import make_chunk, put_all, same
from engines import CHUNK_TOKENS, DOCUMENTS, make_model
from fakes import FakeEmbedder, tiny_tokenizer
from gguf_models import tiny_checkpoint, write_gguf
from hypothesis import strategies as st
from office_files import docx, pdf

from cacheblend.base.errors import CacheBlendError, DamagedEntryError, InputError, UnsupportedModelError
from cacheblend.blend import Fusor
from cacheblend.blend.gguf_file import read_header
from cacheblend.retriever import Retriever, RetrieverConfig
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.engine.document_sources import DocumentStream
from cacheblend.service.engine.file_converter import FileConverter
from cacheblend.service.engine.grammar import GrammarCompiler
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.http.server import Server
from cacheblend.store import KVStore, StoreConfig
from cacheblend.store.entry import EncodedEntry
from cacheblend.store.remote import ObjectFormat

Check = Callable[[st.DataObject], None]

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**30, -(2**63), 1e308, float("nan"), float("inf"), 1e-300])
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=20)
    | st.sampled_from(["", " ", "\x00", "\ud800", "</s>", "user", "blend", "\x1b[2J", "x" * 2000]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def altered(data: st.DataObject, raw: bytes) -> bytes:
    """Bytes after some flips, cuts, repetitions, and runs of others."""
    made = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(made) - 1)))
        many = data.draw(st.integers(1, 16))
        match data.draw(st.sampled_from(["flip", "set", "cut", "drop", "repeat", "insert"])):
            case "flip" if made:
                made[at] ^= 1 << data.draw(st.integers(0, 7))
            case "set":
                made[at : at + many] = data.draw(st.sampled_from([b"\x00", b"\xff", b"\x7f", b"["])) * len(made[at : at + many])
            case "cut":
                del made[at:]
            case "drop":
                del made[at : at + many]
            case "repeat":
                made[at:at] = made[at : at + many] * data.draw(st.integers(1, 50))
            case _:
                made[at:at] = data.draw(st.binary(min_size=1, max_size=16))
    return bytes(made)


def _check_names(error: Exception, name: str) -> None:
    assert name in str(error), f"{error} does not say which file it is about"


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder of a target's own, in memory where that is possible."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="cacheblend-fuzz-", dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@contextmanager
def json_lines() -> Iterator[Check]:
    """Files of `ingest`: documents that an index takes come of them, or an `InputError` that names the file."""
    lines = [{"id": "a", "title": "t", "text": "some text"}, {"text": "é ünï"}]
    plain = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    with scratch() as folder:

        def check(data: st.DataObject) -> None:
            name = data.draw(st.sampled_from(["some.jsonl", "some.jsonl.gz", "some.txt", "some.md"]))
            if data.draw(st.booleans()):
                values = data.draw(
                    st.lists(JSON | st.fixed_dictionaries({"text": JSON, "id": JSON, "title": JSON}), max_size=3)
                )
                raw = "".join(f"{json.dumps(value)}\n" for value in values).encode()
            else:
                raw = altered(data, plain)
            packed = gzip.compress(raw) if name.endswith("gz") else raw
            path = folder / name
            path.write_bytes(altered(data, packed) if data.draw(st.booleans()) else packed)
            try:
                for document in DocumentStream([str(path)]):
                    assert document.text.strip()
            except InputError as error:
                _check_names(error, name)

        yield check


@contextmanager
def entry_files() -> Iterator[Check]:
    """An entry's file: its KV is what was put, or a miss; the store goes on."""
    pairs = [make_chunk(seed) for seed in range(2)]
    with scratch() as folder:
        config = StoreConfig(directory=folder / "store", ram_budget_bytes=1)
        put_all(KVStore(config), pairs).close()
        key, kv = pairs[0]
        path = folder / "store" / "entries" / str(key)[:2] / str(key)
        whole = path.read_bytes()

        def check(data: st.DataObject) -> None:
            # Who may write to the folder can write other token ids and their checksum too: then it may fail in no other way.
            is_forged = data.draw(st.booleans())
            raw = _forged_header(data, whole) if is_forged else altered(data, whole)
            with KVStore(config) as store:
                path.write_bytes(raw)
                found = store.get(key)
                assert found is None or is_forged or same(found, kv)
                with store.pin([key]) as (placement,):
                    assert (placement is not None) == (found is not None)
                assert same(store.get(pairs[1][0]), pairs[1][1])
                store.put(key, kv)
                store.flush()
                path.write_bytes(whole)
                assert same(store.get(key), kv)

        yield check


def _forged_header(data: st.DataObject, whole: bytes) -> bytes:
    """An entry's file with another JSON header, of whose description the checksum is right."""
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    entry = json.loads(header["__metadata__"]["entry"])
    for _ in range(data.draw(st.integers(1, 2))):
        places = [place for place in (header, header["__metadata__"], entry) if isinstance(place, dict) and place]
        place = data.draw(st.sampled_from(places))
        place[data.draw(st.sampled_from(sorted(place)))] = data.draw(JSON)
    if isinstance(header["__metadata__"], dict):
        text = json.dumps(entry)
        header["__metadata__"]["entry"] = text
        header["__metadata__"]["entry_xxh3"] = xxhash.xxh3_64_hexdigest(text.encode())
    packed = json.dumps(header).encode().ljust(length)
    return len(packed).to_bytes(8, "little") + packed + whole[8 + length :]


@contextmanager
def remote_objects() -> Iterator[Check]:
    """An object of a remote tier: the entry that was packed, or an error that says it is damaged, with and without a secret."""
    (key, kv), (other, other_kv) = (make_chunk(seed) for seed in range(2))
    formats = [ObjectFormat(secret, tenant) for secret in (None, b"a secret of sixteen") for tenant in (None, "tenant")]

    def check(data: st.DataObject) -> None:
        by, entry = data.draw(st.sampled_from(formats)), EncodedEntry.from_chunk(key, kv)
        is_forged = data.draw(st.booleans())
        packed = by.pack(data.draw(st.sampled_from([entry, EncodedEntry.from_chunk(other, other_kv)])))
        raw = _forged_header(data, formats[0].pack(entry)) if is_forged else altered(data, packed)
        try:
            found = by.unpack(key.digest, np.frombuffer(raw, dtype=np.uint8))
        except DamagedEntryError:
            return
        assert found.info.key.digest == key.digest
        assert same(found.chunk(copy=False), kv) or (is_forged and by in formats[:2])  # those without a secret

    yield check


@contextmanager
def converted_files() -> Iterator[Check]:
    """Files of other programs: parts of text, or an error that names the file; the next one is read."""
    with zipfile.ZipFile(io.BytesIO(docx("some words"))) as whole:
        members = {name: whole.read(name) for name in whole.namelist()}
    table = b"<w:tbl><w:tr><w:tc><w:p><w:r><w:t>a cell</w:t></w:r></w:p></w:tc></w:tr></w:tbl>"
    members["word/document.xml"] = members["word/document.xml"].replace(b"<w:body>", b"<w:body>" + table)
    html = b"<html><title>t</title><table><tr><td>a cell</td></tr></table><p>some <b>words</b></p></html>"
    with scratch() as folder, closing(FileConverter()) as converter:

        def check(data: st.DataObject) -> None:
            suffix = data.draw(st.sampled_from([".docx", ".docx", ".pdf", ".html", ".epub", ".xlsx", ".pptx"]))
            if suffix in (".pdf", ".html"):
                raw = altered(data, pdf(["some words"]) if suffix == ".pdf" else html)
            else:
                packed, changed = io.BytesIO(), data.draw(st.sampled_from(list(members)))
                with zipfile.ZipFile(packed, "w") as archive:
                    for name, member in members.items():
                        archive.writestr(name, altered(data, member) if name == changed else member)
                raw = packed.getvalue() if data.draw(st.booleans()) else altered(data, packed.getvalue())
            path = folder / f"some{suffix}"
            path.write_bytes(raw)
            try:
                assert all(isinstance(part.text, str) for part in converter.convert(path))
            except InputError as error:
                _check_names(error, path.name)

        yield check


@contextmanager
def store_catalogs() -> Iterator[Check]:
    """A store's catalog, marker and journal: an error of ours when it opens, or no wrong KV, and `verify` comes back."""
    pairs = [make_chunk(seed) for seed in range(4)]
    with scratch() as folder:
        put_all(KVStore(StoreConfig(directory=folder / "whole")), pairs).close()

        def check(data: st.DataObject) -> None:
            root = folder / "damaged"
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(folder / "whole", root)
            path = root / data.draw(st.sampled_from(["catalogue.sqlite", "catalogue.sqlite", "store.json", "journal"]))
            path.write_bytes(altered(data, path.read_bytes()))
            try:
                with KVStore(StoreConfig(directory=root, nvme_budget_bytes=2**40)) as store:
                    for key, kv in pairs:
                        found = store.get(key)
                        assert found is None or same(found, kv)
                    store.ls()
                    store.verify(repair=True)
                    store.put(*pairs[0])
                    assert same(store.get(pairs[0][0]), pairs[0][1])
            except CacheBlendError:
                pass

        yield check


@contextmanager
def index_catalogs() -> Iterator[Check]:
    """An index's catalog: an error of ours, or the very texts and tokens that were added."""
    config = {"chunk_tokens": CHUNK_TOKENS}
    with scratch() as folder:
        with Retriever(RetrieverConfig(directory=folder / "whole", **config), tiny_tokenizer(), FakeEmbedder()) as retriever:
            retriever.add(DOCUMENTS)
            added = {(chunk.document_id, chunk.position): chunk for chunk in retriever.chunks()}

        def check(data: st.DataObject) -> None:
            root = folder / "damaged"
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(folder / "whole", root)
            path = root / "catalogue.sqlite"
            path.write_bytes(altered(data, path.read_bytes()))
            try:
                with Retriever(RetrieverConfig(directory=root, **config), tiny_tokenizer(), FakeEmbedder()) as retriever:
                    found = [scored.chunk for scored in retriever.search("else clause", 3)]
                    found += [chunk for document in retriever.documents() for chunk in retriever.chunks(document.id)]
            except CacheBlendError:
                return
            for chunk in found:
                whole = added[chunk.document_id, chunk.position]
                assert (chunk.text, chunk.token_ids) == (whole.text, whole.token_ids)

        yield check


@contextmanager
def gguf_files() -> Iterator[Check]:
    """A GGUF file's header: read, or refused by an error that names the file."""
    with scratch() as folder:
        whole = write_gguf(folder / "whole.gguf", tiny_checkpoint("llama"), "llama").read_bytes()
        header = whole.index(b"token_embd.weight")  # the weights after it are only looked up

        def check(data: st.DataObject) -> None:
            path = folder / "some.gguf"
            path.unlink(missing_ok=True)  # what a reader has mapped stays as it is
            path.write_bytes(
                altered(data, whole[:header]) + whole[header:] if data.draw(st.booleans()) else altered(data, whole)
            )
            try:
                read_header(path)
            except (InputError, UnsupportedModelError) as error:
                _check_names(error, path.name)

        yield check


_FIELDS = (
    *("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p"),
    *("top_k", "seed", "stop", "user", "n", "logit_bias", "documents", "num_chunks", "method", "recompute_ratio", "cache_salt"),
    *("return_chunks", "metadata", "response_format", "id", "title", "text", "unknown"),
)
_PLACES = (
    *(("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/documents")),
    ("DELETE", "/v1/documents/none"),
)


_KEYWORDS = (
    *("type", "enum", "const", "title", "properties", "required", "additionalProperties", "patternProperties", "items"),
    *("prefixItems", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum", "multipleOf", "minLength", "maxLength"),
    *("pattern", "format", "anyOf", "oneOf", "allOf", "not", "$ref", "$defs"),
)


@contextmanager
def served() -> Iterator[str]:
    """The address of a server with two documents."""
    with ExitStack() as opened:
        folder = opened.enter_context(scratch())
        make_model(folder / "model")
        config = EngineConfig(
            model=str(folder / "model"),
            store_dir=folder / "store",
            max_tokens=2,
            retriever=RetrieverConfig(chunk_tokens=CHUNK_TOKENS),
        )
        fusor = Fusor.from_pretrained(str(folder / "model"))
        engine = opened.enter_context(Engine(config, fusor=fusor, embedder=FakeEmbedder()))
        engine.ingest(DOCUMENTS[:2])
        server = opened.enter_context(Server(config, http=HttpConfig(served_model_name=MODEL), engine=engine))
        yield opened.enter_context(listening(server))


@contextmanager
def connections() -> Iterator[Check]:
    """Bytes of connections: answers that are whole and no failures of the service's own, which is there afterwards."""
    ask = json.dumps({"model": MODEL, "prompt": "What?", "max_tokens": 2}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    whole = [
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3,
        post + b"Content-Length: %d\r\n\r\n%s" % (len(ask), ask),
        post + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(ask), ask),
        b"POST /v1/documents HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        b'Content-Length: 97\r\n\r\n--b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nsome words and '
        b"more\r\n--b--\r\n",
    ]
    with served() as address:

        def check(data: st.DataObject) -> None:
            with connected(address) as connection, suppress(ConnectionError):
                connection.sendall(altered(data, data.draw(st.sampled_from(whole))))
                connection.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda: connection.recv(2**16), b""))
                assert not answer or answer.startswith((b"HTTP/1.1 2", b"HTTP/1.1 4")), answer[:200]
                assert b"HTTP/1.1 5" not in answer
            assert httpx.get(f"{address}/readyz", timeout=60).status_code == 200

        yield check


@contextmanager
def bodies() -> Iterator[Check]:
    """Bodies and paths of requests: an answer, or a 4xx with the promised body; the service answers afterwards."""
    asked = {"model": MODEL, "max_tokens": 2}
    whole = {
        "/v1/chat/completions": {**asked, "messages": [{"role": "user", "content": "What is a loop?"}]},
        "/v1/completions": {**asked, "prompt": "What is a loop?"},
        "/v1/documents": {"documents": [{"id": "d", "title": "t", "text": "some text"}]},
    }
    with served() as address, httpx.Client(base_url=address, timeout=60) as client:

        def check(data: st.DataObject) -> None:
            method, path = data.draw(st.sampled_from(_PLACES))
            body = dict(whole.get(path, {"text": "some text"}))
            for _ in range(data.draw(st.integers(1, 3))):
                body[data.draw(st.sampled_from([*body, *_FIELDS]))] = data.draw(JSON)
            raw = json.dumps(body).encode()
            if data.draw(st.integers(0, 3)) == 0:
                raw = altered(data, raw)
            if data.draw(st.integers(0, 5)) == 0:
                path += data.draw(st.sampled_from(["/", "%00", "%0a", "%ff", "?x=1", "%2e%2e%2f", "a" * 300]))
            response = client.request(method, path, content=raw, headers={"Content-Type": "application/json"})
            if response.status_code >= 400:
                error = response.json()["error"]
                assert response.status_code < 500, error
                assert set(error) == {"message", "type", "param", "code"}
                assert len(error["message"]) < 5000
            assert client.get("/readyz").status_code == 200

        yield check


_SCHEMAS = st.recursive(
    st.fixed_dictionaries({"type": st.sampled_from(["string", "number", "integer", "boolean", "null", "array", "object"])})
    | JSON,
    lambda inner: (
        st.dictionaries(st.sampled_from(_KEYWORDS), inner | JSON | st.lists(inner, max_size=3), max_size=4)
        | st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(st.text(max_size=8), inner, max_size=3)}
        )
    ),
    max_leaves=6,
)


@contextmanager
def schemas() -> Iterator[Check]:
    """JSON schemas of requests: a grammar whose matcher begins, or an error that names the field."""
    with scratch() as folder:
        make_model(folder)
        fusor = Fusor.from_pretrained(str(folder))
        compiler = GrammarCompiler(fusor.model, fusor.tokenizer)

        def check(data: st.DataObject) -> None:
            schema = data.draw(_SCHEMAS)
            try:
                compiler.json(schema if isinstance(schema, dict) else {"enum": [schema]}).matcher().compute_bitmask()
            except InputError as error:
                _check_names(error, "response_format")

        yield check


# By name, with the examples of an ordinary run.
TARGETS: dict[str, tuple[Callable[[], AbstractContextManager[Check]], int]] = {
    "bodies": (bodies, 40),
    "connections": (connections, 40),
    "entry-files": (entry_files, 60),
    "files": (converted_files, 12),
    "gguf": (gguf_files, 40),
    "index-catalogs": (index_catalogs, 30),
    "json-lines": (json_lines, 200),
    "remote-objects": (remote_objects, 100),
    "schemas": (schemas, 100),
    "store-catalogs": (store_catalogs, 20),
}
