"""Masks of pairs of sites, which cancel in the sum over all sites.

The key of a mask depends on the X25519 secret of the slot, on the pair secret, on the charter and on the bytes of the
round file. If two honest sites hold different charters or round files, their common mask does not cancel, and the
joiner gets random numbers. All arithmetic is on unsigned integers modulo 2^64.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from pate_torch.sites.signed import PROTOCOL

BITS = 64
"""Bits of each number of an answer."""
_NONCE = bytes(16)  # each key makes one mask


def compute_shared_secret(private_key: bytes, public_key: bytes) -> bytes:
    """Compute the X25519 secret of two one-time keys."""
    return X25519PrivateKey.from_private_bytes(private_key).exchange(X25519PublicKey.from_public_bytes(public_key))


def derive_mask_key(
    secret: bytes,
    *,
    charter: bytes,
    round_digest: bytes,
    places: tuple[int, int],
    count: int,
    ciphertext: bytes,
) -> bytes:
    """Derive the key of the mask of two sites.

    Args:
        secret: X25519 secret of the slot, followed by the slot's secret of the pair.
        charter: SHA-256 of the charter.
        round_digest: SHA-256 of the round file.
        places: Places of the two sites, the lower one first.
        count: Number of numbers.
        ciphertext: SHA-256 of the ML-KEM ciphertext of the pair.
    """
    low, high = places
    assert low < high and len(charter) == len(round_digest) == 32
    label = f"{PROTOCOL} mask".encode() + b"\0"
    info = label + round_digest + struct.pack("<HHBQ", low, high, BITS, count) + ciphertext
    return HKDF(SHA256(), 32, salt=charter, info=info).derive(secret)


def expand_mask(key: bytes, count: int) -> np.ndarray:
    """Expand a key by ChaCha20 to uniform numbers below 2^64, [count] uint64; each key is used once."""
    stream = Cipher(ChaCha20(key, _NONCE), mode=None).encryptor().update(bytes(count * BITS // 8))
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64)


def apply_masks(values: np.ndarray, masks: Mapping[int, np.ndarray], place: int) -> np.ndarray:
    """Add the masks shared with higher places and subtract those shared with lower places, modulo 2^64."""
    # Not an assert, because the guarantee depends on this check, and python -O drops asserts.
    if values.dtype != np.int64:
        raise TypeError(f"masks: numbers must be of type int64, and are of type {values.dtype}")
    assert place not in masks
    masked = values.astype(np.uint64)
    for peer, mask in masks.items():
        masked = masked + mask if peer > place else masked - mask
    return masked
