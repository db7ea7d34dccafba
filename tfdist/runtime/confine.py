"""Restricts a server that listens on all addresses to the address that its clients use.

TensorFlow's gRPC server uses the port from TF_CONFIG, and listens on all addresses of the machine;
this cannot be configured. For a socket that is already listening the Linux kernel offers two options
that require no privilege: binding it to a device, and a filter of its packets (`packet(7)`, classic
BPF).
"""

from __future__ import annotations

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

#: From asm-generic/socket.h; Python does not define both.
_SO_BINDTODEVICE, _SO_ATTACH_FILTER = 25, 26
#: Where classic BPF finds the network header of a packet: linux/filter.h, SKF_NET_OFF.
_NETWORK_HEADER = 0xFFF00000


def confine(port: int, host: str) -> bool:
    """Restricts the servers of this process at a port to connections to one address.

    Nothing changes unless `host`, the address that clients use, is "localhost" or an IPv4 address of
    this machine: another host may resolve a name to a different address.

    Returns:
        Whether the servers are restricted now.
    """
    if sys.platform != "linux":
        return False
    try:
        address = ipaddress.IPv4Address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return False
    known = [each.address for found in psutil.net_if_addrs().values() for each in found]
    if not address.is_loopback and str(address) not in known:
        return False
    confined = False
    try:
        for sock in _listening(port):
            if address.is_loopback:
                sock.setsockopt(socket.SOL_SOCKET, _SO_BINDTODEVICE, b"lo")
            else:
                _attach_filter(sock, address)
            confined = True
    except (OSError, psutil.Error) as error:
        _logger.info("The server at port %d still listens on all addresses: %s", port, error)
        return False
    return confined


def _listening(port: int) -> Iterator[socket.socket]:
    """The sockets of this process that listen at a port, in turn, each under a duplicate descriptor."""
    for found in psutil.Process().net_connections("tcp"):
        if found.status == psutil.CONN_LISTEN and found.laddr.port == port:
            with socket.socket(fileno=os.dup(found.fd)) as sock:
                yield sock


def _attach_filter(sock: socket.socket, address: ipaddress.IPv4Address) -> None:
    """Drops all packets except those of IPv4 to one address."""
    program = [
        (0x30, 0, 0, _NETWORK_HEADER),  # load the byte that contains the version
        (0x54, 0, 0, 0xF0),  # keep its upper half
        (0x15, 0, 3, 0x40),  # not 4: drop
        (0x20, 0, 0, _NETWORK_HEADER + 16),  # load the destination
        (0x15, 0, 1, int(address)),  # different: drop
        (0x06, 0, 0, 0xFFFFFFFF),  # accept the packet
        (0x06, 0, 0, 0),  # drop it
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    option = struct.pack("HL", len(program), ctypes.addressof(code))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)
