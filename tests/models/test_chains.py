"""Each family of transformers that takes chains only: its text is its own, whatever is drafted, together and alone."""

import pytest

from omnidraft.decode.decoder import Decoder
from omnidraft.models.hf.attention import takes_chains_only
from omnidraft.models.hf.target import transformers_target
from tests.models.families import RECURRENT, make_model
from tests.unit.decode.toys import emitted
from tests.unit.models.hf.test_chain_target import VOCABULARY, check_rejected_chains, check_texts, own_text, request
from tests.unit.models.native.families import VOCAB_SIZE
from tests.unit.models.random_trees import OracleProposer

pytestmark = pytest.mark.models
OTHERS = (
    "Llama 4", "Falcon with ALiBi", "GPT-Neo", "BLOOM", "MPT", "DeepSeek V3.2", "Qwen3.5 with images",
    "Llama 4 with images",
)  # fmt: skip
WITHOUT_DRAFTS = {"RWKV-4", "xLSTM", "RecurrentGemma", "MiniMax-Text-01"}


@pytest.mark.parametrize("name", [*RECURRENT, *OTHERS])
def test_family(name):
    size = {"hidden_size": 128} if name == "xLSTM" else {}  # its own code fails with heads of less than 32
    model = make_model(name, tie_word_embeddings=False, **size)
    assert takes_chains_only(model)
    target = transformers_target(model, name=name, precision="float32")
    limits, wanted = target.limits("fast"), own_text(model)
    assert (limits.num_nodes == 0) == (name in WITHOUT_DRAFTS)
    decoder = Decoder(target, VOCABULARY)
    assert tuple(emitted(decoder.decode(request(), OracleProposer(wanted, limits, VOCAB_SIZE, seed=3)))) == wanted
    for mode in ("fast", "reproducible"):
        check_texts(target, mode)
    if limits.num_nodes:
        check_rejected_chains(target)
