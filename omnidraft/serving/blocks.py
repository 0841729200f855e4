"""The blocks of an answer, where newer protocols have blocks and chat completions one text and a list of calls."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from omnidraft.serving.response_formats import ChoicePart, NamedCall, Thought


@dataclass(slots=True)
class Block:
    """A text, a thought, or a call and its arguments."""

    index: int
    kind: Literal["text", "thought", "call"] = "text"
    call_id: str = ""
    name: str = ""
    """The tool that is called."""
    content: str = ""
    """What was written of the text or of the arguments."""


class BlockChange(Enum):
    """A change of a block: it begins, gets longer, and ends."""

    BEGIN = auto()
    DELTA = auto()
    END = auto()


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """One change of one block."""

    change: BlockChange
    block: Block
    delta: str = ""


class BlockBuilder:
    """Cuts the parts of one choice into blocks. A block ends before the next one begins."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._is_open = False

    def take(self, part: ChoicePart) -> Iterator[BlockEvent]:
        """Yield the changes that the next part makes."""
        for piece in part.pieces:
            index = len(self.blocks)
            match piece:
                case NamedCall():
                    begun, delta = Block(index, "call", piece.id or "", piece.name or ""), piece.arguments
                case Thought():
                    begun, delta = Block(index, "thought"), piece.text
                case str():
                    begun, delta = Block(index), piece
            if begun.call_id or not self._is_open or self.blocks[-1].kind != begun.kind:
                yield from self.finish()
                self.blocks.append(begun)
                self._is_open = True
                yield BlockEvent(BlockChange.BEGIN, begun)
            if delta:
                self.blocks[-1].content += delta
                yield BlockEvent(BlockChange.DELTA, self.blocks[-1], delta)

    def finish(self) -> Iterator[BlockEvent]:
        """Yield the end of the block that is open, if one is."""
        if self._is_open:
            self._is_open = False
            yield BlockEvent(BlockChange.END, self.blocks[-1])


def blocks_of(parts: Iterable[ChoicePart]) -> list[Block]:
    """Return the blocks of a whole choice, given all its parts."""
    builder = BlockBuilder()
    for part in parts:
        for _ in builder.take(part):
            pass
    return builder.blocks
