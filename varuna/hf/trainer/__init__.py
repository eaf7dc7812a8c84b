"""transformers' Trainer over a pipeline. Importing this package does not import transformers."""
