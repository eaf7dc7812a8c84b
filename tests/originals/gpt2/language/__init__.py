"""The parts of a GPT-2 pretraining script."""
