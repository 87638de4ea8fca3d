"""Training: everything that needs Lightning, albumentations or W&B. ``import vitrel`` does not load it."""
