"""Requests on a running server: which prompts, when they are sent, and what came back."""
