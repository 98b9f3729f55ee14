"""What a model needs on a machine and how fast it will be: the plan before any weight is read."""
