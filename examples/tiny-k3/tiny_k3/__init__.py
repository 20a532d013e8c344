"""The tiny Kimi-K3: its sizes, model, training data, tokenizer and file format."""
