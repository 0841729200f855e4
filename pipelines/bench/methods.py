"""The decoding methods that the benchmark compares, by name. Only the chosen ones are loaded.

plain                   our engine with speculation off, unpadded passes: what people have without us
plain-reproducible      ... with padded passes: the price of reproducible mode
omnidraft               our engine in the chosen mode; -fast and -reproducible name one
omnidraft+traces        ... that also records traces into a SQLite log, as a serving worker does
suffix, lookup          our engine without a drafter: suffix memory alone, prompt lookup alone
drafter                 ... without memory; drafter+lookup: with prompt lookup in its place
hf-generate             transformers' own generate, bfloat16
hf-uad, hf-tli          transformers' assisted generation across tokenizers (models/hf/generate.py)
llamacpp                our engine over llama.cpp with speculation off
llamacpp+omnidraft      ... with the drafter

A row with a `schema` is answered under it by our own engine; transformers' methods fail on it. Nothing is remembered
from one answer to the next, except in a stream (Setup.is_stream), nor from one method to another.
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
from omnidraft.decode.snapshot.slot import LoadedSnapshot
from omnidraft.errors import OmnidraftError, RequestError
from omnidraft.ports import Grammar, Mode, Sampling
from omnidraft.prompts import Prompt
from omnidraft.telemetry.metrics import CountingMetrics
from pipelines.bench.runs import BenchRun, Method, run_of_generate, run_of_steps
from pipelines.lib.own_snapshot import own_snapshot
from pipelines.lib.prompt_requests import fields_of, ids_of

TRACED = "omnidraft+traces"
OURS: Mapping[str, tuple[Mode | None, int | None]] = {
    "plain": ("fast", 0),
    "plain-reproducible": ("reproducible", 0),
    "omnidraft": (None, None),
    "omnidraft-fast": ("fast", None),
    "omnidraft-reproducible": ("reproducible", None),
    "omnidraft+traces": (None, None),
}
"""Name -> mode and drafted tokens; None is the setting's."""
VARIANTS: Mapping[str, tuple[str | None, Mapping[str, bool]]] = {
    "suffix": (config.NO_DRAFTER, {"suffix_memory": True}),
    "lookup": (config.NO_DRAFTER, {"suffix_memory": False, "lookup": True}),
    "drafter": (None, {"suffix_memory": False, "lookup": False}),
    "drafter+lookup": (None, {"suffix_memory": False, "lookup": True}),
}
"""Name -> drafter and changes to section `decode`; None is the setting's. Without a drafter the snapshot's memory
stays."""
LLAMACPP: Mapping[str, tuple[Mode | None, int | None]] = {"llamacpp": ("fast", 0), "llamacpp+omnidraft": (None, None)}
HUGGINGFACE = ("hf-generate", "hf-uad", "hf-tli")
NAMES = (*OURS, *VARIANTS, *HUGGINGFACE, *LLAMACPP)

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
    is_stream: bool = False
    """Whether a method remembers its own answers, as a worker remembers those to one tenant."""


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
    methods = dict[str, Method]()
    for name in [name for name in names if name in OURS]:
        engine = _recording_engine(worker, setup, stack) if name == TRACED else worker.engine
        mode, num_draft_tokens = OURS[name]
        snapshot = None if num_draft_tokens == 0 else own_snapshot(setup.settings, worker, setup.snapshot)
        methods[name] = _method(name, engine, setup, snapshot, mode, num_draft_tokens)
    methods |= _variants([name for name in names if name in VARIANTS], worker, setup)
    missing: dict[str, str] = {}
    others: tuple[Callable[[Sequence[str], Setup], dict[str, Method]], ...] = (huggingface, _llamacpp)
    for group, loader in zip((HUGGINGFACE, tuple(LLAMACPP)), others, strict=True):
        chosen = [name for name in names if name in group]
        try:
            methods |= loader(chosen, setup) if chosen else {}
        except OmnidraftError as exc:
            missing |= dict.fromkeys(chosen, str(exc))
    return LoadedMethods(methods, worker.target.fingerprint, missing)


