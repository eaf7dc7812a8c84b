"""Where checkpoints lie: folders and object stores."""
