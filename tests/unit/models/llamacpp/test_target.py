"""The llama.cpp target against transformers: trees over sequences, exact rollback, equal bits in reproducible mode."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.errors import ContractError, ModelError, ModeRefused, VocabularyError
from omnidraft.models.llamacpp.context import LlamaModel
from omnidraft.models.llamacpp.shared_context import sequences
from omnidraft.models.llamacpp.target import PREFILL_ROWS, LlamaCppTarget, load_target, require_same_ids
from omnidraft.ports import DraftTree
from omnidraft.vocab.tokenizer import Vocabulary
from tests.tiny_gguf import write_gguf
from tests.unit.models.catalog.converted import write_without_weights
from tests.unit.models.catalog.gguf_families import gguf_family_model
from tests.unit.models.drafted_trees import BUSHY, CLOSE, chain, drafted, path_to, scores_by_partition
from tests.unit.models.tiny import VOCAB_SIZE, text, tiny_model, whole_pass
from tests.unit.models.tiny_llamacpp import require_llamacpp, tiny_llamacpp_model, tiny_llamacpp_target


def test_a_node_belongs_to_the_sequences_of_the_leaves_behind_it():
    assert sequences(DraftTree.empty(3)) == [(0,)]
    assert sequences(chain([1, 2, 3])) == [(0,), (0,), (0,)]
    assert sequences(drafted(range(6), (0, 0, 0, 1, 1, 2))) == [(0, 1, 2), (0, 1), (2,), (0,), (1,), (2,)]


@pytest.mark.parametrize("length", [1, 2, 13, 128, 129, 140])
def test_logits_are_those_of_transformers(length):
    prompt = text(length, seed=length)
    scores = tiny_llamacpp_target().open(prompt, 5, "fast").score(chain([prompt[-1], 8, 9]))
    expected = whole_pass(tiny_model("qwen2"), [*prompt, 8, 9])[-3:]
    torch.testing.assert_close(scores, expected, **CLOSE)


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), data=st.data())
def test_any_tree_keeps_any_of_its_paths(seed, data):
    """Three trees in a row: what was kept of those before, and only that, is what the next one continues."""
    kept, target = text(data.draw(st.integers(0, 12)), seed), tiny_llamacpp_target()
    session = target.open([*kept, 5], 60, "fast")
    for step in range(3):
        parents = [0] + [data.draw(st.integers(0, max(node - 1, 0))) for node in range(1, 9)]
        tree = drafted(text(9, seed + step), parents)
        scores = session.score(tree)
        for node in range(9):
            alone = whole_pass(tiny_model("qwen2"), [*kept, *path_to(tree, node)])[-1]
            torch.testing.assert_close(scores[node], alone, **CLOSE)
        nodes = [data.draw(st.integers(0, 8))]
        while nodes[0]:
            nodes.insert(0, parents[nodes[0]])
        session.keep(nodes)
        kept += [tree.tokens[node] for node in nodes]
    session.close()


def test_a_tree_that_was_scored_and_not_kept_leaves_nothing():
    prompt = text(6)
    session = tiny_llamacpp_target().open(prompt, 30, "fast")
    session.score(drafted([prompt[-1], *text(10, seed=2)], BUSHY))
    expected = whole_pass(tiny_model("qwen2"), [*prompt, 4])[-2:]
    torch.testing.assert_close(session.score(chain([prompt[-1], 4])), expected, **CLOSE)


def test_a_tree_may_be_as_bushy_as_the_limits_say():
    target = tiny_llamacpp_target()
    limits = target.limits("fast")
    session = target.open(text(4), limits.num_nodes, "fast")
    num_leaves, num_inner = limits.num_chains, limits.num_nodes - limits.num_chains
    parents = (0, *range(num_inner), *[num_inner] * num_leaves)
    assert session.score(drafted(range(len(parents)), parents)).shape == (limits.num_nodes + 1, VOCAB_SIZE)
    for longer in ((*parents, num_inner + 1), (*parents[:-1], num_inner, num_inner)):
        with pytest.raises(ContractError, match="does not fit"):
            session.score(drafted(range(len(longer)), longer))
    with pytest.raises(ContractError, match="does not fit"):
        session.score(drafted(range(num_leaves + 2), (0,) * (num_leaves + 2)))


def test_the_context_can_be_filled_to_its_last_id():
    session = tiny_llamacpp_target().open(text(200), 56, "fast")
    ids = text(200)
    for token in text(56, seed=1):
        scores = session.score(chain([ids[-1], *text(40, seed=2)]))
        session.keep((0,))
        ids.append(token)
    torch.testing.assert_close(scores[0], whole_pass(tiny_model("qwen2"), ids[:-1])[-1], **CLOSE)


@pytest.mark.parametrize("length", [19, 245])
def test_reproducible_mode_gives_the_same_bits_however_the_text_was_drafted(length):
    """Near position 256 llama.cpp begins to read more cells."""
    roomy = LlamaCppTarget(tiny_llamacpp_model(), name="tiny", rows=4)
    roomy.context_limit = 512
    prompt, following = text(length), text(11, seed=3)
    plain = scores_by_partition(roomy, prompt, following, [1] * 12)
    for sizes in ([4, 4, 4], [1, 3, 4, 2, 2], [2, 2, 2, 3, 3], [3, 1, 1, 4, 3]):
        assert torch.equal(scores_by_partition(roomy, prompt, following, sizes), plain)


def test_rejected_drafts_leave_no_bit_behind():
    target, prompt, following = tiny_llamacpp_target(), text(19), text(9, seed=3)
    plain = scores_by_partition(target, prompt, following, [1] * 10)
    session = target.open(prompt, 40, "reproducible")
    for index, token in enumerate([prompt[-1], *following]):
        scores = session.score(chain([token, *text(3, seed=index + 50)]))
        session.keep((0,))
        assert torch.equal(scores[0], plain[index])


def test_reproducible_mode_takes_only_chains_of_its_width():
    session = tiny_llamacpp_target().open(text(4), 10, "reproducible")
    with pytest.raises(ContractError, match="num_nodes=3"):
        session.score(chain([1, 2, 3, 4, 5]))
    with pytest.raises(ContractError, match="num_chains=1"):
        session.score(drafted([1, 2, 3], [0, 0, 0]))


def test_the_self_test_refuses_a_build_whose_bits_depend_on_the_rest_of_the_pass():
    """Planted: passes of one row are not padded, and llama.cpp computes one row otherwise than four."""
    sessions = []

    class Unpadded(LlamaCppTarget):
        def _padded_session(self, *args):
            session = super()._padded_session(*args)
            session._num_rows = 1
            sessions.append(session)
            return session

    target = Unpadded(tiny_llamacpp_model(), name="tiny", rows=4)
    for _ in range(2):
        with pytest.raises(ModeRefused, match=r"decode\.mode = 'fast'"):
            target.open(text(4), 10, "reproducible")
    assert len(sessions) == 2  # it runs once
    target.open(text(4), 10, "fast")


def test_the_memory_of_a_text_in_reproducible_mode_holds_the_logits_of_its_own_context():
    fast, reproducible = (tiny_llamacpp_target().kv_bytes(100, mode) for mode in ("fast", "reproducible"))
    assert reproducible - fast >= PREFILL_ROWS * VOCAB_SIZE * 4


def test_a_file_that_llamacpp_cannot_read_is_refused_by_name(tmp_path):
    require_llamacpp()
    (tmp_path / "x.gguf").write_bytes(b"GGUF, but no more")
    with pytest.raises(ModelError, match=r"x\.gguf"):
        LlamaModel(tmp_path / "x.gguf")


def test_a_file_with_recurrent_layers_is_refused_with_what_runs_it(tmp_path):
    require_llamacpp()
    with pytest.raises(ModelError, match=r"tiny\.gguf has recurrent layers, .* models\.engine at 'transformers'"):
        LlamaModel(write_without_weights("Mamba 2", tmp_path / "tiny.gguf"))


def test_ids_that_are_not_the_tokenizers_are_refused(tmp_path):
    require_llamacpp()
    spelled = [f"w{token}" for token in range(VOCAB_SIZE)]
    file = write_gguf(tiny_model("qwen2"), tmp_path / "tiny.gguf", spelled, [1] * VOCAB_SIZE)
    pieces = [word.encode() for word in spelled]
    load_target(file, Vocabulary(tuple(pieces), {}, frozenset()), name="tiny")
    shorter, other = pieces[:-1], [*pieces[:7], b"else", *pieces[8:]]
    for wrong, said in [(shorter, "300 ids and the tokenizer 299"), (other, "id 7 is b'w7'")]:
        with pytest.raises(VocabularyError, match=said):
            require_same_ids(LlamaModel(file), Vocabulary(tuple(wrong), {}, frozenset()), "tiny.gguf")


def test_what_a_text_says_does_not_depend_on_others_where_factors_depend_on_length(tmp_path):
    """llama.cpp takes short or long factors of Phi-4-mini's rotary frequencies by the size of the whole context."""
    require_llamacpp()
    model = copy.deepcopy(gguf_family_model("Phi-4-mini"))
    model.config.max_position_embeddings = 8400
    model.config.rope_parameters |= {"original_max_position_embeddings": 2100, "factor": 4.0}
    llama = LlamaModel(write_gguf(model, tmp_path / "tiny.gguf"))
    target = LlamaCppTarget(llama, name="tiny", bits=32)
    prompt = text(20)
    tree = chain([prompt[-1], 8])
    begun = target.open(prompt, 5, "fast")
    alone = begun.score(tree)
    sizes = [target._shared.context.num_cells]
    others = [target.open(text(300, seed=seed), 300, "fast") for seed in range(8)]
    target.forward([], [(other, 299) for other in others])
    sizes.append(target._shared.context.num_cells)
    assert sizes[0] < sizes[1]
    torch.testing.assert_close(begun.score(tree), alone, **CLOSE)
    torch.testing.assert_close(target.open(prompt, 5, "fast").score(tree), alone, **CLOSE)
    torch.testing.assert_close(target.open(prompt, 5, "reproducible").score(tree), alone, **CLOSE)