def _method(
    name: str,
    engine: Engine,
    setup: Setup,
    snapshot: LoadedSnapshot | None,
    mode: Mode | None = None,
    num_draft_tokens: int | None = None,
) -> Method:
    """Return a method of our engine. Its name is the tenant, so that no method drafts from what another one said."""

    def run(prompt: Prompt, max_new_tokens: int) -> BenchRun:
        grammar = None if prompt.schema is None else Grammar("json_schema", prompt.schema)
        request = GenerationRequest(
            **fields_of(prompt, engine.pair.target_tokenizer),
            max_new_tokens=max_new_tokens,
            sampling=Sampling(setup.temperature, grammar=grammar),
            seed=0,
            mode=mode,
            num_draft_tokens=num_draft_tokens,
            tenant=name,
            is_stored=setup.is_stream or name == TRACED,
        )
        return run_of_steps(engine.stream(engine.prepare(request), snapshot).steps)

    return run


def _variants(names: Sequence[str], worker: wiring.Worker, setup: Setup) -> dict[str, Method]:
    """Return methods over the worker's target that draft with a part of what it drafts with."""
    methods = dict[str, Method]()
    for name in names:
        drafter, changes = VARIANTS[name]
        models = setup.settings.models
        if drafter is not None:
            models = models.model_copy(update={"drafter": drafter, "memory_of": models.followed_drafter})
        decode = setup.settings.decode.model_copy(update=changes)
        settings = setup.settings.model_copy(update={"models": models, "decode": decode})
        num_draft = None if decode.suffix_memory else decode.num_draft_tokens  # more rows are for the memory only
        snapshot = own_snapshot(settings, worker, setup.snapshot)
        methods[name] = _method(name, worker.engine, setup, snapshot, None, num_draft)
    return methods


def _recording_engine(worker: wiring.Worker, setup: Setup, stack: ExitStack) -> Engine:
    """Return an engine with the same target and drafter that records into a temporary log."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omnidraft-bench-")))
    settings = setup.settings
    log = settings.log.model_copy(update={"url": f"sqlite:///{folder / 'log.db'}"})
    temporary, topic = settings.model_copy(update={"log": log}), log.traces_topic
    metrics, pair = CountingMetrics(), worker.engine.pair
    producer = TraceProducer(lambda: wiring.log_writer(temporary, topic), settings.recorder, metrics)
    stack.callback(producer.close, settings.recorder.drain_timeout_s)
    vocabulary = pair.target_tokenizer.vocabulary
    decoder = Decoder(worker.target, vocabulary, trace_top_k=settings.recorder.top_k)
    recent = worker.engine.recent if setup.is_stream else None
    slot, decode, recording = worker.engine.slot, settings.decode, settings.recorder
    return Engine(decoder, pair, slot, producer, metrics, decode=decode, recording=recording, recent=recent)


def huggingface(names: Sequence[str], setup: Setup) -> dict[str, Method]:
    """Return transformers' methods of these names over one target. Raises ModelError when it cannot compute here."""
    from omnidraft.models.hf.generate import HfAssisted, HfGenerate

    tokenizers = wiring.vocabularies(setup.settings)
    stop_ids, folders = sorted(tokenizers.target.stop_ids), (tokenizers.target_folder, tokenizers.drafter_folder)
    target = HfGenerate(tokenizers.target_folder)

    def method(model: HfGenerate | HfAssisted) -> Method:
        def run(prompt: Prompt, max_new_tokens: int) -> BenchRun:
            if prompt.schema is not None:
                raise RequestError("transformers answers under no schema")
            prompt_ids = ids_of(prompt, tokenizers.target)
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
    return {name: _method(name, worker.engine, setup, None, *LLAMACPP[name]) for name in names}
