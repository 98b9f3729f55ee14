"""The hybrid state of running requests: pages for MLA, fixed slots for KDA."""
