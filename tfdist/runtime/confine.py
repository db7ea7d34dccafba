"""Confines a server that listens on all addresses to the address that its callers use.

TensorFlow's gRPC server takes the port from TF_CONFIG, and listens on all addresses of the machine;
no setting of it says another. What the kernel offers for a socket that listens already is a device
to which it is bound, and a filter of the packets that reach it (`packet(7)`, classic BPF). Both are
for Linux, and need no privilege.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import logging
import os
import socket
import struct
import sys
from collections.abc import Iterator

import psutil

_logger = logging.getLogger("tfdist")

#: From asm-generic/socket.h; Python does not have them all.
_SO_BINDTODEVICE, _SO_ATTACH_FILTER = 25, 26
#: Where classic BPF finds the network header of a packet: linux/filter.h, SKF_NET_OFF.
_NETWORK_HEADER = 0xFFF00000


def confine(port: int, host: str) -> bool:
    """Lets only those reach the servers of this process at a port who call at one address.

    Servers are left as they are unless `host`, the address that callers use, is "localhost" or an
    IPv4 address of this machine: a name may lead others to another address.

    Returns:
        Whether the servers are confined now.
    """
    if sys.platform != "linux":
        return False
    try:
        address = ipaddress.IPv4Address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return False
    known = (each.address for found in psutil.net_if_addrs().values() for each in found)
    if not address.is_loopback and str(address) not in known:
        return False
    confined = False
    try:
        for sock in _listening(port):
            if address.is_loopback:
                sock.setsockopt(socket.SOL_SOCKET, _SO_BINDTODEVICE, b"lo")
            else:
                _take_only(sock, address)
            confined = True
    except OSError as error:
        _logger.info("The server at port %d listens on all addresses: %s", port, error)
        return False
    return confined


def _listening(port: int) -> Iterator[socket.socket]:
    """The sockets of this process that listen at a port, in turn, each under another descriptor."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.ExitStack() as stack:
            try:
                copy = os.dup(int(name))
            except OSError:
                continue  # Closed by now.
            try:
                sock = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue  # No socket.
            stack.callback(sock.close)
            if (
                sock.family in (socket.AF_INET, socket.AF_INET6)
                and sock.type == socket.SOCK_STREAM
                and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                and sock.getsockname()[1] == port
            ):
                yield sock


def _take_only(sock: socket.socket, address: ipaddress.IPv4Address) -> None:
    """Drops all packets but those of IPv4 to one address."""
    program = [
        (0x30, 0, 0, _NETWORK_HEADER),  # load the byte with the version
        (0x54, 0, 0, 0xF0),  # keep its upper half
        (0x15, 0, 3, 0x40),  # not 4: drop
        (0x20, 0, 0, _NETWORK_HEADER + 16),  # load the destination
        (0x15, 0, 1, int(address)),  # another: drop
        (0x06, 0, 0, 0xFFFFFFFF),  # take the packet
        (0x06, 0, 0, 0),  # drop it
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    sock.setsockopt(
        socket.SOL_SOCKET,
        _SO_ATTACH_FILTER,
        struct.pack("HL", len(program), ctypes.addressof(code)),
    )
