"""Every setting of every process. A name is loaded when it is first used: pydantic takes longer than `omnidraft --help`
may."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omnidraft.config.learning import GROUP_KEYS as GROUP_KEYS
    from omnidraft.config.learning import CacheSettings as CacheSettings
    from omnidraft.config.learning import ControllerSettings as ControllerSettings
    from omnidraft.config.learning import LearnerSettings as LearnerSettings
    from omnidraft.config.learning import MemorySettings as MemorySettings
    from omnidraft.config.secrets import masked as masked
    from omnidraft.config.sections import NO_DRAFTER as NO_DRAFTER
    from omnidraft.config.sections import ApiKey as ApiKey
    from omnidraft.config.sections import DecodeSettings as DecodeSettings
    from omnidraft.config.sections import Mode as Mode
    from omnidraft.config.sections import ModelSettings as ModelSettings
    from omnidraft.config.sections import RecorderSettings as RecorderSettings
    from omnidraft.config.sections import SchedulerSettings as SchedulerSettings
    from omnidraft.config.sections import Settings as Settings
    from omnidraft.config.sections import WorkerSettings as WorkerSettings
    from omnidraft.config.services import KafkaSettings as KafkaSettings
    from omnidraft.config.services import LogSettings as LogSettings
    from omnidraft.config.services import MetricsSettings as MetricsSettings
    from omnidraft.config.services import RegistrySettings as RegistrySettings
    from omnidraft.config.sources import load as load
    from omnidraft.config.sources import origins as origins
    from omnidraft.config.sources import without_settings as without_settings

_MODULES = ("learning", "secrets", "sections", "services", "sources")


def __getattr__(name: str) -> Any:
    """Return a setting or function of one of the modules."""
    for module in _MODULES if not name.startswith("_") else ():
        if hasattr(loaded := import_module(f"{__name__}.{module}"), name):
            return getattr(loaded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
