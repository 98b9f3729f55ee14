"""`k3c report`: what an artifact is, as one HTML file that needs nothing else."""
