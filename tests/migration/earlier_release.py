"""What the earlier release saved about its own files, and how the same thing of today is compared with it."""

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


def expected(name: str) -> Any:
    """Return what the earlier release saved as JSON under this name."""
    return json.loads((DATA / name).read_text())


def assert_extends(now: Any, then: Any, where: str = "") -> None:
    """Fail unless all fields of then have the same values now; objects may have more fields."""
    if isinstance(then, dict):
        for name, value in then.items():
            assert name in now, f"{where}/{name}"
            assert_extends(now[name], value, f"{where}/{name}")
    elif isinstance(then, list) and any(isinstance(each, dict) for each in then):
        assert len(now) == len(then), where
        for number, (new, old) in enumerate(zip(now, then, strict=True)):
            assert_extends(new, old, f"{where}/{number}")
    else:
        assert now == then, where
