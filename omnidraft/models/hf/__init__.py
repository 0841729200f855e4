"""Models as transformers loads them: tokenizers, target, drafter, the drafter that learns."""
