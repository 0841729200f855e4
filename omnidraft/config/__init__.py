"""Every setting of every process."""

from omnidraft.config.learning import (
    AlmSettings,
    CacheSettings,
    ControllerSettings,
    DriftSettings,
    LearnerSettings,
    MemorySettings,
    TenantFactorSettings,
)
from omnidraft.config.secrets import masked
from omnidraft.config.sections import (
    NO_DRAFTER,
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
    "NO_DRAFTER",
    "AlmSettings",
    "ApiKey",
    "CacheSettings",
    "ControllerSettings",
    "DecodeSettings",
    "DriftSettings",
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
    "Section",
    "Settings",
    "TenantFactorSettings",
    "TracingSettings",
    "VllmSettings",
    "WorkerSettings",
    "load",
    "masked",
]
