"""The handshake of two processes that share a key: each proves that it knows the key.

It is the challenge and response that `multiprocessing.connection` does with its `authkey`. That
module has no time-outs, no bound on what a stranger may send, no way to serve two callers at once,
and it authenticates without saying which side of which connection spoke. Here all three messages
have a fixed size, so nothing is parsed and no length is believed before the other side has proved
itself:

    listener -> caller   challenge   magic, nonce of the listener
    caller -> listener   proof       nonce of the caller, identity, HMAC-SHA256
    listener -> caller   answer      HMAC-SHA256

Each HMAC covers the side that sent it, the purpose of the connection, both nonces and the
identity. So a proof is worth nothing on another connection, in the other direction, for another
purpose, or under another identity. The handshake proves who opened a connection. It does not
encrypt or sign what follows: whoever can change packets on their way can still do so.

This file does no input or output; `tfdist.runtime.listener` does.
"""

from __future__ import annotations

import hmac
import secrets
import struct

from tfdist.utils.errors import TfdistError

_MAGIC = b"tfdist/1"
_NONCE_BYTES = 32
_DIGEST_BYTES = 32
_PROOF = struct.Struct(f"!{_NONCE_BYTES}sQ{_DIGEST_BYTES}s")

CHALLENGE_BYTES = len(_MAGIC) + _NONCE_BYTES
PROOF_BYTES = _PROOF.size
ANSWER_BYTES = _DIGEST_BYTES
LARGEST_IDENTITY = 2**64 - 1


class AuthenticationError(TfdistError, ConnectionError):
    """The other side did not prove that it knows the key."""


class ListenerProof:
    """The listening side of one handshake.

    Args:
        key: What both sides know; not empty.
        purpose: What the connection is for; the same on both sides.

    Attributes:
        challenge: The bytes that the caller gets first.
    """

    def __init__(self, key: bytes, purpose: str):
        self._key, self._purpose = _checked(key), purpose
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self.challenge = _MAGIC + self._nonce

    def answer(self, proof: bytes) -> tuple[int, bytes]:
        """Checks a proof, or raises `AuthenticationError`.

        Returns:
            The identity that the caller has proved, and the bytes that it gets.
        """
        if len(proof) != PROOF_BYTES:
            raise AuthenticationError(f"a proof of {len(proof)} bytes")
        nonce, identity, digest = _PROOF.unpack(proof)
        signed = (self._purpose, self._nonce, nonce, identity)
        if not hmac.compare_digest(digest, _digest(self._key, b"caller", *signed)):
            raise AuthenticationError("a wrong proof")
        return identity, _digest(self._key, b"listener", *signed)


class CallerProof:
    """The calling side of one handshake.

    Args:
        key: What both sides know; not empty.
        purpose: What the connection is for; the same on both sides.
        identity: A number by which the caller is known to the listener, such as its rank.
    """

    def __init__(self, key: bytes, purpose: str, identity: int):
        if not 0 <= identity <= LARGEST_IDENTITY:
            raise ValueError(
                f"An identity is between 0 and {LARGEST_IDENTITY}. Received: {identity}."
            )
        self._key, self._purpose, self._identity = _checked(key), purpose, identity
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._expected = b""

    def proof(self, challenge: bytes) -> bytes:
        """What to send after the listener's challenge; an `AuthenticationError` if it is none."""
        if len(challenge) != CHALLENGE_BYTES or not challenge.startswith(_MAGIC):
            raise AuthenticationError("what listens there is not of tfdist")
        signed = (self._purpose, challenge[len(_MAGIC) :], self._nonce, self._identity)
        self._expected = _digest(self._key, b"listener", *signed)
        return _PROOF.pack(self._nonce, self._identity, _digest(self._key, b"caller", *signed))

    def check(self, answer: bytes) -> None:
        """Checks the listener's answer; an `AuthenticationError` if it is wrong."""
        if not self._expected or not hmac.compare_digest(answer, self._expected):
            raise AuthenticationError("what listens there does not know the key")


def _checked(key: bytes) -> bytes:
    if not key:
        raise ValueError("A key has at least one byte. Received: none.")
    return key


def _digest(
    key: bytes, side: bytes, purpose: str, listener_nonce: bytes, caller_nonce: bytes, identity: int
) -> bytes:
    label = purpose.encode()
    # Sizes stand before what varies in size, so that no two inputs give the same bytes.
    message = struct.pack("!8sHH", _MAGIC, len(side), len(label)) + side + label
    message += listener_nonce + caller_nonce + struct.pack("!Q", identity)
    return hmac.digest(key, message, "sha256")
