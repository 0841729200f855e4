"""The questions of the demo, and recorded answers of its target with their log-probabilities; see data/README.md."""

from pathlib import Path

_DATA = Path(__file__).parent / "data"
QUESTIONS = _DATA / "gsm8k.jsonl"
NUM_TEST = 24
"""The number of questions at the beginning of the file that are the test split; the rest are live traffic."""
RECORDED = _DATA / "gsm8k_qwen1.5b.avro"
HELD_OUT_EVERY = 6
"""The distiller's setting, with which the first 16 recorded answers judge the snapshots and the others are learned."""
