"""Every setting of every process."""

from omnidraft.config.learning import (
    AlmSettings,
    CacheSettings,
    ControllerSettings,
    DriftSettings,
    LearnerSettings,
    TenantFactorSettings,
)
from omnidraft.config.secrets import masked
from omnidraft.config.sections import (
    DecodeSettings,
    Mode,
    ModelSettings,
    RecorderSettings,
    SchedulerSettings,
    Settings,
)
from omnidraft.config.services import (
    KafkaSettings,
    LogSettings,
    MetricsSettings,
    RegistrySettings,
    Section,
    TracingSettings,
)
from omnidraft.config.sources import load
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
    "TenantFactorSettings",
    "TracingSettings",
    "VllmSettings",
    "WorkerSettings",
    "load",
    "masked",
]
