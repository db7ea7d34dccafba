"""The handshake without sockets: whoever does not know the key proves nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.fuzzing import FUZZ, KEY, PURPOSE
from tfdist.runtime import AuthenticationError
from tfdist.runtime.handshake import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    PROOF_BYTES,
    CallerProof,
    ListenerProof,
)


@given(
    challenge_of=st.sampled_from(["key", "purpose", "nothing"]),
    proof=st.binary(min_size=PROOF_BYTES, max_size=PROOF_BYTES),
    flipped=st.integers(0, 8 * PROOF_BYTES - 1),
    identity=st.integers(0, 2**64 - 1),
)
@settings(FUZZ, max_examples=1500)
def test_no_other_proof_is_taken(challenge_of, proof, flipped, identity):
    listener = ListenerProof(KEY, PURPOSE)
    caller = CallerProof(
        b"another" if challenge_of == "key" else KEY,
        "other" if challenge_of == "purpose" else PURPOSE,
        identity,
    )
    right = caller.proof(listener.challenge)
    if challenge_of == "nothing":
        assert listener.answer(right)[0] == identity
        damaged = bytearray(right)
        damaged[flipped // 8] ^= 1 << flipped % 8
        right = bytes(damaged)
    for wrong in (right, proof, right[:flipped]):
        with pytest.raises(AuthenticationError):
            listener.answer(wrong)


@given(answer=st.binary(max_size=64), flipped=st.integers(0, 8 * ANSWER_BYTES - 1))
@settings(FUZZ, max_examples=500)
def test_no_other_answer_is_taken(answer, flipped):
    listener, caller = ListenerProof(KEY, PURPOSE), CallerProof(KEY, PURPOSE, 1)
    _, right = listener.answer(caller.proof(listener.challenge))
    damaged = bytearray(right)
    damaged[flipped // 8] ^= 1 << flipped % 8
    for wrong in (answer, bytes(damaged), b""):
        with pytest.raises(AuthenticationError):
            caller.check(wrong)
    caller.check(right)


def test_an_answer_before_the_challenge_is_not_taken():
    with pytest.raises(AuthenticationError):
        CallerProof(KEY, PURPOSE, 1).check(b"")


@given(challenge=st.binary(max_size=CHALLENGE_BYTES))
@settings(FUZZ, max_examples=200)
def test_what_is_no_challenge_gets_no_proof(challenge):
    with pytest.raises(AuthenticationError):
        CallerProof(KEY, PURPOSE, 1).proof(challenge)


def test_a_proof_cannot_be_replayed_or_reflected():
    caller = CallerProof(KEY, PURPOSE, 1)
    first = ListenerProof(KEY, PURPOSE)
    proof = caller.proof(first.challenge)
    _, answer = first.answer(proof)
    with pytest.raises(AuthenticationError):
        ListenerProof(KEY, PURPOSE).answer(proof)  # Replayed on another connection.
    for purpose in ("tes", "test2", ""):
        other = ListenerProof(KEY, purpose)
        with pytest.raises(AuthenticationError):
            other.answer(CallerProof(KEY, PURPOSE, 1).proof(other.challenge))
    # A listener that knows no key sends the caller's own words back.
    for reflected in (proof[:32], proof[-32:]):
        with pytest.raises(AuthenticationError):
            caller.check(reflected)
    # A caller that knows no key makes a proof of a listener's answer.
    with pytest.raises(AuthenticationError):
        first.answer(proof[:40] + answer)


@pytest.mark.parametrize("identity", [-1, 2**64])
def test_identities_have_64_bits(identity):
    with pytest.raises(ValueError, match=f"Received: {identity}"):
        CallerProof(KEY, PURPOSE, identity)


def test_a_key_is_not_empty():
    with pytest.raises(ValueError, match="at least one byte"):
        ListenerProof(b"", PURPOSE)
