"""A model's profile and the servers made from it: start, watch, talk to, stop."""
