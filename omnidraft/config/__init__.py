"""Every setting of every process."""

from omnidraft.config.sections import (
    CacheSettings,
    ControllerSettings,
    DecodeSettings,
    LearnerSettings,
    LogSettings,
    ModelSettings,
    RecorderSettings,
    RegistrySettings,
    Section,
    Settings,
    WorkerSettings,
)
from omnidraft.config.sources import load

__all__ = [
    "CacheSettings",
    "ControllerSettings",
    "DecodeSettings",
    "LearnerSettings",
    "LogSettings",
    "ModelSettings",
    "RecorderSettings",
    "RegistrySettings",
    "Section",
    "Settings",
    "WorkerSettings",
    "load",
]
