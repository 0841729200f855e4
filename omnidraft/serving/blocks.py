"""The blocks of an answer, where newer protocols have blocks and chat completions one text and a list of calls."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from omnidraft.serving.response_formats import ChoicePart, NamedCall, Thought


@dataclass(slots=True)
class Block:
    """A text, a thought, or a call and its arguments."""

    index: int
    call_id: str | None = None
    """None for a text and a thought."""
    is_thought: bool = False
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

    @property
    def open_block(self) -> Block | None:
        """The block that is being written."""
        return self.blocks[-1] if self._is_open else None

    def take(self, part: ChoicePart) -> Iterator[BlockEvent]:
        """Yield the changes that the next part makes."""
        for piece in part.pieces:
            match piece:
                case NamedCall():
                    yield from self._take_call(piece)
                case Thought():
                    yield from self._begin_text(is_thought=True)
                    yield self._add(piece.text)
                case str():
                    yield from self._begin_text(is_thought=False)
                    yield self._add(piece)

    def finish(self) -> Iterator[BlockEvent]:
        """Yield the end of the block that is open, if one is."""
        if self._is_open:
            self._is_open = False
            yield BlockEvent(BlockChange.END, self.blocks[-1])

    def _begin_text(self, *, is_thought: bool) -> Iterator[BlockEvent]:
        last = self.open_block
        if last is None or last.call_id is not None or last.is_thought != is_thought:
            yield from self._begin(Block(len(self.blocks), is_thought=is_thought))

    def _take_call(self, call: NamedCall) -> Iterator[BlockEvent]:
        if call.id is not None:
            yield from self._begin(Block(len(self.blocks), call.id, name=call.name or ""))
        if call.arguments:
            yield self._add(call.arguments)

    def _begin(self, block: Block) -> Iterator[BlockEvent]:
        yield from self.finish()
        self.blocks.append(block)
        self._is_open = True
        yield BlockEvent(BlockChange.BEGIN, block)

    def _add(self, delta: str) -> BlockEvent:
        self.blocks[-1].content += delta
        return BlockEvent(BlockChange.DELTA, self.blocks[-1], delta)


def blocks_of(parts: Iterable[ChoicePart]) -> list[Block]:
    """Return the blocks of a whole choice, given all its parts."""
    builder = BlockBuilder()
    for part in parts:
        for _ in builder.take(part):
            pass
    return builder.blocks
