"""Servers that listen on all addresses, confined to one."""

from __future__ import annotations

import socket
import sys

import psutil
import pytest

from tfdist.runtime.confine import confine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="means of Linux")


def own_address() -> str:
    for found in psutil.net_if_addrs().values():
        for each in found:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                return each.address
    pytest.skip("this machine has no address but the loopback's")


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["IPv4", "both"])
def server(request):
    with socket.socket(request.param) as sock:
        if request.param == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("::" if request.param == socket.AF_INET6 else "0.0.0.0", 0))
        sock.listen()
        yield sock


def reaches(server, address: str) -> bool:
    try:
        with socket.create_connection((address, server.getsockname()[1]), timeout=0.5) as caller:
            caller.sendall(b"hello")
            with server.accept()[0] as taken:
                return taken.recv(5) == b"hello"
    except OSError:
        return False


def test_without_it_all_addresses_lead_there(server):
    assert reaches(server, "127.0.0.1") and reaches(server, own_address())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_to_the_loopback_device(server, host):
    assert confine(server.getsockname()[1], host)
    assert reaches(server, "127.0.0.1")
    # What this machine sends to itself takes the loopback device, whatever the address.
    device = server.getsockopt(socket.SOL_SOCKET, 25, 16)
    assert device.rstrip(b"\0") == b"lo"


def test_to_another_address(server):
    address = own_address()
    assert confine(server.getsockname()[1], address)
    assert reaches(server, address)
    assert not reaches(server, "127.0.0.1")
    assert not reaches(server, "127.0.0.2")


@pytest.mark.parametrize("host", ["192.0.2.77", "a-name", "::1", ""])
def test_where_others_may_use_another_address_nothing_changes(server, host):
    assert not confine(server.getsockname()[1], host)
    assert reaches(server, "127.0.0.1") and reaches(server, own_address())


def test_no_server_at_the_port(server):
    port = server.getsockname()[1]
    server.close()
    assert not confine(port, "127.0.0.1")


def test_no_descriptor_is_left_open(server):
    """Whatever else is open: each that was left would be copied by the next server, and so on."""
    with open("/dev/null") as _:
        before = psutil.Process().num_fds()
        confine(server, "localhost")
        assert psutil.Process().num_fds() == before
