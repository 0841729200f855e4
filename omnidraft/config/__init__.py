"""Every setting of every process."""

from omnidraft.config.log_registry import KafkaSettings, LogSettings, RegistrySettings, Section
from omnidraft.config.secrets import masked
from omnidraft.config.sections import (
    AlmSettings,
    CacheSettings,
    ControllerSettings,
    DecodeSettings,
    DriftSettings,
    LearnerSettings,
    Mode,
    ModelSettings,
    RecorderSettings,
    SchedulerSettings,
    Settings,
)
from omnidraft.config.sources import load
from omnidraft.config.telemetry import MetricsSettings, TracingSettings
from omnidraft.config.worker import ApiKey, VllmSettings, WorkerSettings

__all__ = [
    "AlmSettings",
    "ApiKey",
    "CacheSettings",
    "ControllerSettings",
    "DecodeSettings",
    "DriftSettings",
    "KafkaSettings",
    "LearnerSettings",
    "LogSettings",
    "MetricsSettings",
    "Mode",
    "ModelSettings",
    "RecorderSettings",
    "RegistrySettings",
    "SchedulerSettings",
    "Section",
    "Settings",
    "TracingSettings",
    "VllmSettings",
    "WorkerSettings",
    "load",
    "masked",
]
