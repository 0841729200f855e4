"""A record that kills the learner's process, over and over: it becomes a dead letter, and all others are learned."""

import signal
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from omnidraft import assembly, config
from omnidraft.assembly.fleet import audit
from omnidraft.distill.ingest import dead_letters
from omnidraft.distill.ingest.poison_detector import TRIES
from omnidraft.traces import codec
from tests.integration.distiller_process import Fleet, run_learner
from tests.integration.lethal_learner import LETHAL

LETHAL_NUMBER = 3


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("held_out_every", "num_after"),
    [pytest.param(0, 9, id="while it is learned from"), pytest.param(13, 11, id="while it is measured with")],
)
def test_a_record_that_kills_the_process_is_found_and_given_up_and_nothing_else_is(
    tmp_path: Path, held_out_every: int, num_after: int
) -> None:
    """A hash of its prompt decides whether a record is held out; with 13 that is so for 0, 3 and 10."""
    fleet = Fleet(tmp_path)
    fleet.environ |= {
        "OMNIDRAFT_LEARNER__STEPS_PER_SNAPSHOT": "2",
        "OMNIDRAFT_LEARNER__HELD_OUT_EVERY": str(held_out_every),
    }
    settings = config.load(environ=fleet.environ)
    fleet.emit(LETHAL_NUMBER)
    fleet.emit(1, first=LETHAL_NUMBER, drafter_prompt_ids=np.array([*LETHAL, 84], np.uint32))
    fleet.emit(num_after, first=LETHAL_NUMBER + 1)
    end = LETHAL_NUMBER + 1 + num_after
    codes = []
    while len(codes) < 9 and 0 not in codes:
        codes.append(run_learner(fleet, tmp_path / "actor", offset=end))
    assert codes == [-signal.SIGKILL] * (TRIES + TRIES) + [0]
    manifest = fleet.newest()
    assert manifest is not None
    assert (manifest.num_records, manifest.offsets, manifest.counts["poison"]) == (12, {0: end}, 1)
    assert manifest.held_out_records == (2 if held_out_every else 0)
    with closing(assembly.log_reader(settings, settings.log.dead_letters_topic)) as reader:
        (letter,) = dead_letters.read(reader, idle_s=0)
    assert (letter.reason, letter.origin) == ("poison", (0, LETHAL_NUMBER))
    assert codec.decode(letter.message.value, letter.original_headers).request_id == f"request-{LETHAL_NUMBER}"
    assert audit(settings).faults == ()
    assert not list((tmp_path / "actor").glob("*.json"))
