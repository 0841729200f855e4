"""Every setting of every process."""

from omnidraft.config.sections import (
    AlmSettings,
    CacheSettings,
    ControllerSettings,
    DecodeSettings,
    DriftSettings,
    KafkaSettings,
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
    "AlmSettings",
    "CacheSettings",
    "ControllerSettings",
    "DecodeSettings",
    "DriftSettings",
    "KafkaSettings",
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
