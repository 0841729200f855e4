"""A home belongs to one process and one pair."""

import stat
from pathlib import Path

import pytest

from omnidraft.device.home import DeviceHome
from omnidraft.errors import ConfigError

PAIR = {"target": "big", "drafter": "small"}


def test_a_home_is_held_until_it_is_closed(tmp_path: Path) -> None:
    home = DeviceHome(tmp_path / "home")
    with pytest.raises(ConfigError, match="learns in"):
        DeviceHome(tmp_path / "home")
    home.close()
    DeviceHome(tmp_path / "home").close()


def test_only_its_owner_reads_a_home(tmp_path: Path) -> None:
    home = DeviceHome(tmp_path / "home")
    home.claim(PAIR)
    assert stat.S_IMODE(home.folder.stat().st_mode) == 0o700
    home.close()


def test_a_home_of_another_pair_is_refused_by_name(tmp_path: Path) -> None:
    home = DeviceHome(tmp_path)
    home.claim(PAIR)
    home.claim(PAIR)
    with pytest.raises(ConfigError, match="is the home of drafter small, not tiny"):
        home.claim(PAIR | {"drafter": "tiny"})
    home.close()


@pytest.mark.parametrize("content", ["", "{", "[]", '"big"'])
def test_a_damaged_home_is_not_taken_over(tmp_path: Path, content: str) -> None:
    (tmp_path / "pair.json").write_text(content)
    home = DeviceHome(tmp_path)
    with pytest.raises(ConfigError, match="damaged"):
        home.claim(PAIR)
    home.close()
