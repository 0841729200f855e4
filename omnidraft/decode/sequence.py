"""One text under way: what was emitted, its keys in the target, how its next tokens are drawn, and who follows it.

Shapes: N nodes of a tree, V vocabulary.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from omnidraft.decode.drafting.safe_drafting import SafeSession
from omnidraft.decode.logprobs import client_logprobs, top_k_logprobs
from omnidraft.decode.snapshot.slot import LoadedSnapshot
from omnidraft.decode.step_telemetry import StepObserver
from omnidraft.decode.verification import draw_path
from omnidraft.errors import ContractError
from omnidraft.ports import (
    DraftRequest,
    DraftTree,
    Noise,
    Request,
    Step,
    StopCondition,
    Target,
    TargetSession,
    Timings,
    TokenDistributions,
    TreeLimits,
)
from omnidraft.traces.record import Source


@dataclass(slots=True, eq=False)
class SequenceState:
    """A text from its request to its last token. Its draws depend on its request and the target's logits only."""

    request: Request
    noise: Noise
    pipeline: TokenDistributions
    stop_checker: StopCondition
    client: str = ""
    """Sequences are scheduled fairly over clients."""
    cache_scope: str | None = None
    """Sequences of one scope may reuse each other's keys; None reuses nothing."""
    observers: tuple[StepObserver, ...] = ()
    request_id: str = ""
    snapshot: LoadedSnapshot = field(init=False)
    """The snapshot that drafts for it; set by an engine alone."""
    num_emitted: int = 0
    """Tokens since the snapshot drafts for it."""
    has_begun: bool = False
    """Whether a round gave it anything."""
    is_over: bool = False
    draft: SafeSession | None = None
    """Its state in the drafter; None decodes plainly."""
    session: TargetSession | None = None
    """The keys in the target; None while the sequence waits for its turn."""
    num_reused: int = 0
    """Prompt ids whose keys came from another sequence when it was first admitted."""
    was_admitted: bool = False
    ids: list[int] = field(init=False)
    """The prompt's ids and the emitted ones."""

    def __post_init__(self) -> None:
        self.ids = list(self.request.prompt_ids)

    @property
    def seed(self) -> int:
        return self.request.seed

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_left(self) -> int:
        return self.request.max_new_tokens - (len(self.ids) - len(self.request.prompt_ids))

    @property
    def is_finished(self) -> bool:
        return self.stop_checker.finish_reason is not None

    @property
    def num_unread(self) -> int:
        """Prompt ids that the target must read before anything else."""
        return 0 if self.session is None else self.session.num_unread

    @property
    def num_unreplayed(self) -> int:
        """Emitted ids, the last one left out, whose keys were lost when the sequence was preempted."""
        return 0 if self.session is None or self.num_unread else len(self.ids) - 1 - self.session.num_kept

    @property
    def open_session(self) -> TargetSession:
        """The session of an admitted sequence."""
        assert self.session is not None
        return self.session

    def replay(self, num_ids: int) -> DraftTree:
        """Return a chain of the next ids whose keys were lost."""
        start = self.open_session.num_kept
        root, *ids = self.ids[start : start + num_ids]
        return DraftTree.chain(root, ids, [Source.DIRECT] * len(ids), [0.0] * len(ids))

    def draft_request(self, target: Target) -> DraftRequest | None:
        """Return what the next tree is drafted for; nothing is drafted beyond `max_new_tokens`, where the KV cache
        ends. None decodes plainly."""
        if self.draft is None:
            return None
        limits = target.limits(self.request.mode)
        num_nodes = min(limits.num_nodes, self.request.max_draft_tokens, self.num_left - 1)
        limits = TreeLimits(num_nodes, limits.num_chains, limits.depth)
        return DraftRequest(self.draft, len(self.ids), limits, self.noise)

    def draw(self, tree: DraftTree, logits_NV: torch.Tensor, trace_top_k: int | None) -> Step:
        """Let the target draw its path through the tree, and keep it. Raises RequestError, ContractError."""
        position = len(self.ids)
        rows = logits_NV.numpy() if logits_NV.is_cpu and logits_NV.dtype is torch.float32 else logits_NV

        def draw(node: int, index: int) -> int:
            row = rows[node]
            logits_V = row if isinstance(row, np.ndarray) else row.float().cpu().numpy()  # most branches are not taken
            token = self.noise.draw(*self.pipeline.distribution(logits_V), position + index)
            self.pipeline.take(token)
            return token

        path = draw_path(tree, draw, self.stop_checker.ends)
        text, finish_reason = self.stop_checker.take(), self.stop_checker.finish_reason
        nodes, num_log_probs = (0, *path.nodes)[: len(path.emitted)], self.request.num_log_probs
        self.ids += path.emitted
        self.open_session.keep(nodes)
        if (num_kept := self.open_session.num_kept) != len(self.ids) - 1:
            raise ContractError(f"the target keeps the keys of {num_kept} ids, the text has {len(self.ids)}")
        traced = None if trace_top_k is None else top_k_logprobs(logits_NV, nodes, path.emitted, trace_top_k)
        shown = None if num_log_probs is None else client_logprobs(logits_NV, nodes, path.emitted, num_log_probs)
        stop_string = self.stop_checker.stop_string
        return Step(tree, path.emitted, path.nodes, text, finish_reason, Timings(), traced, shown, stop_string)

    def take(self, step: Step) -> None:
        """Show a step to the observers."""
        self.num_emitted += len(step.emitted)
        for observer in self.observers:
            observer.take(step)

    def move(self, snapshot: LoadedSnapshot) -> None:
        """Account for another snapshot that drafts from now on."""
        self.snapshot, self.num_emitted = snapshot, 0
        for observer in self.observers:
            observer.move(snapshot.version)

    def end(self, error: Exception | None) -> None:
        """Tell the observers, once, that nothing follows."""
        if not self.is_over:
            self.is_over = True
            for observer in self.observers:
                observer.end(error)

    def forget(self) -> None:
        """Leave no keys behind, neither in the target nor in the drafter."""
        self.cache_scope, self.request = None, replace(self.request, is_forgotten=True)

    def release(self) -> None:
        """Free the keys in the target and in the drafter; both are computed again when the sequence goes on."""
        if self.session is not None:
            self.session.close()
            self.session = None
        if self.draft is not None:
            self.draft.pause()

    def close(self) -> None:
        """End the text, and free its keys for good."""
        self.end(None)
        self.release()
        if self.draft is not None:
            self.draft.close()
