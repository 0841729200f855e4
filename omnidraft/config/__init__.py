"""Every setting of every process."""

from omnidraft.config.outside import KafkaSettings, LogSettings, RegistrySettings, Section
from omnidraft.config.secrets import masked
from omnidraft.config.sections import (
    AlmSettings,
    CacheSettings,
    ControllerSettings,
    DecodeSettings,
    DriftSettings,
    LearnerSettings,
    ModelSettings,
    RecorderSettings,
    Settings,
    VllmSettings,
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
    "VllmSettings",
    "WorkerSettings",
    "load",
    "masked",
]
