"""Our tokens are Fernet's, byte for byte but for the base64, and one that was changed is refused."""

import base64

import pytest
from cryptography.fernet import Fernet, InvalidToken
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.bus.tenant_keys import FernetBytes

KEY = Fernet.generate_key().decode()
texts = st.binary(max_size=200)


@given(texts)
def test_fernet_reads_what_we_encrypt_and_we_what_fernet_does(plain: bytes) -> None:
    theirs = Fernet(KEY)
    assert theirs.decrypt(base64.urlsafe_b64encode(FernetBytes(KEY).encrypt(plain))) == plain
    assert FernetBytes(KEY).decrypt(base64.urlsafe_b64decode(theirs.encrypt(plain))) == plain


@given(texts, st.data())
def test_a_token_that_was_changed_anywhere_is_refused(plain: bytes, data: st.DataObject) -> None:
    token = bytearray(FernetBytes(KEY).encrypt(plain))
    token[data.draw(st.integers(0, len(token) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(InvalidToken):
        FernetBytes(KEY).decrypt(bytes(token))


@given(texts, st.integers(1, 250))
def test_a_token_that_was_cut_off_is_refused(plain: bytes, num_cut: int) -> None:
    with pytest.raises(InvalidToken):
        FernetBytes(KEY).decrypt(FernetBytes(KEY).encrypt(plain)[:-num_cut])


def test_another_key_is_refused() -> None:
    with pytest.raises(InvalidToken):
        FernetBytes(Fernet.generate_key().decode()).decrypt(FernetBytes(KEY).encrypt(b"text"))


@pytest.mark.parametrize("key", ["", "short", base64.urlsafe_b64encode(bytes(31)).decode(), "?"])
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="32 bytes in URL-safe base64"):
        FernetBytes(key)
