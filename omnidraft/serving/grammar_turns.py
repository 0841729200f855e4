"""Grammars compile beside the event loop and beside decoding, one after the other, and clients take turns."""

import asyncio
from weakref import WeakValueDictionary

from omnidraft.decode.engine import Engine, GenerationRequest


class GrammarTurns:
    """Clients wait for one grammar of each other client, not for the hundred that one of them sent."""

    def __init__(self) -> None:
        self._of_payer: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._one = asyncio.Lock()  # waiters get it in the order in which they came

    async def prepared(self, payer: str, engine: Engine, question: GenerationRequest) -> GenerationRequest:
        """Return the question with its grammar compiled. Raises RequestError when that cannot be done."""
        if question.sampling.grammar is None:
            return question
        own = self._of_payer.setdefault(payer, asyncio.Lock())
        async with own, self._one:
            return await asyncio.to_thread(engine.prepare, question)
