"""400 texts that are hard to cut, broken UTF-8 among them: from bytes to ids and back, in every vocabulary."""

from hypothesis import HealthCheck, given, settings

from omnidraft.models.hf.tokenizer import HfTokenizer
from omnidraft.vocab.retokenise import TailTokeniser, tokenise_bytes
from tests.unit.vocab.texts import ODD

COMPLETE = ("small", "large", "sentencepiece")


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=ODD)
def test_a_text_survives_from_one_vocabulary_into_the_other(tokenizers: dict[str, HfTokenizer], data: bytes) -> None:
    """What the target emits, token by token, is what the drafter reads, and what it would say is the same text."""
    spelled = {name: tokenise_bytes(tokenizers[name], data) for name in COMPLETE}
    for name, ids in spelled.items():
        assert tokenizers[name].vocabulary.spell(ids) == data
    target, drafter = tokenizers["large"], tokenizers["small"]
    tail = TailTokeniser(drafter, ())
    for token in spelled["large"]:
        tail.append(target.vocabulary.spell((token,)))
    assert drafter.vocabulary.spell(tail.ids) + tail.pending == data
