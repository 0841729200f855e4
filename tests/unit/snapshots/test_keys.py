"""Keys: who may sign what, and what settings accept."""

import pytest
from pydantic import ValidationError

from omnidraft import config
from omnidraft.errors import ConfigError, SignatureRefused
from omnidraft.fleet.control_signing import signers
from omnidraft.snapshots.keys import PrivateKey, TrustedKeys, new_private_key

PAYLOAD, TYPE = b"said", "application/vnd.omnidraft.test"
ROLES = ("distiller", "controller", "operator")


@pytest.fixture
def key() -> PrivateKey:
    return PrivateKey(new_private_key())


def test_a_signature_is_of_one_payload_one_type_and_one_role(key: PrivateKey) -> None:
    trusted = TrustedKeys([key.public_text("distiller")])
    signed = {key.key_id: key.sign(PAYLOAD, TYPE)}
    trusted.verify(PAYLOAD, TYPE, signed, ("distiller", "operator"))
    for payload, kind, signatures, roles in [
        (b"said!", TYPE, signed, ("distiller",)),
        (PAYLOAD, TYPE + "2", signed, ("distiller",)),
        (PAYLOAD, TYPE, signed, ("controller",)),
        (PAYLOAD, TYPE, {}, ("distiller",)),
        (PAYLOAD, TYPE, {key.key_id: "no hex"}, ("distiller",)),
        (PAYLOAD, TYPE, {key.key_id: ""}, ("distiller",)),
        (PAYLOAD, TYPE, {"another": signed[key.key_id]}, ("distiller",)),
    ]:
        with pytest.raises(SignatureRefused, match=roles[0]):
            trusted.verify(payload, kind, signatures, roles)


def test_one_key_may_have_two_roles(key: PrivateKey) -> None:
    trusted = TrustedKeys([key.public_text("distiller"), key.public_text("controller")])
    for role in ROLES[:2]:
        trusted.require_role(key, (role,))
    with pytest.raises(ConfigError, match="controller/distiller's key"):
        trusted.require_role(key, ("operator",))
    with pytest.raises(ConfigError, match="is not one of"):
        trusted.require_role(PrivateKey(new_private_key()), ROLES)


def test_only_operators_order_and_only_controllers_name_champions() -> None:
    orders = ("pause", "restart", "forget", "factors")
    assert {signers(kind) for kind in orders} == {("operator",)}
    decisions = ("champion", "canary", "drift", "rewind")
    assert {signers(kind) for kind in decisions} == {("controller", "operator")}
    assert signers("best") == ("distiller", "operator")


def test_settings_take_keys_that_fit_and_show_no_private_one(key: PrivateKey) -> None:
    private, public = new_private_key(), key.public_text("operator")
    loaded = config.load(None, {}, registry={"private_key": private, "trusted_keys": [public]})
    assert loaded.registry.trusted_keys == (public,)
    assert private.split(":")[1] not in repr(loaded)
    wrong = [
        {"trusted_keys": [private]},
        {"trusted_keys": [public.replace("operator", "king")]},
        {"trusted_keys": [public[:-3]]},
        {"trusted_keys": [public.replace("ed25519", "rsa")]},
        {"private_key": public, "trusted_keys": [public]},
        {"private_key": private[:-4], "trusted_keys": [public]},
        {"private_key": private},
    ]
    for section in wrong:
        with pytest.raises((ConfigError, ValidationError), match="registry") as refused:
            config.load(None, {}, registry=section)
        assert private.split(":")[1][:20] not in str(refused.value)
