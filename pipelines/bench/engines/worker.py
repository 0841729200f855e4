"""The process of an engine: `python -m pipelines.bench.engines.worker SPEC`, with a JSON object a line both ways.

The first line that it writes describes the engine. Then each line that it reads is a command:

{"pass": N}                   -> {"seconds": S}: one pass of N rows with the logits of all
{"prompt": N}                 -> {"seconds": S}: a prompt of N tokens
{"score": [ids]}              -> {"log_probs": [...], "best": [...]}: of each id but the first, and the likeliest there
{"generate": [ids], "num": N} -> {"ids": [...]}: the N likeliest tokens, one after the other

It ends with its input. {"error": reason} instead of the first line: the engine cannot be loaded.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import torch

from omnidraft.container_limits import usable_processors
from omnidraft.errors import OmnidraftError
from pipelines.bench.engines.engine import MAX_ROWS, Engine, EngineSpec, from_plain_data, row_ids


def main(spec: EngineSpec) -> None:
    """Load the engine, which computes on no more threads than can run at once, then answer commands."""
    output = _take_stdout()
    if (usable := usable_processors()) < torch.get_num_threads():
        torch.set_num_threads(usable)
    try:
        engine = _load(spec)
    except OmnidraftError as exc:
        _write(output, {"error": str(exc)})
        return
    facts = ("num_weights", "weight_bytes", "vocab_size")
    _write(output, {name: getattr(engine, name) for name in facts} | {"threads": torch.get_num_threads()})
    for line in sys.stdin:
        _write(output, answer(engine, json.loads(line)))


def answer(engine: Engine, command: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a command."""
    match command:
        case {"pass": num}:
            return _timed(engine.score, 0, row_ids(num, engine.vocab_size))
        case {"prompt": num}:
            return _timed(engine.read, row_ids(num, engine.vocab_size))
        case {"score": ids}:
            return _score(engine, ids)
        case {"generate": ids, "num": num}:
            return {"ids": _generate(engine, ids, num)}
    raise AssertionError(f"no such command: {command}")


def _take_stdout() -> TextIO:
    """Return standard output for the answers; whatever else is printed goes to standard error from now on."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def _write(output: TextIO, content: Mapping[str, Any]) -> None:
    print(json.dumps(content), file=output, flush=True)


def _load(spec: EngineSpec) -> Engine:
    match spec.system:
        case "omnidraft":
            from pipelines.bench.engines.native_engine import NativeEngine

            return NativeEngine(spec)
        case "torch":
            from pipelines.bench.engines.torch_engine import TorchEngine

            return TorchEngine(spec)
        case "llamacpp":
            from pipelines.bench.engines.llamacpp_engine import LlamaCppEngine

            return LlamaCppEngine(spec)
        case "ik-llamacpp":
            from pipelines.bench.engines.ik_engine import IkEngine

            return IkEngine(spec)
    raise AssertionError(f"no such system: {spec.system}")


def _timed(compute: Callable[..., object], *args: object) -> dict[str, float]:
    started = time.perf_counter()
    compute(*args)
    return {"seconds": time.perf_counter() - started}


def _score(engine: Engine, ids: Sequence[int]) -> dict[str, list[float] | list[int]]:
    log_probs: list[float] = []
    best: list[int] = []
    for start in range(0, len(ids) - 1, MAX_ROWS):
        rows, following = ids[start : start + MAX_ROWS], ids[start + 1 : start + MAX_ROWS + 1]
        log_p_NV = engine.score(start, rows)[: len(following)].log_softmax(-1)
        log_probs += log_p_NV.gather(1, torch.tensor(following)[:, None])[:, 0].tolist()
        best += log_p_NV.argmax(-1).tolist()
    return {"log_probs": log_probs, "best": best}


def _generate(engine: Engine, prompt_ids: Sequence[int], num: int) -> list[int]:
    ids = list(prompt_ids)
    for start in range(0, len(prompt_ids), MAX_ROWS):
        logits_NV = engine.score(start, ids[start : start + MAX_ROWS])
    while len(ids) < len(prompt_ids) + num:
        ids.append(int(logits_NV[-1].argmax()))
        logits_NV = engine.score(len(ids) - 1, ids[-1:])
    return ids[len(prompt_ids) :]


if __name__ == "__main__":
    main(from_plain_data(json.loads(sys.argv[1])))
