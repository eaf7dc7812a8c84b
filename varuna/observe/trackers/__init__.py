"""Experiment trackers that get the curves of a job: TensorBoard, Weights & Biases, MLflow, trackio."""
