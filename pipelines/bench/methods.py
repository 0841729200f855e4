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
from dataclasses import dataclass, field, replace
from pathlib import Path

from omnidraft import assembly, config
from omnidraft.assembly.snapshot_loading import named_or_base
from omnidraft.decode.decoder import Decoder
from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.policy.cost_model import MeasuredCosts
from omnidraft.decode.recording.trace_producer import TraceProducer
from omnidraft.decode.snapshot.slot import LoadedSnapshot
from omnidraft.errors import OmnidraftError, RequestError
from omnidraft.ports import Grammar, Mode, Sampling
from omnidraft.prompts import Prompt
from omnidraft.telemetry.metrics import CountingMetrics
from pipelines.bench.runs import BenchRun, Method, run_of_generate, run_of_steps
from pipelines.lib.recording import fields_of, ids_of

TRACED = "omnidraft+traces"


@dataclass(frozen=True, slots=True)
class OwnMethod:
    """A way of decoding with our engine; None is the setting's."""

    mode: Mode | None = None
    num_draft_tokens: int | None = None
    drafter: str | None = None
    """Without a drafter the snapshot's memory stays."""
    decode: Mapping[str, bool] = field(default_factory=dict)
    """Changes to section `decode`."""


OURS: Mapping[str, OwnMethod] = {
    "plain": OwnMethod("fast", 0),
    "plain-reproducible": OwnMethod("reproducible", 0),
    "omnidraft": OwnMethod(),
    "omnidraft-fast": OwnMethod("fast"),
    "omnidraft-reproducible": OwnMethod("reproducible"),
    TRACED: OwnMethod(),
    "suffix": OwnMethod(drafter=config.NO_DRAFTER, decode={"suffix_memory": True}),
    "lookup": OwnMethod(drafter=config.NO_DRAFTER, decode={"suffix_memory": False, "lookup": True}),
    "drafter": OwnMethod(decode={"suffix_memory": False, "lookup": False}),
    "drafter+lookup": OwnMethod(decode={"suffix_memory": False, "lookup": True}),
}
LLAMACPP: Mapping[str, OwnMethod] = {"llamacpp": OwnMethod("fast", 0), "llamacpp+omnidraft": OwnMethod()}
HUGGINGFACE = ("hf-generate", "hf-uad", "hf-tli")
NAMES = (*OURS, *HUGGINGFACE, *LLAMACPP)

BASELINES: Mapping[str, str] = {
    TRACED: "omnidraft",
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
    worker = assembly.engine(setup.settings, CountingMetrics(), snapshot=setup.snapshot)
    methods = {name: _own(name, worker, setup, stack) for name in names if name in OURS}
    missing: dict[str, str] = {}
    others: tuple[Callable[[Sequence[str], Setup], dict[str, Method]], ...] = (huggingface, _llamacpp)
    for group, loader in zip((HUGGINGFACE, tuple(LLAMACPP)), others, strict=True):
        chosen = [name for name in names if name in group]
        try:
            methods |= loader(chosen, setup) if chosen else {}
        except OmnidraftError as exc:
            missing |= dict.fromkeys(chosen, str(exc))
    return LoadedMethods(methods, worker.target.fingerprint, missing)


def _own(name: str, worker: assembly.Worker, setup: Setup, stack: ExitStack) -> Method:
    """Return a method over the worker's target, which drafts with a snapshot of its own."""
    method, settings = OURS[name], setup.settings
    engine = _recording_engine(worker, setup, stack) if name == TRACED else worker.engine
    if method.num_draft_tokens == 0:
        return _run(name, engine, setup, method)
    models = settings.models
    if method.drafter is not None:
        models = models.model_copy(update={"drafter": method.drafter, "memory_of": models.followed_drafter})
    decode = settings.decode.model_copy(update=method.decode)
    if method.decode and not decode.suffix_memory:  # more rows are for the memory only
        method = replace(method, num_draft_tokens=decode.num_draft_tokens)
    settings = settings.model_copy(update={"models": models, "decode": decode})
    return _run(name, engine, setup, method, own_snapshot(settings, worker, setup.snapshot))


def own_snapshot(settings: config.Settings, worker: assembly.Worker, name: str | None) -> LoadedSnapshot:
    """Load a snapshot for the worker's engine. Its n-gram cache, which learns while it decodes, is no other one's, so
    no method drafts with what another one learned.

    Args:
        settings: how it drafts; the target is the worker's.
        name: a folder, version or alias; None is the base drafter.

    Raises:
        SnapshotError, ModelError: it cannot be loaded.
    """
    costs = worker.engine.decoder.costs or MeasuredCosts(worker.target)
    memories = assembly.memory_loader(settings, CountingMetrics())
    tokenizers = assembly.served_vocabularies(settings)
    has_drafter = settings.models.has_drafter
    shared = assembly.shared_drafting(settings.decode, costs, worker.engine.recent, has_drafter=has_drafter)
    load = assembly.snapshot_loader(settings, tokenizers, shared, memories=memories)
    return named_or_base(settings, load, name)


def _run(name: str, engine: Engine, setup: Setup, method: OwnMethod, snapshot: LoadedSnapshot | None = None) -> Method:
    """Return a method of our engine. Its name is the tenant, so that no method drafts from what another one said."""

    def run(prompt: Prompt, max_new_tokens: int) -> BenchRun:
        grammar = None if prompt.schema is None else Grammar("json_schema", prompt.schema)
        request = GenerationRequest(
            **fields_of(prompt, engine.pair.target_tokenizer),
            max_new_tokens=max_new_tokens,
            sampling=Sampling(setup.temperature, grammar=grammar),
            seed=0,
            mode=method.mode,
            num_draft_tokens=method.num_draft_tokens,
            tenant=name,
            is_stored=setup.is_stream or name == TRACED,
        )
        return run_of_steps(engine.stream(engine.prepare(request), snapshot).steps)

    return run


def _recording_engine(worker: assembly.Worker, setup: Setup, stack: ExitStack) -> Engine:
    """Return an engine with the same target and drafter that records into a temporary log."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omnidraft-bench-")))
    settings = setup.settings
    log = settings.log.model_copy(update={"url": f"sqlite:///{folder / 'log.db'}"})
    temporary, topic = settings.model_copy(update={"log": log}), log.traces_topic
    metrics, pair = CountingMetrics(), worker.engine.pair
    producer = TraceProducer(lambda: assembly.log_writer(temporary, topic), settings.recorder, metrics)
    stack.callback(producer.close)
    vocabulary = pair.target_tokenizer.vocabulary
    decoder = Decoder(worker.target, vocabulary, trace_top_k=settings.recorder.top_k)
    recent = worker.engine.recent if setup.is_stream else None
    slot, decode = worker.engine.slot, settings.decode
    return Engine(decoder, pair, slot, producer, metrics, decode=decode, recent=recent)


def huggingface(names: Sequence[str], setup: Setup) -> dict[str, Method]:
    """Return transformers' methods of these names over one target. Raises ModelError when it cannot compute here."""
    from omnidraft.models.hf.generate import HfAssisted, HfGenerate

    tokenizers = assembly.vocabularies(setup.settings)
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
    worker = assembly.engine(config.load(None, {}, **sections), CountingMetrics(), snapshot=setup.snapshot)
    return {name: _run(name, worker.engine, setup, LLAMACPP[name]) for name in names}
