"""Settings of our proposer inside vLLM."""

from pydantic import Field

from omnidraft.config.log_registry import Section


class VllmSettings(Section):
    """The proposer inside vLLM. Its settings file is named by OMNIDRAFT_CONFIG."""

    drafter_ids: int = Field(65_536, ge=1)
    """Ids of all running texts together whose keys the drafter keeps; 23 kB each for SmolLM2-135M. Texts beyond that
    are helped by `decode.lookup` alone."""
    keep_left_s: float = Field(60.0, ge=0)
    """How long a text that vLLM works on no longer is remembered: it may have been preempted."""
    most_left: int = Field(256, ge=0)
    """... and how many of them."""
    idle_s: float = Field(5.0, gt=0)
    """Without a pass for so long, what was not yet recorded of the last texts is."""
    trace_rows: int = Field(256, ge=0)
    """Rows of a pass whose log-probabilities are recorded, at most; larger passes are recorded without. Their logits
    are copied: 0.6 MB a row for a vocabulary of 150,000. 0: never."""
    metrics_port: int | None = Field(None, ge=0, le=65535)
    """Serve our Prometheus metrics there on `metrics.host`, from inside vLLM's worker. None: they appear among vLLM's
    own where PROMETHEUS_MULTIPROC_DIR is set."""
