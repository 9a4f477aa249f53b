"""A plain reverse proxy, which answers 502 while its worker is not there."""

import socket
import threading
from contextlib import suppress

_BAD_GATEWAY = (
    b"HTTP/1.1 502 Bad Gateway\r\ncontent-type: text/html\r\ncontent-length: 15\r\n"
    b"connection: close\r\n\r\n<h1>502</h1>\r\n\r\n"
)


class Proxy:
    def __init__(self, port: int) -> None:
        """`port`: of the worker on this machine."""
        self._worker = port
        self.num_bad_gateways = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            worker = socket.create_connection(("127.0.0.1", self._worker), timeout=60)
        except OSError:
            self.num_bad_gateways += 1
            with client, suppress(OSError):
                client.recv(1 << 16)
                client.sendall(_BAD_GATEWAY)
            return
        threading.Thread(target=_pump, args=(client, worker), daemon=True).start()
        _pump(worker, client)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    source.close()
