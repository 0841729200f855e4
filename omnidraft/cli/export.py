"""`omnidraft snapshots export`: a drafter as a folder that other engines load."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from omnidraft import config
from omnidraft.cli.options import Config, Target, download_bars


def export(
    name: Annotated[
        str, typer.Argument(help="Version, alias, latest, a snapshot's folder, or base: the drafter as it comes.")
    ],
    form: Annotated[
        Literal["hf", "hf-target-vocab", "gguf", "gguf-target-vocab"],
        typer.Option("--as", help="What the folder holds; see above."),
    ],
    output: Annotated[Path, typer.Option("--output", help="The folder to write; nothing may be in it.")],
    target: Target = None,
    config_path: Config = None,
) -> None:
    """Write the learned drafter as a folder that other engines load, with the weights that a worker drafts with.

    \b
    hf
      A Hugging Face folder with the drafter's own tokenizer: transformers'
      assistant_model beside assistant_tokenizer, vLLM's draft_model across
      vocabularies.
    hf-target-vocab
      The same with the target's tokenizer, for engines that draft within one
      vocabulary: vLLM's draft_model, transformers' assistant_model alone. Each
      target token has the mean of the embeddings of the draft tokens that spell
      it. Nothing has learned to live with that: tokens of several pieces are
      hardly ever drafted (SmolLM2-135M for Qwen2.5-Coder-1.5B, untrained, GSM8K:
      agreement .63, .67 through our translation). A base for transfer.
    gguf
      A GGUF file with the drafter's own tokenizer: a model for llama.cpp and
      LM Studio, and a draft model for targets of that same tokenizer.
    gguf-target-vocab
      The same with the target's tokenizer, as hf-target-vocab has it: what
      llama.cpp takes as --model-draft, with --spec-type draft-simple.

    Weights are bfloat16, or float32 where LoRA factors were merged. N-gram cache, memory, acceptance head and tenants'
    factors stay behind: other engines have no use for them.
    """
    from omnidraft.assembly.export import export_snapshot

    settings = config.load(config_path, models={"target": target})
    with download_bars():
        export_snapshot(settings, name, form, output)
    print(f"wrote {output}")
