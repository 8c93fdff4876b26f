"""A TCP proxy that slows a server down: bytes a second, and seconds before its answers; a process of its own.

    python scripts/throttle_proxy.py 127.0.0.1:7001 127.0.0.1:6379 --rate 20e6 --latency 0.05

What the server sends comes through `--latency` later, at `--rate` bytes a second over all connections. Port 0 takes any free
one; the first line of stdout is the port.
"""

from __future__ import annotations

import argparse
import queue
import socket
import threading
import time

PIECE_BYTES = 64 * 1024


class Limit:
    """Bytes a second over all connections."""

    def __init__(self, rate: float) -> None:
        self._rate, self._lock, self._free_at = rate, threading.Lock(), 0.0

    def wait(self, count: int) -> None:
        """Wait until so many bytes may have come."""
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + count / self._rate
            free_at = self._free_at
        if (left_s := free_at - time.perf_counter()) > 0:
            time.sleep(left_s)


def answers(server: socket.socket, client: socket.socket, limit: Limit, latency_s: float, held_bytes: int) -> None:
    """Send what the server says, later and slower."""
    pieces: queue.Queue[tuple[float, bytes]] = queue.Queue(max(2, held_bytes // PIECE_BYTES))

    def send() -> None:
        while True:
            due, piece = pieces.get()
            if (left_s := due - time.perf_counter()) > 0:
                time.sleep(left_s)
            try:
                if not piece:
                    client.shutdown(socket.SHUT_WR)
                    return
                limit.wait(len(piece))
                client.sendall(piece)
            except OSError:
                server.close()
                return

    threading.Thread(target=send, daemon=True).start()
    piece = b"."
    while piece:
        try:
            piece = server.recv(PIECE_BYTES)
        except OSError:
            piece = b""
        pieces.put((time.perf_counter() + latency_s, piece))


def requests(client: socket.socket, server: socket.socket) -> None:
    """Send what the client says, as it comes."""
    try:
        while piece := client.recv(PIECE_BYTES):
            server.sendall(piece)
        server.shutdown(socket.SHUT_WR)
    except OSError:
        server.close()


def main() -> None:
    """Listen until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("listen")
    parser.add_argument("target")
    parser.add_argument("--rate", type=float, default=1e12, help="bytes a second")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds")
    options = parser.parse_args()
    (host, port), (to_host, to_port) = (address.split(":") for address in (options.listen, options.target))
    limit = Limit(options.rate)
    held_bytes = 2**20 + int(min(options.rate, 2e9) * options.latency)
    with socket.create_server((host, int(port))) as listening:
        print(listening.getsockname()[1], flush=True)
        while True:
            client, _ = listening.accept()
            server = socket.create_connection((to_host, int(to_port)))
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            work = ((requests, (client, server)), (answers, (server, client, limit, options.latency, held_bytes)))
            for target, arguments in work:
                threading.Thread(target=target, args=arguments, daemon=True).start()


if __name__ == "__main__":
    main()
