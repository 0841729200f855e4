"""Give a model another tokenizer: new embeddings, then distillation from the model as it was. Letters: p is the model
before, q the model after."""
