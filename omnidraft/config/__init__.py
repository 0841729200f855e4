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
    WorkerSettings,
)
from omnidraft.config.sources import load
from omnidraft.config.telemetry import MetricsSettings, TracingSettings

__all__ = [
    "AlmSettings",
    "CacheSettings",
    "ControllerSettings",
    "DecodeSettings",
    "DriftSettings",
    "KafkaSettings",
    "LearnerSettings",
    "LogSettings",
    "MetricsSettings",
    "ModelSettings",
    "RecorderSettings",
    "RegistrySettings",
    "Section",
    "Settings",
    "TracingSettings",
    "WorkerSettings",
    "load",
    "masked",
]
