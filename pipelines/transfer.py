"""Bits per byte of a model with its own tokenizer, and with another: after each initialisation, and after training.

`python -m pipelines.transfer MODEL --tokenizer OTHER --data FILE --transferred DIR`. A file's held-out rows are those
that `omnidraft transfer` holds out with the same options, so nothing is measured that was learned.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from omnidraft.hosts import process
from omnidraft.wiring.transfer import bits, split_texts
from omnidraft.wiring.transfer_models import TokenizerPair, frozen, initialise, load_model, load_pair
from pipelines.lib import report
from pipelines.lib.choices import chosen

if TYPE_CHECKING:
    from omnidraft.models.hf.trainable_drafter import TransformersTrainable
    from omnidraft.transfer.texts import AlignedText

METHODS = ("mean", "fvt", "omp")
