"""The handshake of two processes that share a key: each proves that it has the key.

It is the challenge and response that `multiprocessing.connection` implements with its `authkey`. That
module has no timeouts, no limit on unauthenticated input, cannot serve two callers at once, and its
digests do not cover the side and the connection. Here all three messages have a fixed size, so nothing
is parsed and no length is read before the other side is authenticated:

    listener -> caller   challenge   magic, nonce of the listener
    caller -> listener   proof       nonce of the caller, identity, HMAC-SHA256
    listener -> caller   answer      HMAC-SHA256

Each HMAC covers the side that sent it, the purpose of the connection, both nonces and the
identity. So a proof is not valid on another connection, in the other direction, for another
purpose, or for another identity. The handshake proves who opened a connection. It does not
encrypt or sign the following messages: an attacker who can modify packets in transit still can.

This module does no input or output; `tfdist.runtime.listener` does.
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
    """The other side did not prove that it has the key."""


class _Proof:
    def __init__(self, key: bytes, purpose: str):
        if not key:
            raise ValueError("A key must have at least one byte. Received: an empty key.")
        self._key, self._purpose = key, purpose
        self._nonce = secrets.token_bytes(_NONCE_BYTES)


class ListenerProof(_Proof):
    """The listening side of one handshake.

    Args:
        key: The shared key; not empty.
        purpose: The purpose of the connection; the same on both sides.

    Attributes:
        challenge: The first bytes that the caller receives.
    """

    def __init__(self, key: bytes, purpose: str):
        super().__init__(key, purpose)
        self.challenge = _MAGIC + self._nonce

    def answer(self, proof: bytes) -> tuple[int, bytes]:
        """Checks a proof, or raises `AuthenticationError`.

        Returns:
            The identity that the caller has proved, and the answer for the caller.
        """
        if len(proof) != PROOF_BYTES:
            raise AuthenticationError(f"expected a proof of {PROOF_BYTES} bytes, got {len(proof)}")
        nonce, identity, digest = _PROOF.unpack(proof)
        signed = (self._purpose, self._nonce, nonce, identity)
        if not hmac.compare_digest(digest, _digest(self._key, b"caller", *signed)):
            raise AuthenticationError("its proof is not valid")
        return identity, _digest(self._key, b"listener", *signed)


class CallerProof(_Proof):
    """The calling side of one handshake.

    Args:
        key: The shared key; not empty.
        purpose: The purpose of the connection; the same on both sides.
        identity: A number that identifies the caller to the listener, such as its rank.
    """

    def __init__(self, key: bytes, purpose: str, identity: int):
        if not 0 <= identity <= LARGEST_IDENTITY:
            raise ValueError(
                f"An identity must be from 0 to {LARGEST_IDENTITY}. Received: {identity}."
            )
        super().__init__(key, purpose)
        self._identity, self._expected = identity, b""

    def proof(self, challenge: bytes) -> bytes:
        """The proof for a listener's challenge; an `AuthenticationError` if it is malformed."""
        if len(challenge) != CHALLENGE_BYTES or not challenge.startswith(_MAGIC):
            raise AuthenticationError("the listener is not a process of tfdist")
        signed = (self._purpose, challenge[len(_MAGIC) :], self._nonce, self._identity)
        self._expected = _digest(self._key, b"listener", *signed)
        return _PROOF.pack(self._nonce, self._identity, _digest(self._key, b"caller", *signed))

    def check(self, answer: bytes) -> None:
        """Checks the listener's answer; an `AuthenticationError` if it is not valid."""
        if not self._expected or not hmac.compare_digest(answer, self._expected):
            raise AuthenticationError("the listener does not have the key")


def _digest(
    key: bytes, side: bytes, purpose: str, listener_nonce: bytes, caller_nonce: bytes, identity: int
) -> bytes:
    label = purpose.encode()
    # The sizes precede the parts of variable size, so that no two inputs give the same bytes.
    message = struct.pack("!8sHH", _MAGIC, len(side), len(label)) + side + label
    message += listener_nonce + caller_nonce + struct.pack("!Q", identity)
    return hmac.digest(key, message, "sha256")
