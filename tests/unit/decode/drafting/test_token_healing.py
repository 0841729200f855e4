"""A line break at the end of a text is drafted again with the white space that follows it."""

from omnidraft.decode.drafting.acceptance_stats import NoiseCoupling
from omnidraft.decode.drafting.drafter import Drafter
from omnidraft.decode.drafting.token_healing import TokenHealing
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.decode.policy.chain import FixedPolicy
from omnidraft.decode.sampling.noise import SeededNoise
from omnidraft.ports import Request, Sampling, TreeLimits
from omnidraft.testing.toy_models import ToyDrafter, ToyTokenizer
from omnidraft.vocab.alignment import align
from omnidraft.vocab.ngram_cache import NgramCache
from tests.unit.decode.checks import spied
from tests.unit.decode.drafting.constrained import Bushy
from tests.unit.decode.toys import table_of

TARGET = ToyTokenizer([b"", b"a", b"b", b":", b"\n", b" ", b"  ", b"\n\n"], {"eos": 0})
DRAFTER = ToyTokenizer([b"", b"a", b"b", b":", b"\n", b" ", b"\n  ", b"\n   "], {"eos": 0})
ALIGNMENT = align(DRAFTER, TARGET)
T = {piece: token for token, piece in enumerate(TARGET.vocabulary.token_bytes) if piece}
D = {piece: token for token, piece in enumerate(DRAFTER.vocabulary.token_bytes) if piece}
INDENTED, FLAT = "a:\n  b:", "a:\nb:"


def drafted(favourites, *, budget=2, **options):
    """Return the tokens of the chain after this text and a line break, and the texts that the drafter has read."""
    tree, texts = healed_tree(favourites, limits=TreeLimits(budget, num_chains=1), **options)
    return [TARGET.vocabulary.token_bytes[token] for token in tree.tokens[1:]], texts


def healed_tree(favourites, *, limits, text=INDENTED, sampling=None, alignment=ALIGNMENT, policy=None):
    ngrams = NgramCache(ALIGNMENT.fingerprint, DRAFTER.vocabulary, TARGET.vocabulary, 10)
    ngrams.insert((D[b"\n"], D[b"\n"]), T[b"\n\n"])
    model = ToyDrafter(table_of(len(D) + 1, {D[last]: D[token] for last, token in favourites.items()}, D[b"a"]))
    healing = TokenHealing(DRAFTER.vocabulary, TARGET, alignment)
    drafter = Drafter(model, DRAFTER, TARGET.vocabulary, alignment, ngrams, NoiseCoupling((0.0,)), healing=healing)
    proposer, spy = spied(TreeProposer((drafter,), lambda mode: policy or FixedPolicy()))
    prompts = tuple(TARGET.encode(text)), tuple(DRAFTER.encode(text))
    session = proposer.open(Request(*prompts, 20, sampling or Sampling(0.0), mode="fast"))
    session.observe([T[b"\n"]])
    return session.propose(len(prompts[0]) + 1, limits, SeededNoise(0, 0, len(TARGET.vocabulary))), spy.texts


def children_of_root(tree):
    return [at for at, parent in enumerate(tree.parents) if at and parent == 0]


def test_the_white_space_behind_a_break_is_drafted_from_tokens_that_begin_with_the_break():
    tokens, texts = drafted({b":": b"\n  ", b"\n  ": b"b"})
    assert tokens == [b"  ", b"b"]
    assert texts[0] == DRAFTER.encode(INDENTED)
    assert [*DRAFTER.encode(INDENTED), D[b"\n  "]] in texts


def test_a_token_of_several_pieces_is_split_behind_the_break():
    favourites = {b":": b"\n   ", b"\n   ": b"b"}
    assert drafted(favourites, budget=3)[0] == [b"  ", b" ", b"b"]
    assert drafted(favourites, budget=3, alignment=ALIGNMENT.without_splits())[0] != [b"  ", b" ", b"b"]


def test_a_line_that_is_not_indented_is_drafted_behind_the_break_alone():
    tokens, texts = drafted({b":": b"\n", b"\n": b"b", b"b": b":"})
    assert tokens == [b"b", b":"]
    assert [*DRAFTER.encode(INDENTED), D[b"\n"]] in texts


def test_a_break_that_was_emitted_is_no_part_of_a_merge():
    assert drafted({b":": b"\n", b"\n": b"\n"}, budget=1)[0] == [b"\n"]
    assert drafted({b":": b"\n", b"\n": b"\n"}, budget=2)[0] in ([b"\n\n"], [b"\n\n", b"\n"], [b"\n", b"\n"])


def test_behind_a_line_without_indentation_the_break_is_read_with_the_text():
    tokens, texts = drafted({b"\n": b"b", b"b": b":"}, text=FLAT)
    assert tokens == [b"b", b":"]
    assert texts[0] == DRAFTER.encode(f"{FLAT}\n")


def test_where_the_request_constrains_tokens_nothing_is_healed():
    biased = Sampling(0.0, logit_bias={T[b"a"]: -1.0})
    _, texts = drafted({b":": b"\n  ", b"\n": b"b"}, sampling=biased)
    assert texts[0] == DRAFTER.encode(f"{INDENTED}\n")


def test_what_follows_an_unlikely_break_is_as_unlikely():
    sure = {b":": b"\n  ", b"\n  ": b"b", b"\n": b":"}
    tree, _ = healed_tree(sure, policy=Bushy(), limits=TreeLimits(8))
    acceptance = {TARGET.vocabulary.token_bytes[tree.tokens[at]]: tree.acceptance[at] for at in children_of_root(tree)}
    assert acceptance[b"  "] > 0.9
    assert acceptance.get(b":", 0.0) < 0.1  # nearly sure behind the break, which is not


def test_a_target_that_joins_all_spaces_before_a_word_needs_no_healing():
    joined = ToyTokenizer([*TARGET.vocabulary.token_bytes, b"   "], {"eos": 0})
    ids = DRAFTER.encode(f"{INDENTED}\n")
    assert TokenHealing(DRAFTER.vocabulary, TARGET, ALIGNMENT).is_due(ids)
    assert not TokenHealing(DRAFTER.vocabulary, joined, align(DRAFTER, joined)).is_due(ids)


def test_a_token_that_the_target_cannot_spell_behind_the_break_is_not_drafted():
    without_spaces = ToyTokenizer([b"", b"a", b"b", b":", b"\n"], {"eos": 0})
    healing = TokenHealing(DRAFTER.vocabulary, without_spaces, align(DRAFTER, without_spaces))
    assert healing.alignment.pieces(D[b"\n  "]) == ()
