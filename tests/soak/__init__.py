"""A simulated server that drives one head through its slots and checks every output against its own request."""
