"""Rendezvous, authentication and messages of the processes of a job; exit codes. No TensorFlow."""

from tfdist.runtime.caller import connect
from tfdist.runtime.channel import Channel, ProtocolError
from tfdist.runtime.handshake import AuthenticationError
from tfdist.runtime.listener import Listener, Proven, bind

__all__ = [
    "AuthenticationError",
    "Channel",
    "Listener",
    "ProtocolError",
    "Proven",
    "bind",
    "connect",
]
