"""Which rank holds which routed experts: loads, the search for a placement, what it costs."""
