"""The distiller: records in, steps, snapshots out, until it is told to stop."""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from torch import Tensor

from omnidraft.distill import agreement
from omnidraft.distill.agreement import Agreed
from omnidraft.distill.intake import Batch, Intake
from omnidraft.distill.learner import Learner, StepReport
from omnidraft.distill.publisher import INTAKE, LEARNER, Identity, Publisher
from omnidraft.distill.source import TraceSource
from omnidraft.errors import BusError, RegistryError, SnapshotStale
from omnidraft.ports import Metrics
from omnidraft.snapshots import bundle
from omnidraft.traces.record import TraceRecord
from omnidraft.vocab.ngram_cache import NgramCache

POLL_RECORDS = 64
POLL_TIMEOUT_S = 0.5
PAUSED_S = 0.2
RETRY_S = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Waits before the log or the registry is tried again; the last one repeats."""

logger = logging.getLogger(__name__)
