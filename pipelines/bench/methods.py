"""The decoding methods that the benchmark compares, by name. Only the chosen ones are loaded.

plain                   our engine with speculation off, unpadded passes: what people have without us
plain-reproducible      ... with padded passes: the price of reproducible mode
omnidraft               our engine in the chosen mode; -fast and -reproducible name one
omnidraft+traces        ... that also records traces into a SQLite log, as a serving worker does
hf-generate             transformers' own generate, bfloat16
hf-uad, hf-tli          transformers' assisted generation across tokenizers (models/hf/generate.py)
llamacpp                our engine over llama.cpp with speculation off
llamacpp+omnidraft      ... with the drafter
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from omnidraft import config, wiring
from omnidraft.decode.decoder import Decoder
from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.recording.trace_producer import TraceProducer
from omnidraft.errors import OmnidraftError
from omnidraft.ports import Mode, Sampling
from omnidraft.telemetry.metrics import CountingMetrics
from pipelines.bench.runs import BenchRun, Method, run_of_generate, run_of_steps

OURS: Mapping[str, tuple[Mode | None, int | None]] = {
    "plain": ("fast", 0),
    "plain-reproducible": ("reproducible", 0),
    "omnidraft": (None, None),
    "omnidraft-fast": ("fast", None),
    "omnidraft-reproducible": ("reproducible", None),
    "omnidraft+traces": (None, None),
}
"""Name -> mode and drafted tokens; None is the setting's."""
LLAMACPP: Mapping[str, tuple[Mode | None, int | None]] = {"llamacpp": ("fast", 0), "llamacpp+omnidraft": (None, None)}
HUGGINGFACE = ("hf-generate", "hf-uad", "hf-tli")
NAMES = (*OURS, *HUGGINGFACE, *LLAMACPP)

BASELINES: Mapping[str, str] = {
    "omnidraft+traces": "omnidraft",
    "hf-uad": "hf-generate",
    "hf-tli": "hf-generate",
    "llamacpp+omnidraft": "llamacpp",
}
"""Method -> the method that it is compared with besides plain: its own engine without drafting."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Options of all methods."""

    settings: config.Settings
    temperature: float
    snapshot: str | None = None


@dataclass(frozen=True, slots=True)
class LoadedMethods:
    """The methods that can run, and the reasons why others cannot."""

    methods: dict[str, Method]
    target: str
    """Names the model that `plain` runs, its precision and its threads."""
    missing: dict[str, str]


def load(names: Sequence[str], setup: Setup, stack: ExitStack) -> LoadedMethods:
    """Load the methods of these names; plain is one of them. `stack` closes their resources.

    Raises:
        OmnidraftError: our own engine cannot be loaded. Reasons of other methods are in `missing`.
    """
    worker = wiring.engine(setup.settings, CountingMetrics(), snapshot=setup.snapshot)
    methods = _engine_methods(names, OURS, worker.engine, setup)
    if "omnidraft+traces" in names:
        traced = _recording_engine(worker, setup.settings, stack)
        methods |= _engine_methods(["omnidraft+traces"], OURS, traced, setup)
    missing: dict[str, str] = {}
    others: tuple[Callable[[Sequence[str], Setup], dict[str, Method]], ...] = (_huggingface, _llamacpp)
    for group, loader in zip((HUGGINGFACE, tuple(LLAMACPP)), others, strict=True):
        chosen = [name for name in names if name in group]
        try:
            methods |= loader(chosen, setup) if chosen else {}
        except OmnidraftError as exc:
            missing |= dict.fromkeys(chosen, str(exc))
    return LoadedMethods(methods, worker.target.fingerprint, missing)


def _engine_methods(
    names: Sequence[str], options: Mapping[str, tuple[Mode | None, int | None]], engine: Engine, setup: Setup
) -> dict[str, Method]:
    def method(mode: Mode | None, num_draft_tokens: int | None) -> Method:
        def run(text: str, max_new_tokens: int) -> BenchRun:
            request = GenerationRequest(
                messages=[{"role": "user", "content": text}],
                max_new_tokens=max_new_tokens,
                sampling=Sampling(setup.temperature),
                seed=0,
                mode=mode,
                num_draft_tokens=num_draft_tokens,
            )
            return run_of_steps(engine.stream(request).steps)

        return run

    return {name: method(*options[name]) for name in names if name in options}


def _recording_engine(worker: wiring.Worker, settings: config.Settings, stack: ExitStack) -> Engine:
    """Return an engine with the same target and drafter that records into a temporary log."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omnidraft-bench-")))
    log = settings.log.model_copy(update={"url": f"sqlite:///{folder / 'log.db'}"})
    temporary, topic = settings.model_copy(update={"log": log}), log.traces_topic
    metrics, pair = CountingMetrics(), worker.engine.pair
    producer = TraceProducer(lambda: wiring.log_writer(temporary, topic), settings.recorder, metrics)
    stack.callback(producer.close, settings.recorder.drain_timeout_s)
    vocabulary = pair.target_tokenizer.vocabulary
    decoder = Decoder(worker.target, vocabulary, trace_top_k=settings.recorder.top_k)
    slot, decode, recording = worker.engine.slot, settings.decode, settings.recorder
    return Engine(decoder, pair, slot, producer, metrics, decode=decode, recording=recording)


def _huggingface(names: Sequence[str], setup: Setup) -> dict[str, Method]:
    from omnidraft.models.hf.generate import HfAssisted, HfGenerate

    tokenizers = wiring.vocabularies(setup.settings)
    stop_ids, folders = sorted(tokenizers.target.stop_ids), (tokenizers.target_folder, tokenizers.drafter_folder)
    target = HfGenerate(tokenizers.target_folder)

    def method(model: HfGenerate | HfAssisted) -> Method:
        def run(text: str, max_new_tokens: int) -> BenchRun:
            prompt_ids = tokenizers.target.chat_prompt_ids([{"role": "user", "content": text}])
            return run_of_generate(
                model.generate(prompt_ids, max_new_tokens, stop_ids=stop_ids, temperature=setup.temperature)
            )

        return run

    makers: Mapping[str, Callable[[], HfGenerate | HfAssisted]] = {
        "hf-generate": lambda: target,
        "hf-uad": lambda: HfAssisted(target, *folders, "uad"),
        "hf-tli": lambda: HfAssisted(target, *folders, "tli"),
    }
    return {name: method(makers[name]()) for name in names}


def _llamacpp(names: Sequence[str], setup: Setup) -> dict[str, Method]:
    sections = setup.settings.model_dump()
    sections["models"] |= {"engine": "llamacpp", "precision": "auto"}
    worker = wiring.engine(config.load(None, {}, **sections), CountingMetrics(), snapshot=setup.snapshot)
    return _engine_methods(names, LLAMACPP, worker.engine, setup)
