"""Every setting of every process. A name is loaded when it is first used: pydantic takes longer than `omnidraft --help`
may."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omnidraft.config.learning import (
        GROUP_KEYS,
        CacheSettings,
        ControllerSettings,
        LearnerSettings,
        MemorySettings,
    )
    from omnidraft.config.secrets import masked
    from omnidraft.config.sections import (
        NO_DRAFTER,
        ApiKey,
        DecodeSettings,
        Mode,
        ModelSettings,
        RecorderSettings,
        SchedulerSettings,
        Settings,
        WorkerSettings,
    )
    from omnidraft.config.services import (
        KafkaSettings,
        LogSettings,
        MetricsSettings,
        RegistrySettings,
    )
    from omnidraft.config.sources import load, without_settings

__all__ = [
    "GROUP_KEYS",
    "NO_DRAFTER",
    "ApiKey",
    "CacheSettings",
    "ControllerSettings",
    "DecodeSettings",
    "KafkaSettings",
    "LearnerSettings",
    "LogSettings",
    "MemorySettings",
    "MetricsSettings",
    "Mode",
    "ModelSettings",
    "RecorderSettings",
    "RegistrySettings",
    "SchedulerSettings",
    "Settings",
    "WorkerSettings",
    "load",
    "masked",
    "without_settings",
]
_MODULES = ("learning", "secrets", "sections", "services", "sources")


def __getattr__(name: str) -> Any:
    """Return a setting or function of one of the modules."""
    if name in __all__:
        for module in _MODULES:
            if hasattr(loaded := import_module(f"{__name__}.{module}"), name):
                return getattr(loaded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
